"""Scores of blocks over pages: one program per tile of queries and block of keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvist_minimax_m3.batch import Batch

#: Queries times index heads of one program.
_TILE_ROWS = 64


def block_scores(index_query: torch.Tensor, index_key: torch.Tensor, batch: Batch, block_tokens: int) -> torch.Tensor:
    """What :func:`kvist_minimax_m3.blocks.block_scores` gives, for every row of the step and from its pages.

    index_query ``[T, heads, E]``, index_key: the layer's pages ``[page, slot, E]``. Returns float32
    ``[T, heads, blocks]`` with as many blocks as the longest row has; -inf behind a query's own block.
    """
    token_count, heads, size = index_query.shape
    block_count = triton.cdiv(max(batch.lengths, default=0), block_tokens)
    scores = torch.empty(token_count, heads, block_count, dtype=torch.float32, device=index_query.device)
    queries = max(1, _TILE_ROWS // heads)
    tiles = batch.tiles(queries)
    if token_count:
        _score[(len(tiles), block_count)](
            index_query.contiguous(),
            index_key,
            batch.pages,
            tiles,
            batch.positions,
            scores,
            index_key.stride(0),
            index_key.stride(1),
            batch.pages.stride(0),
            block_count,
            heads=heads,
            tile_rows=max(16, triton.next_power_of_2(queries * heads)),
            size=size,
            page_tokens=batch.page_tokens,
            block_tokens=block_tokens,
            compute=_compute_dtype(index_query.dtype, index_key.dtype),
        )
    return scores


def _compute_dtype(query: torch.dtype, key: torch.dtype) -> Any:
    """What both are converted to without loss before they are multiplied; products add up in float32."""
    if query in (torch.bfloat16, torch.float16) and key in (query, torch.float8_e4m3fn):
        return tl.bfloat16 if query == torch.bfloat16 else tl.float16
    return tl.float32


@triton.jit
def _score(
    query,
    key,
    pages,
    tiles,
    positions,
    scores,
    page_stride,
    slot_stride,
    table_stride,
    block_count,
    heads: tl.constexpr,
    tile_rows: tl.constexpr,
    size: tl.constexpr,
    page_tokens: tl.constexpr,
    block_tokens: tl.constexpr,
    compute: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    row, first, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    at = tl.arange(0, tile_rows)
    inside = at < count * heads
    token = first + at // heads
    position = tl.load(positions + token, mask=inside, other=-1)
    key_position = block * block_tokens + tl.arange(0, block_tokens)
    # Behind the tile's last query a page may be missing, or hold anything.
    there = key_position <= tl.max(position, 0)
    page = tl.load(pages + row * table_stride + key_position // page_tokens, mask=there, other=0).to(tl.int64)
    element = tl.arange(0, size)
    key_at = page * page_stride + (key_position % page_tokens) * slot_stride
    keys = tl.load(key + key_at[:, None] + element[None, :], mask=there[:, None], other=0.0).to(compute)
    out = token * heads + at % heads
    queries = tl.load(query + out[:, None] * size + element[None, :], mask=inside[:, None], other=0.0).to(compute)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    products = tl.where(key_position[None, :] <= position[:, None], products, float("-inf"))
    tl.store(scores + out * block_count + block, tl.max(products, 1), mask=inside)
