"""Attention over two pools of pages, a window's rows and compressed ones, with a sink: one program per query and some
of its heads. Where that would be few programs, the rows are split over several, and ``combine`` puts them together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_deepseek_v4.kernels.batch import Batch
from kvist_deepseek_v4.kernels.score import compute_dtype
from kvist_deepseek_v4.rows import StreamRows

#: Query heads, and rows, that a program takes at a time.
_HEADS, _ROWS = 32, 32
#: Programs that keep a large GPU busy; more parts only cost their combination.
_PROGRAMS = 512
#: Elements of partial results that a program combines.
_COMBINED = 8192


def attend(
    query: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
    kv: StreamRows,
    own: torch.Tensor,
    window: int,
    compressed: StreamRows | None,
    ratio: int,
    ids: torch.Tensor | None,
    batch: Batch,
) -> torch.Tensor:
    """One layer's attention of all tokens of the step: ``[T, heads, D]`` in the query's dtype.

    query ``[T, heads, D]``. own ``[T, D]``: the step's window rows as they are stored; earlier ones are in pages.
    compressed: its rows, closed ones, are all in pages; ``None`` for a layer without. ids: int32 ``[T, n]``, the
    compressed rows that each query reads, -1 for none; ``None``: all that it sees.
    """
    tokens, heads, size = query.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not tokens:
        return output
    [view], table = kv.views, batch.table(kv.group)
    pool, pool_table, block_rows = view, table, 1
    if compressed is not None:
        [pool], pool_table, block_rows = compressed.views, batch.table(compressed.group), compressed.block_rows
    width = 0 if compressed is None else batch.longest // ratio if ids is None else ids.shape[1]
    tile_heads = min(_HEADS, max(16, triton.next_power_of_2(heads)))
    head_tiles = triton.cdiv(heads, tile_heads)
    row_tiles = triton.cdiv(window, _ROWS) + triton.cdiv(width, _ROWS)
    splits = max(1, min(row_tiles, _PROGRAMS // (tokens * head_tiles)))
    best = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query.device)
    total, parts = torch.empty_like(best), best.new_empty(tokens, heads, splits, size) if splits > 1 else best
    _attend[(tokens, head_tiles, splits)](
        query.contiguous(),
        sinks.contiguous(),
        own,
        view,
        table,
        pool,
        pool_table,
        ids,
        batch.token_rows,
        batch.positions,
        batch.firsts,
        batch.begins,
        output,
        best,
        total,
        parts,
        scale,
        width,
        triton.cdiv(row_tiles, splits),
        view.stride(0),
        table.stride(0),
        pool.stride(0),
        pool_table.stride(0),
        heads=heads,
        tile_heads=tile_heads,
        size=size,
        tile=max(16, triton.next_power_of_2(size)),
        rows=_ROWS,
        window=window,
        slots=kv.slots,
        block_tokens=batch.block_tokens,
        ratio=ratio,
        block_rows=block_rows,
        split=splits > 1,
        compute=compute_dtype(query.dtype, view.dtype),
        num_warps=8,
    )
    if splits > 1:
        count, padded = tokens * heads, triton.next_power_of_2(splits)
        tile = triton.next_power_of_2(size)
        rows = max(1, min(_COMBINED // (padded * tile), triton.next_power_of_2(count)))
        _combine[(triton.cdiv(count, rows),)](
            best, total, parts, output, count, splits, rows=rows, parts=padded, size=size, tile=tile
        )
    return output


@triton.jit
def _fold(best, total, attended, queries, values, seen, scale):
    """Add rows to a softmax that is under way."""
    scores = tl.dot(queries, tl.trans(values), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    # A part that has seen nothing yet keeps minus infinity; minus itself that is not a number.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - shift[:, None])
    shrink = tl.exp(best - shift)
    total = total * shrink + tl.sum(weights, 1)
    attended = attended * shrink[:, None]
    attended += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total, attended


@triton.jit
def _attend(
    query,
    sinks,
    own,
    kv,
    table,
    pool,
    pool_table,
    ids,
    token_rows,
    positions,
    firsts,
    begins,
    output,
    part_best,
    part_total,
    part_value,
    scale,
    width,
    tiles_per_split,
    page_stride,
    table_stride,
    pool_page,
    pool_table_stride,
    heads: tl.constexpr,
    tile_heads: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    window: tl.constexpr,
    slots: tl.constexpr,
    block_tokens: tl.constexpr,
    ratio: tl.constexpr,
    block_rows: tl.constexpr,
    split: tl.constexpr,
    compute: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row, position = tl.load(token_rows + token), tl.load(positions + token)
    first, begin = tl.load(firsts + row), tl.load(begins + row)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    element = tl.arange(0, tile)
    inside = (head < heads)[:, None] & (element < size)[None, :]
    out = token * heads + head
    queries = tl.load(query + out[:, None] * size + element[None, :], mask=inside, other=0.0).to(compute)

    # The sink is one more score, of a row of zeros; the first part has it.
    best = tl.load(sinks + head, mask=head < heads, other=float("-inf")).to(tl.float32)
    best = tl.where(part == 0, best, float("-inf"))
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    attended = tl.zeros((tile_heads, tile), tl.float32)
    window_tiles: tl.constexpr = (window + rows - 1) // rows
    low, high = part * tiles_per_split, (part + 1) * tiles_per_split
    for place in range(tl.minimum(low, window_tiles), tl.minimum(high, window_tiles)):
        offset = place * rows + tl.arange(0, rows)
        number = position - window + 1 + offset
        seen = (number >= 0) & (offset < window)
        is_own = seen & (number >= begin)
        at_own = own + (first + number - begin).to(tl.int64)[:, None] * size + element[None, :]
        values = tl.load(at_own, mask=is_own[:, None] & (element < size)[None, :], other=0.0)
        cached = seen & (number < begin)
        page = tl.load(table + row * table_stride + number // block_tokens, mask=cached, other=0).to(tl.int64)
        at_kv = kv + page[:, None] * page_stride + (number % slots)[:, None] * size + element[None, :]
        cached = cached & (page >= 0)
        values += tl.load(at_kv, mask=cached[:, None] & (element < size)[None, :], other=0.0)
        best, total, attended = _fold(best, total, attended, queries, values.to(compute), seen, scale)
    if ratio > 0:
        end = width
        if ids is None:
            end = tl.minimum(width, (position + 1) // ratio)
        last = tl.minimum(high - window_tiles, (end + rows - 1) // rows)
        for place in range(tl.maximum(low - window_tiles, 0), last):
            number = place * rows + tl.arange(0, rows)
            seen = number < end
            if ids is not None:
                number = tl.load(ids + token * width + number, mask=seen, other=-1)
                seen = number >= 0
            page = tl.load(pool_table + row * pool_table_stride + number // block_rows, mask=seen, other=0).to(tl.int64)
            at_pool = pool + page[:, None] * pool_page + (number % block_rows)[:, None] * size + element[None, :]
            there = seen & (page >= 0)
            values = tl.load(at_pool, mask=there[:, None] & (element < size)[None, :], other=0.0)
            best, total, attended = _fold(best, total, attended, queries, values.to(compute), seen, scale)
    if split:
        at_part = out * tl.num_programs(2) + part
        tl.store(part_best + at_part, best, mask=head < heads)
        tl.store(part_total + at_part, total, mask=head < heads)
        tl.store(part_value + at_part[:, None] * size + element[None, :], attended, mask=inside)
    else:
        attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + out[:, None] * size + element[None, :], attended.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    best,
    total,
    value,
    output,
    row_count,
    count,
    rows: tl.constexpr,
    parts: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    number = tl.arange(0, parts)
    there = (row < row_count)[:, None] & (number < count)[None, :]
    at = row[:, None] * count + number[None, :]
    highest = tl.load(best + at, mask=there, other=float("-inf"))
    # The first part has the sink, so only rows that are not there have nothing.
    peak = tl.where(row < row_count, tl.max(highest, 1), 0.0)
    weight = tl.exp(highest - peak[:, None])
    element = tl.arange(0, tile)
    filled = there[:, :, None] & (element < size)[None, None, :]
    values = tl.load(value + at[:, :, None] * size + element[None, None, :], mask=filled, other=0.0)
    divisor = tl.sum(tl.load(total + at, mask=there, other=0.0) * weight, 1)
    result = tl.sum(values * weight[:, :, None], 1) / tl.where(row < row_count, divisor, 1.0)[:, None]
    inside = (row < row_count)[:, None] & (element < size)[None, :]
    tl.store(output + row[:, None] * size + element[None, :], result.to(output.dtype.element_ty), mask=inside)
