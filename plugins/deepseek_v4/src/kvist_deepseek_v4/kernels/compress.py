"""Compressed rows of the windows that a step closes: one program per window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_deepseek_v4.kernels.batch import Batch
from kvist_deepseek_v4.rows import StreamRows

#: Elements of states that a program holds at a time.
_TILE = 4096


def compress(
    states: StreamRows,
    rows: StreamRows,
    own: torch.Tensor,
    position_bias: torch.Tensor,
    norm: torch.Tensor,
    frequencies: torch.Tensor,
    eps: float,
    batch: Batch,
) -> None:
    """Pool, norm, rotate and store what :mod:`kvist_deepseek_v4.compress` makes of each closed window.

    States before the step are read from pages, so the step's own, ``own [T, 2, series * size]``, must not have been
    written yet: a ring may have no other place for them. ``position_bias`` ``[ratio, series * size]``, ``norm``
    ``[size]``, ``frequencies`` ``[pairs]``.
    """
    ratio, width = position_bias.shape
    closed = batch.closed(ratio)
    if not len(closed):
        return
    [state_view], [view] = states.views, rows.views
    size = len(norm)
    tile = triton.next_power_of_2(size)
    # Angles are those of the plain form, to the bit.
    angles = (closed[:, 1] * ratio).float()[:, None] * frequencies.float()
    state_table, table = batch.table(states.group), batch.table(rows.group)
    _compress[(len(closed),)](
        own.contiguous(),
        position_bias.contiguous(),
        state_view,
        state_table,
        closed,
        batch.firsts,
        batch.begins,
        norm.contiguous(),
        angles.cos(),
        angles.sin(),
        view,
        table,
        eps,
        state_view.stride(0),
        state_table.stride(0),
        view.stride(0),
        table.stride(0),
        ratio=ratio,
        series=width // size,
        size=size,
        tile=tile,
        tokens=max(1, min(triton.next_power_of_2(ratio), _TILE // tile)),
        pairs=len(frequencies),
        state_slots=states.slots,
        block_tokens=batch.block_tokens,
        block_rows=rows.block_rows,
    )


@triton.jit
def _compress(
    own,
    bias,
    states,
    state_table,
    closed,
    firsts,
    begins,
    norm,
    cos,
    sin,
    rows,
    table,
    eps,
    state_page,
    state_table_stride,
    page,
    table_stride,
    ratio: tl.constexpr,
    series: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    tokens: tl.constexpr,
    pairs: tl.constexpr,
    state_slots: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
):
    place = tl.program_id(0)
    row, window = tl.load(closed + place * 2), tl.load(closed + place * 2 + 1)
    first, begin = tl.load(firsts + row), tl.load(begins + row)
    element = tl.arange(0, tile)
    there = element < size
    width: tl.constexpr = series * size
    best = tl.full((tile,), float("-inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    pooled = tl.zeros((tile,), tl.float32)
    for part in tl.static_range(series):
        # With two series the window in front gives its first one, the window itself its second one.
        start = (window - (series - 1) + part) * ratio
        column = part * size + element
        for at in range(0, ratio, tokens):
            offset = at + tl.arange(0, tokens)
            position = start + offset
            used = (position >= 0) & (offset < ratio)
            is_own = position >= begin
            new = (used & is_own)[:, None] & there[None, :]
            token = (first + position - begin).to(tl.int64)
            at_own = own + token[:, None] * (2 * width) + column[None, :]
            content = tl.load(at_own, mask=new, other=0.0).to(tl.float32)
            gate = tl.load(at_own + width, mask=new, other=0.0).to(tl.float32)
            at_bias = bias + (position % ratio)[:, None] * width + column[None, :]
            gate += tl.load(at_bias, mask=new, other=0.0).to(tl.float32)
            cached = used & (is_own == 0)
            at_table = state_table + row * state_table_stride + position // block_tokens
            number = tl.load(at_table, mask=cached, other=-1).to(tl.int64)
            old = (cached & (number >= 0))[:, None] & there[None, :]
            at_state = states + number[:, None] * state_page + (position % state_slots)[:, None] * (2 * width)
            content += tl.load(at_state + column[None, :], mask=old, other=0.0)
            gate += tl.load(at_state + width + column[None, :], mask=old, other=0.0)
            gate = tl.where(used[:, None], gate, float("-inf"))
            higher = tl.maximum(best, tl.max(gate, 0))
            # Before the first window there is nothing; minus infinity minus itself is not a number.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(gate - shift[None, :])
            shrink = tl.exp(best - shift)
            total = total * shrink + tl.sum(weights, 0)
            pooled = pooled * shrink + tl.sum(weights * content, 0)
            best = higher
    value = tl.where(there, pooled / tl.where(there, total, 1.0), 0.0)
    weight = tl.load(norm + element, mask=there, other=0.0).to(tl.float32)
    value = weight * value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    even, odd = tl.split(tl.reshape(value, (tile // 2, 2)))
    pair = tl.arange(0, tile // 2) - (size // 2 - pairs)
    turned = (pair >= 0) & (pair < pairs)
    c = tl.load(cos + place * pairs + pair, mask=turned, other=1.0)
    s = tl.load(sin + place * pairs + pair, mask=turned, other=0.0)
    value = tl.interleave(even * c - odd * s, odd * c + even * s)
    number = tl.load(table + row * table_stride + window // block_rows).to(tl.int64)
    at = rows + number * page + (window % block_rows) * size + element
    tl.store(at, value.to(rows.dtype.element_ty), mask=element < tl.where(number < 0, 0, size))
