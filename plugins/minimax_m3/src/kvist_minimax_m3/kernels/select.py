"""The blocks that each query reads, from their scores: some queries and index heads per program, all their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_minimax_m3.selection import Selection

#: Scores that a program holds.
_TILE = 4096


def select_blocks(scores: torch.Tensor, positions: torch.Tensor, selection: Selection) -> torch.Tensor:
    """What :func:`kvist_minimax_m3.blocks.select_blocks` gives, element by element."""
    token_count, heads, block_count = scores.shape
    ids = torch.empty(token_count, heads, selection.topk, dtype=torch.int32, device=scores.device)
    row_count = token_count * heads
    if row_count:
        columns = triton.next_power_of_2(block_count)
        rows = max(1, min(_TILE // columns, triton.next_power_of_2(row_count)))
        _select[(triton.cdiv(row_count, rows),)](
            scores,
            positions,
            ids,
            row_count,
            block_count,
            heads=heads,
            rows=rows,
            columns=columns,
            slots=triton.next_power_of_2(selection.topk),
            block_tokens=selection.block_tokens,
            topk=selection.topk,
            local_blocks=selection.local_blocks,
            init_blocks=selection.init_blocks,
        )
    return ids


@triton.jit
def _select(
    scores,
    positions,
    ids,
    row_count,
    block_count,
    heads: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    slots: tl.constexpr,
    block_tokens: tl.constexpr,
    topk: tl.constexpr,
    local_blocks: tl.constexpr,
    init_blocks: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    there = row < row_count
    own = tl.load(positions + row // heads, mask=there, other=0) // block_tokens
    block = tl.arange(0, columns)[None, :]
    score = tl.load(scores + row * block_count + block, mask=there & (block < block_count), other=float("-inf"))
    # Both are beyond any score of finite keys.
    score = tl.where((block <= own) & (block > own - local_blocks), 3.4028234663852886e38, score)
    score = tl.where((block <= own) & (block < init_blocks), float("inf"), score)
    chosen = tl.zeros((rows, columns), tl.int1)
    for _ in range(topk):
        best = tl.argmax(score, 1, tie_break_left=True)
        taken = (block == best[:, None]) & (score > float("-inf"))
        chosen = chosen | taken
        score = tl.where(taken, float("-inf"), score)
    # Ascending without a sort: a block's slot is the number of chosen ones before it.
    slot = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(ids + row * topk + slot, block + 0 * row, mask=chosen & there)
    tail = tl.arange(0, slots)[None, :]
    count = tl.sum(chosen.to(tl.int32), 1)[:, None]
    tl.store(ids + row * topk + tail, -1 + 0 * (row + tail), mask=there & (tail < topk) & (tail >= count))
