"""Attention whose keys are split over programs: decode over selected blocks, and dense layers over all of them.

Each program leaves the largest score, the sum of the weights and the weighted values of its blocks; ``combine`` puts
the parts of a query together.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl

from kvist_minimax_m3.batch import Batch

#: Queries times query heads of one program of a dense layer.
_TILE_ROWS = 64
#: Programs that keep a large GPU busy; more parts only cost their combination.
_PROGRAMS = 512
#: Elements of partial values that a program combines.
_COMBINED = 4096


@attrs.frozen(eq=False)
class Parts:
    """Softmax in parts: of every query head ``count`` partial results, in float32.

    best, total: ``[T, query heads, count]``, largest score (-inf for an empty part) and sum of weights below it.
    value: ``[T, query heads, count, value size]``, weighted but not divided. Undefined for an empty part.
    """

    best: torch.Tensor
    total: torch.Tensor
    value: torch.Tensor

    @classmethod
    def empty(cls, query: torch.Tensor, count: int, value_size: int) -> Parts:
        """Room for the parts of ``query [T, query heads, size]``; all are empty."""
        shape = (*query.shape[:2], count)
        best = torch.full(shape, float("-inf"), dtype=torch.float32, device=query.device)
        return cls(best, torch.empty_like(best), best.new_empty(*shape, value_size))

    def combine(self, output: torch.Tensor) -> None:
        """Write the attended values of all parts to ``output [T, query heads, value size]``, contiguous."""
        tokens, heads, count, size = self.value.shape
        parts, row_count = triton.next_power_of_2(count), tokens * heads
        rows = max(1, min(_COMBINED // (parts * size), triton.next_power_of_2(row_count)))
        _combine[(triton.cdiv(row_count, rows),)](
            self.best, self.total, self.value, output, row_count, count, rows=rows, parts=parts, size=size
        )


def attend_split(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    scale: float,
    block_tokens: int,
    blocks: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Attention of leading tokens of the step, each over its own blocks, or over everything before it.

    query ``[n, query heads, E]``: the step's first ``n`` tokens, all of them for ``blocks=None``. key, value: the
    layer's pages ``[page, slot, head, element]``. blocks: int32 ``[n, key heads, width]`` ascending with -1 behind.
    output: ``[n, query heads, value size]``, contiguous, is written.
    """
    token_count, query_heads, size = query.shape
    key_heads, value_size = key.shape[2], value.shape[3]
    group = query_heads // key_heads
    queries = 1 if blocks is not None else max(1, _TILE_ROWS // group)
    width = blocks.shape[2] if blocks is not None else triton.cdiv(max(batch.lengths, default=0), block_tokens)
    if not token_count:
        return
    tiles = batch.tiles(queries)
    tile_count = len(tiles) if blocks is None else token_count
    splits = min(width, max(1, _PROGRAMS // (tile_count * key_heads)))
    parts = Parts.empty(query, splits, value_size)
    _attend[(tile_count, key_heads, splits)](
        query.contiguous(),
        key,
        value,
        batch.pages,
        tiles,
        batch.positions,
        blocks,
        parts.best,
        parts.total,
        parts.value,
        scale,
        width,
        triton.cdiv(width, splits),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        value.stride(0),
        value.stride(1),
        value.stride(2),
        batch.pages.stride(0),
        dense=blocks is None,
        key_heads=key_heads,
        group=group,
        tile_rows=max(16, triton.next_power_of_2(queries * group)),
        size=size,
        value_size=value_size,
        page_tokens=batch.page_tokens,
        block_tokens=block_tokens,
    )
    parts.combine(output)


@triton.jit
def _attend(
    query,
    key,
    value,
    pages,
    tiles,
    positions,
    blocks,
    part_best,
    part_total,
    part_value,
    scale,
    width,
    blocks_per_split,
    key_page,
    key_slot,
    key_head,
    value_page,
    value_slot,
    value_head,
    table_stride,
    dense: tl.constexpr,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    page_tokens: tl.constexpr,
    block_tokens: tl.constexpr,
):
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    row, first, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    at = tl.arange(0, tile_rows)
    inside = at < count * group
    token = first + at // group
    out = (token * key_heads + head) * group + at % group
    position = tl.load(positions + token, mask=inside, other=-1)
    last = tl.max(position, 0)
    element, value_element = tl.arange(0, size), tl.arange(0, value_size)
    queries = tl.load(query + out[:, None] * size + element[None, :], mask=inside[:, None], other=0.0)

    best = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    attended = tl.zeros((tile_rows, value_size), tl.float32)
    begin = split * blocks_per_split
    end = tl.minimum(begin + blocks_per_split, width)
    if dense:
        end = tl.minimum(end, (last // block_tokens + 1).to(tl.int32))
    for place in range(begin, end):
        block = place
        if not dense:
            block = tl.load(blocks + (first * key_heads + head) * width + place)
        if block >= 0:
            key_position = block * block_tokens + tl.arange(0, block_tokens)
            there = key_position <= last
            page = tl.load(pages + row * table_stride + key_position // page_tokens, mask=there, other=0).to(tl.int64)
            slot = key_position % page_tokens
            key_at = page * key_page + slot * key_slot + head * key_head
            keys = tl.load(key + key_at[:, None] + element[None, :], mask=there[:, None], other=0.0)
            value_at = page * value_page + slot * value_slot + head * value_head
            values = tl.load(value + value_at[:, None] + value_element[None, :], mask=there[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
            scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            # A query that sees nothing of this part keeps -inf; minus itself that is not a number.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - shift[:, None])
            shrink = tl.exp(best - shift)
            total = total * shrink + tl.sum(weights, 1)
            attended = attended * shrink[:, None]
            attended += tl.dot(weights.to(queries.dtype), values.to(queries.dtype), input_precision="ieee")
            best = higher
    part = out * splits + split
    tl.store(part_best + part, best, mask=inside)
    tl.store(part_total + part, total, mask=inside)
    tl.store(
        part_value + part.to(tl.int64)[:, None] * value_size + value_element[None, :], attended, mask=inside[:, None]
    )


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
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    part = row[:, None] * count + tl.arange(0, parts)[None, :]
    there = (row[:, None] < row_count) & (tl.arange(0, parts)[None, :] < count)
    highest = tl.load(best + part, mask=there, other=float("-inf"))
    filled = highest > float("-inf")
    # A row behind the last one has nothing: its shift only has to be a number.
    peak = tl.where(row < row_count, tl.max(highest, 1), 0.0)
    weight = tl.where(filled, tl.exp(highest - peak[:, None]), 0.0)
    totals = tl.load(total + part, mask=filled, other=0.0)
    element = tl.arange(0, size)
    values = tl.load(value + part[:, :, None] * size + element[None, None, :], mask=filled[:, :, None], other=0.0)
    divisor = tl.where(row < row_count, tl.sum(totals * weight, 1), 1.0)
    result = tl.sum(values * weight[:, :, None], 1) / divisor[:, None]
    at = output + row[:, None] * size + element[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=(row < row_count)[:, None])
