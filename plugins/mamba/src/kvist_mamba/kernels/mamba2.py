"""The scan of Mamba-2: short rows token by token, long ones in chunks as matrix products.

A program has some channels of one head of one row, and keeps their state from chunk to chunk. Chunks begin anew with
every row: a head's decay is never added up over two sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_mamba.kernels.elementwise import softplus
from kvist_mamba.kernels.rows import CHUNK_TOKENS, Rows

#: Elements of the state that a program holds, token by token and in chunks.
_TILE = 2048
_CHUNK_TILE = 4096
#: Smallest side of a matrix in a product.
_DOT = 16


def mamba2_scan(
    conv: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    states: torch.Tensor,
    rows: Rows,
    values: torch.Tensor,
) -> None:
    """:func:`kvist_mamba.reference.mamba2_scan` of every row, with bias, softplus and limits of ``dt``.

    conv float32 ``[T, H P + 2 G N]``, activated ``x | B | C``; dt ``[T, H]``; a, d, dt_bias ``[H]``; states
    ``[page, H, P, N]`` are brought up to date, values ``[T, H P]`` filled in but for padding.
    """
    _, heads, size, columns = states.shape
    shared = (conv.shape[1] - heads * size) // 2
    tensors = (conv, dt, a, d, dt_bias, states, values)
    numbers = (*dt_limit, dt.stride(0), states.stride(0))
    sizes = {"heads": heads, "group_heads": heads // (shared // columns), "size": size, "columns": columns}
    if len(rows.short):
        width = triton.next_power_of_2(columns)
        block = min(triton.next_power_of_2(size), max(1, _TILE // width))
        _scan[(len(rows.short), heads, triton.cdiv(size, block))](
            *tensors,
            rows.short,
            rows.begins,
            rows.ends,
            rows.sources,
            rows.targets,
            *numbers,
            **sizes,
            block=block,
            width=width,
        )
    if len(rows.long):
        width = max(_DOT, triton.next_power_of_2(columns))
        block = max(_DOT, min(triton.next_power_of_2(size), _CHUNK_TILE // width))
        _chunked_scan[(len(rows.long), heads, triton.cdiv(size, block))](
            *tensors,
            rows.long,
            rows.chunks,
            rows.begins,
            rows.sources,
            rows.targets,
            *numbers,
            **sizes,
            chunk=CHUNK_TOKENS,
            block=block,
            width=width,
        )


@triton.jit
def _scan(
    conv,
    dt,
    a,
    d,
    dt_bias,
    states,
    values,
    short,
    begins,
    ends,
    sources,
    targets,
    dt_low,
    dt_high,
    dt_stride,
    page_stride,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    row, head = tl.load(short + tl.program_id(0)), tl.program_id(1)
    source = tl.load(sources + row)
    if source <= 0:
        return
    shared: tl.constexpr = heads // group_heads * columns
    channels: tl.constexpr = heads * size + 2 * shared
    element = tl.program_id(2) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    known, narrow = element < size, column < columns
    mask = known[:, None] & narrow[None, :]
    own = (head * size + element)[:, None] * columns + column[None, :]
    state = tl.load(states + source.to(tl.int64) * page_stride + own, mask=mask, other=0.0).to(tl.float32)
    rate, skip = tl.load(a + head).to(tl.float32), tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    begin, end = tl.load(begins + row).to(tl.int64), tl.load(ends + row).to(tl.int64)
    for token in range(begin, end):
        at = conv + token * channels
        x = tl.load(at + head * size + element, mask=known, other=0.0)
        both = at + heads * size + head // group_heads * columns + column
        key = tl.load(both, mask=narrow, other=0.0)
        query = tl.load(both + shared, mask=narrow, other=0.0)
        step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, dt_low), dt_high)
        state = tl.exp(step * rate) * state + (step * x)[:, None] * key[None, :]
        value = tl.sum(state * query[None, :], 1) + skip * x
        out = values + (token * heads + head) * size + element
        tl.store(out, value.to(values.dtype.element_ty), mask=known)
        target = tl.load(targets + token)
        if target >= 0:
            place = states + target.to(tl.int64) * page_stride + own
            tl.store(place, state.to(states.dtype.element_ty), mask=mask)


@triton.jit
def _chunked_scan(
    conv,
    dt,
    a,
    d,
    dt_bias,
    states,
    values,
    long,
    chunks,
    begins,
    sources,
    targets,
    dt_low,
    dt_high,
    dt_stride,
    page_stride,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    which, head = long + 3 * tl.program_id(0), tl.program_id(1)
    row = tl.load(which)
    source, begin = tl.load(sources + row).to(tl.int64), tl.load(begins + row)
    shared: tl.constexpr = heads // group_heads * columns
    channels: tl.constexpr = heads * size + 2 * shared
    element = tl.program_id(2) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    known, narrow = element < size, column < columns
    mask = known[:, None] & narrow[None, :]
    own = (head * size + element)[:, None] * columns + column[None, :]
    state = tl.load(states + source * page_stride + own, mask=mask, other=0.0).to(tl.float32)
    rate, skip = tl.load(a + head).to(tl.float32), tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    nth = tl.arange(0, chunk)
    later = nth[:, None] >= nth[None, :]
    for index in range(tl.load(which + 1), tl.load(which + 2)):
        first, count = tl.load(chunks + 2 * index), tl.load(chunks + 2 * index + 1)
        inside = (nth < count) & (first + nth >= begin)
        token = (first + nth).to(tl.int64)
        step = softplus(tl.load(dt + token * dt_stride + head, mask=inside, other=0.0).to(tl.float32) + bias)
        step = tl.where(inside, tl.minimum(tl.maximum(step, dt_low), dt_high), 0.0)
        # Differences of sums that have grown: in float32 they would lose what the sums are larger than they.
        decay = (step * rate).to(tl.float64)
        total, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        at = conv + token[:, None] * channels
        x = tl.load(at + head * size + element[None, :], mask=inside[:, None] & known[None, :], other=0.0)
        both = at + heads * size + head // group_heads * columns + column[None, :]
        keys = tl.load(both, mask=inside[:, None] & narrow[None, :], other=0.0)
        queries = tl.load(both + shared, mask=inside[:, None] & narrow[None, :], other=0.0)
        between = tl.exp(tl.where(later, total[:, None] - total[None, :], float("-inf")).to(tl.float32))
        scaled = step[:, None] * x
        weights = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * between
        value = tl.dot(queries, tl.trans(state), input_precision="tf32x3") * tl.exp(total.to(tl.float32))[:, None]
        value += tl.dot(weights, scaled, input_precision="tf32x3") + skip * x
        out = values + (token[:, None] * heads + head) * size + element[None, :]
        tl.store(out, value.to(values.dtype.element_ty), mask=inside[:, None] & known[None, :])
        left = tl.exp((whole - total).to(tl.float32))
        added = tl.dot(tl.trans(left[:, None] * scaled), keys, input_precision="tf32x3")
        state = tl.exp(whole.to(tl.float32)) * state + added
        target = tl.load(targets + first + count - 1)
        if target >= 0:
            tl.store(states + target.to(tl.int64) * page_stride + own, state.to(states.dtype.element_ty), mask=mask)
