"""The selective scan of Mamba, token by token: some channels of one row per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_mamba.kernels.elementwise import softplus
from kvist_mamba.kernels.rows import Rows

#: Elements of the state that a program holds.
_TILE = 1024


def mamba1_scan(
    u: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
    values: torch.Tensor,
) -> None:
    """:func:`kvist_mamba.reference.mamba1_scan` of every row, with bias and softplus of ``dt``.

    u float32 ``[T, E]``, dt ``[T, E]``, b, c ``[T, N]``, a ``[E, N]``, d, dt_bias ``[E]``; states ``[page, E, N]`` are
    brought up to date, values ``[T, E]`` filled in but for padding.
    """
    channels, columns = a.shape
    width = triton.next_power_of_2(columns)
    block = min(triton.next_power_of_2(channels), max(1, _TILE // width))
    if len(rows.every):
        _scan[(len(rows.every), triton.cdiv(channels, block))](
            u,
            dt,
            b,
            c,
            a,
            d,
            dt_bias,
            states,
            values,
            rows.begins,
            rows.ends,
            rows.sources,
            rows.targets,
            channels,
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            a.stride(0),
            states.stride(0),
            block=block,
            columns=columns,
            width=width,
        )


@triton.jit
def _scan(
    u,
    dt,
    b,
    c,
    a,
    d,
    dt_bias,
    states,
    values,
    begins,
    ends,
    sources,
    targets,
    channels,
    dt_stride,
    b_stride,
    c_stride,
    a_stride,
    page_stride,
    block: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(sources + row)
    if source <= 0:
        return
    channel = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    known, narrow = channel < channels, column < columns
    mask = known[:, None] & narrow[None, :]
    own = channel[:, None] * columns + column[None, :]
    state = tl.load(states + source.to(tl.int64) * page_stride + own, mask=mask, other=0.0).to(tl.float32)
    rate = tl.load(a + channel[:, None] * a_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    skip = tl.load(d + channel, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + channel, mask=known, other=0.0).to(tl.float32)
    begin, end = tl.load(begins + row).to(tl.int64), tl.load(ends + row).to(tl.int64)
    for token in range(begin, end):
        x = tl.load(u + token * channels + channel, mask=known, other=0.0)
        step = softplus(tl.load(dt + token * dt_stride + channel, mask=known, other=0.0).to(tl.float32) + bias)
        key = tl.load(b + token * b_stride + column, mask=narrow, other=0.0).to(tl.float32)
        query = tl.load(c + token * c_stride + column, mask=narrow, other=0.0).to(tl.float32)
        state = tl.exp(step[:, None] * rate) * state + (step * x)[:, None] * key[None, :]
        value = tl.sum(state * query[None, :], 1) + skip * x
        tl.store(values + token * channels + channel, value.to(values.dtype.element_ty), mask=known)
        target = tl.load(targets + token)
        if target >= 0:
            place = states + target.to(tl.int64) * page_stride + own
            tl.store(place, state.to(states.dtype.element_ty), mask=mask)
