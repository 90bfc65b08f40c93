"""The gated delta rule, token by token: some columns of one head of one row per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_mamba.kernels.elementwise import unit
from kvist_mamba.kernels.rows import Rows

#: Elements of the state that a program holds.
_TILE = 2048


def delta_net_scan(
    conv: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
    values: torch.Tensor,
) -> None:
    """:func:`kvist_mamba.reference.delta_net_scan` of every row.

    conv float32 ``[T, 2 Hk dk + Hv dv]``, activated ``q | k | v``; log_decay, beta ``[T, Hv]``; states
    ``[page, Hv, dk, dv]`` are brought up to date, values ``[T, Hv dv]`` filled in but for padding.
    """
    _, heads, key_size, value_size = states.shape
    key_heads = (conv.shape[1] - heads * value_size) // (2 * key_size)
    height = triton.next_power_of_2(key_size)
    block = min(triton.next_power_of_2(value_size), max(1, _TILE // height))
    if len(rows.every):
        _scan[(len(rows.every), heads, triton.cdiv(value_size, block))](
            conv,
            log_decay,
            beta,
            states,
            values,
            rows.starts,
            rows.sources,
            rows.targets,
            log_decay.stride(0),
            beta.stride(0),
            states.stride(0),
            key_size**-0.5,
            heads=heads,
            key_heads=key_heads,
            key_size=key_size,
            value_size=value_size,
            height=height,
            block=block,
        )


@triton.jit
def _scan(
    conv,
    log_decay,
    beta,
    states,
    values,
    starts,
    sources,
    targets,
    decay_stride,
    beta_stride,
    page_stride,
    scale,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    source = tl.load(sources + row)
    if source <= 0:
        return
    keys: tl.constexpr = key_heads * key_size
    channels: tl.constexpr = 2 * keys + heads * value_size
    line = tl.arange(0, height)
    element = tl.program_id(2) * block + tl.arange(0, block)
    low, known = line < key_size, element < value_size
    mask = low[:, None] & known[None, :]
    own = (head * key_size + line)[:, None] * value_size + element[None, :]
    state = tl.load(states + source.to(tl.int64) * page_stride + own, mask=mask, other=0.0).to(tl.float32)
    key_at = head // (heads // key_heads) * key_size + line
    begin, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    for token in range(begin, end):
        at = conv + token * channels
        query = unit(tl.load(at + key_at, mask=low, other=0.0)) * scale
        key = unit(tl.load(at + keys + key_at, mask=low, other=0.0))
        value = tl.load(at + 2 * keys + head * value_size + element, mask=known, other=0.0)
        state *= tl.exp(tl.load(log_decay + token * decay_stride + head).to(tl.float32))
        strength = tl.load(beta + token * beta_stride + head).to(tl.float32)
        change = strength * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * change[None, :]
        result = tl.sum(state * query[:, None], 0)
        out = values + (token * heads + head) * value_size + element
        tl.store(out, result.to(values.dtype.element_ty), mask=known)
        target = tl.load(targets + token)
        if target >= 0:
            place = states + target.to(tl.int64) * page_stride + own
            tl.store(place, state.to(states.dtype.element_ty), mask=mask)
