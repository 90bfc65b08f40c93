"""Scores of index rows over pages: one program per tile of queries and tile of rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvist_deepseek_v4.kernels.batch import Batch
from kvist_deepseek_v4.rows import StreamRows

#: Queries, and index rows, of one program.
QUERIES = 8
_ROWS = 64


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: StreamRows,
    ratio: int,
    batch: Batch,
    first: int,
    end: int,
    columns: int,
) -> torch.Tensor:
    """Scores of all index rows for the queries of ``batch.tiles(QUERIES)[first:end]``, as
    :func:`kvist_deepseek_v4.selection.index_scores` gives them: float32 ``[tokens of these tiles, columns]``, -inf
    where a query may not see a row.

    query ``[T, J, I]``, weights ``[T, J]``: of the whole step. columns: at least the rows that any of them sees.
    """
    _, heads, size = query.shape
    [view], table = keys.views, batch.table(keys.group)
    tiles = batch.tiles(QUERIES)
    begin = int(tiles.on_host[first, 1])
    count = int(tiles.on_host[end - 1, 1:].sum()) - begin
    scores = torch.empty(count, columns, dtype=torch.float32, device=query.device)
    _score[(end - first, triton.cdiv(columns, _ROWS))](
        query.contiguous(),
        weights.contiguous(),
        view,
        table,
        tiles.on_device[first:end],
        batch.positions,
        scores,
        begin,
        columns,
        view.stride(0),
        table.stride(0),
        ratio=ratio,
        heads=heads,
        tile_heads=max(16, triton.next_power_of_2(heads)),
        size=size,
        tile=max(16, triton.next_power_of_2(size)),
        rows=_ROWS,
        block_rows=keys.block_rows,
        compute=compute_dtype(query.dtype, view.dtype),
    )
    return scores


def compute_dtype(query: torch.dtype, rows: torch.dtype) -> Any:
    """What both are converted to without loss before they are multiplied; products add up in float32."""
    if query == rows and query in (torch.bfloat16, torch.float16):
        return tl.bfloat16 if query == torch.bfloat16 else tl.float16
    return tl.float32


@triton.jit
def _score(
    query,
    weights,
    keys,
    table,
    tiles,
    positions,
    scores,
    begin,
    columns,
    page_stride,
    table_stride,
    ratio: tl.constexpr,
    heads: tl.constexpr,
    tile_heads: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    block_rows: tl.constexpr,
    compute: tl.constexpr,
):
    place, part = tl.program_id(0), tl.program_id(1)
    row, first, count = tl.load(tiles + place * 3), tl.load(tiles + place * 3 + 1), tl.load(tiles + place * 3 + 2)
    number = part * rows + tl.arange(0, rows)
    # What the tile's last query does not see may be missing, or hold anything.
    seen = number < (tl.load(positions + first + count - 1) + 1) // ratio
    page = tl.load(table + row * table_stride + number // block_rows, mask=seen, other=0).to(tl.int64)
    element = tl.arange(0, tile)
    at = keys + page[:, None] * page_stride + (number % block_rows)[:, None] * size + element[None, :]
    key = tl.load(at, mask=seen[:, None] & (element < size)[None, :], other=0.0).to(compute)
    head = tl.arange(0, tile_heads)
    is_query = (head < heads)[:, None] & (element < size)[None, :]
    for index in range(count):
        token = (first + index).to(tl.int64)
        at_query = query + (token * heads + head)[:, None] * size + element[None, :]
        rotated = tl.load(at_query, mask=is_query, other=0.0).to(compute)
        weight = tl.load(weights + token * heads + head, mask=head < heads, other=0.0).to(tl.float32)
        products = tl.maximum(tl.dot(rotated, tl.trans(key), input_precision="ieee"), 0.0)
        score = tl.sum(products * weight[:, None], 0)
        visible = number < (tl.load(positions + token) + 1) // ratio
        score = tl.where(visible, score, float("-inf"))
        tl.store(scores + (token - begin) * columns + number, score, mask=number < columns)
