"""Attention of a prefill over selected blocks: one program per block, for all queries that read it.

The selection says which blocks a query reads. Turned round, it says which queries read a block, so that a block's keys
and values are loaded once, however many of the step's queries read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_minimax_m3.batch import Batch
from kvist_minimax_m3.kernels.split import Parts

#: Queries times query heads that a program works on at a time.
_TILE_ROWS = 64
#: float32 elements of partial values that are held at a time; longer chunks are computed in slices.
_PART_ELEMENTS = 1 << 25


def readers(
    blocks: torch.Tensor, rows: torch.Tensor, row_count: int, block_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a selection round, on the device and without a look at its values.

    blocks: int32 ``[n, heads, width]``, -1 for none, of tokens that belong to int64 ``rows [n]``.
    Returns int64 ``starts [row_count * block_count * heads + 1]`` and int64 ``entries [n * heads * width]``. Those who
    read block ``b`` of row ``r`` for head ``h`` are ``entries[starts[i] : starts[i + 1]]`` with
    ``i = (r * block_count + b) * heads + h``, as flat indices into ``blocks``, ascending.
    """
    heads = blocks.shape[1]
    count = row_count * block_count * heads
    head = torch.arange(heads, device=blocks.device)[:, None]
    target = (rows[:, None, None] * block_count + blocks) * heads + head
    target = target.masked_fill(blocks < 0, count).flatten()
    ordered, entries = target.sort(stable=True)
    return torch.searchsorted(ordered, torch.arange(count + 1, device=blocks.device)), entries


def attend_transposed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    scale: float,
    block_tokens: int,
    blocks: torch.Tensor,
    first_token: int,
    output: torch.Tensor,
) -> None:
    """Attention of the step's tokens from ``first_token`` on.

    query ``[n, query heads, E]``, blocks int32 ``[n, key heads, width]`` and ``output [n, query heads, value size]``,
    which is written, belong to those tokens. key, value: the layer's pages ``[page, slot, head, element]``.
    """
    per_token = query.shape[1] * blocks.shape[2] * value.shape[3]
    slice_tokens = max(1, _PART_ELEMENTS // per_token)
    for first in range(0, len(query), slice_tokens):
        part = slice(first, first + slice_tokens)
        _attend_slice(
            query[part].contiguous(),
            key,
            value,
            batch,
            scale,
            block_tokens,
            blocks[part],
            first_token + first,
            output[part],
        )


def _attend_slice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    scale: float,
    block_tokens: int,
    blocks: torch.Tensor,
    first_token: int,
    output: torch.Tensor,
) -> None:
    key_heads, value_size = key.shape[2], value.shape[3]
    group, width = query.shape[1] // key_heads, blocks.shape[2]
    row_count, block_count = len(batch.lengths), triton.cdiv(max(batch.lengths), block_tokens)
    rows = batch.rows[first_token : first_token + len(query)]
    starts, entries = readers(blocks, rows, row_count, block_count)
    parts = Parts.empty(query, width, value_size)
    queries = max(1, _TILE_ROWS // group)
    _attend_block[(row_count * block_count, key_heads)](
        query,
        key,
        value,
        batch.pages,
        batch.positions[first_token:],
        starts,
        entries,
        parts.best,
        parts.total,
        parts.value,
        scale,
        block_count,
        width,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        value.stride(0),
        value.stride(1),
        value.stride(2),
        batch.pages.stride(0),
        batch.pages.shape[1],
        key_heads=key_heads,
        group=group,
        queries=queries,
        tile_rows=max(16, triton.next_power_of_2(queries * group)),
        size=query.shape[2],
        value_size=value_size,
        page_tokens=batch.page_tokens,
        block_tokens=block_tokens,
    )
    parts.combine(output)


@triton.jit
def _attend_block(
    query,
    key,
    value,
    pages,
    positions,
    starts,
    entries,
    part_best,
    part_total,
    part_value,
    scale,
    block_count,
    width,
    key_page,
    key_slot,
    key_head,
    value_page,
    value_slot,
    value_head,
    table_stride,
    table_width,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    queries: tl.constexpr,
    tile_rows: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    page_tokens: tl.constexpr,
    block_tokens: tl.constexpr,
):
    place, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(starts + place * key_heads + head)
    end = tl.load(starts + place * key_heads + head + 1)
    if begin == end:
        return
    row, block = place // block_count, place % block_count
    key_position = block * block_tokens + tl.arange(0, block_tokens)
    ordinal = key_position // page_tokens
    page = tl.load(pages + row * table_stride + ordinal, mask=ordinal < table_width, other=0).to(tl.int64)
    # The last of the readers stands furthest back: what lies behind it may hold anything.
    last = tl.load(positions + tl.load(entries + end - 1) // (key_heads * width))
    there = key_position <= last
    slot = key_position % page_tokens
    element, value_element = tl.arange(0, size), tl.arange(0, value_size)
    key_at = page * key_page + slot * key_slot + head * key_head
    keys = tl.load(key + key_at[:, None] + element[None, :], mask=there[:, None], other=0.0)
    value_at = page * value_page + slot * value_slot + head * value_head
    values = tl.load(value + value_at[:, None] + value_element[None, :], mask=there[:, None], other=0.0)
    at = tl.arange(0, tile_rows)
    for reader in range(begin, end, queries):
        inside = (at // group < queries) & (reader + at // group < end)
        entry = tl.load(entries + reader + at // group, mask=inside, other=0)
        token = entry // (key_heads * width)
        position = tl.load(positions + token, mask=inside, other=-1)
        out = (token * key_heads + head) * group + at % group
        rows = tl.load(query + out[:, None] * size + element[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(rows, tl.trans(keys.to(rows.dtype)), input_precision="ieee") * scale
        scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
        best = tl.max(scores, 1)
        weights = tl.exp(scores - tl.where(best == float("-inf"), 0.0, best)[:, None])
        attended = tl.dot(weights.to(rows.dtype), values.to(rows.dtype), input_precision="ieee")
        part = out * width + entry % width
        tl.store(part_best + part, best, mask=inside)
        tl.store(part_total + part, tl.sum(weights, 1), mask=inside)
        tl.store(part_value + part[:, None] * value_size + value_element[None, :], attended, mask=inside[:, None])
