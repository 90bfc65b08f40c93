"""The causal convolution over all rows of a step at once, and its states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_mamba.kernels.elementwise import silu
from kvist_mamba.kernels.rows import Rows

#: Channels of one program, and at most so many tokens.
_CHANNELS = 128
_TOKENS = 16


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: Rows,
    *,
    activation: bool,
) -> torch.Tensor:
    """inputs ``[T, channels]``, weight ``[channels, K]``, bias ``[channels]``; states ``[page, channels, K - 1]`` are
    brought up to date. activation: is the result ``silu`` of the sums?

    Returns float32 ``[T, channels]``, zeros for padding.
    """
    token_count, channels = inputs.shape
    sums = torch.empty(token_count, channels, dtype=torch.float32, device=inputs.device)
    if not token_count:
        return sums
    columns, block = states.shape[2], min(_CHANNELS, triton.next_power_of_2(channels))
    tokens = min(_TOKENS, triton.next_power_of_2(token_count))
    blocks = triton.cdiv(channels, block)
    _convolve[(triton.cdiv(token_count, tokens), blocks)](
        inputs,
        weight,
        bias,
        states,
        rows.token_starts,
        rows.token_sources,
        sums,
        token_count,
        channels,
        inputs.stride(0),
        weight.stride(0),
        states.stride(0),
        tokens=tokens,
        block=block,
        columns=columns,
        activation=activation,
    )
    # A launch of its own: in place, a row's last token must not write what its first ones still read.
    if len(rows.written):
        _update[(len(rows.written), blocks)](
            inputs,
            states,
            rows.written,
            rows.targets,
            rows.token_starts,
            rows.token_sources,
            channels,
            inputs.stride(0),
            states.stride(0),
            block=block,
            columns=columns,
            slots=triton.next_power_of_2(columns),
        )
    return sums


@triton.jit
def _convolve(
    inputs,
    weight,
    bias,
    states,
    token_starts,
    token_sources,
    sums,
    token_count,
    channels,
    input_stride,
    weight_stride,
    page_stride,
    tokens: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
    activation: tl.constexpr,
):
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    there, known = token < token_count, channel < channels
    source = tl.load(token_sources + token, mask=there, other=0)
    nth = token - tl.load(token_starts + token, mask=there, other=0)
    real = source > 0
    own = states + source.to(tl.int64)[:, None] * page_stride + channel[None, :] * columns
    result = tl.zeros((tokens, block), tl.float32)
    if bias is not None:
        result += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    for column in tl.static_range(columns + 1):
        # The tokens so far stand behind the state's columns; this is the window's column of both together.
        place = nth + column - columns
        mask = real[:, None] & known[None, :]
        at = inputs + (token + column - columns).to(tl.int64)[:, None] * input_stride + channel[None, :]
        new = tl.load(at, mask=mask & (place >= 0)[:, None], other=0.0).to(tl.float32)
        if column < columns:
            old = tl.load(own + (nth + column)[:, None], mask=mask & (place < 0)[:, None], other=0.0)
            new += old.to(tl.float32)
        factor = tl.load(weight + channel.to(tl.int64) * weight_stride + column, mask=known, other=0.0)
        result += new * factor.to(tl.float32)[None, :]
    if activation:
        result = silu(result)
    result = tl.where(real[:, None], result, 0.0)
    tl.store(
        sums + token.to(tl.int64)[:, None] * channels + channel[None, :],
        result,
        mask=there[:, None] & known[None, :],
    )


@triton.jit
def _update(
    inputs,
    states,
    written,
    targets,
    token_starts,
    token_sources,
    channels,
    input_stride,
    page_stride,
    block: tl.constexpr,
    columns: tl.constexpr,
    slots: tl.constexpr,
):
    token = tl.load(written + tl.program_id(0))
    target = tl.load(targets + token)
    if target < 0:
        return
    source = tl.load(token_sources + token).to(tl.int64)
    nth = token - tl.load(token_starts + token)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.arange(0, slots)
    mask = (channel < channels)[:, None] & (column < columns)[None, :]
    place = nth + 1 + column - columns
    at = inputs + (token + 1 + column - columns).to(tl.int64)[None, :] * input_stride + channel[:, None]
    new = tl.load(at, mask=mask & (place >= 0)[None, :], other=0.0)
    old_at = states + source * page_stride + channel[:, None] * columns + (nth + 1 + column)[None, :]
    old = tl.load(old_at, mask=mask & (place < 0)[None, :], other=0.0)
    values = tl.where((place >= 0)[None, :], new.to(states.dtype.element_ty), old)
    # A column may move to where another thread reads one.
    tl.debug_barrier()
    own = states + target.to(tl.int64) * page_stride + channel[:, None] * columns + column[None, :]
    tl.store(own, values, mask=mask)
