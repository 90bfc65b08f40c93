"""The rows with the highest scores, exactly and always the same ones: one program per query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Scores that a program looks at at a time.
_TILE = 1024


def select(scores: torch.Tensor, positions: torch.Tensor, ratio: int, topk: int) -> torch.Tensor:
    """What :func:`kvist_deepseek_v4.selection.select` gives, in int32.

    scores: float32 ``[Q, M]``, contiguous. positions: int32 ``[Q]``.

    Scores are ranked by the order of their bits: four times the counts of the next eight bits say among which of them
    the last chosen one lies. So any number of scores is gone through five times, whatever they are, and of those equal
    to the last one the first are taken.
    """
    count, columns = scores.shape
    width = min(topk, columns)
    ids = torch.empty(count, width, dtype=torch.int32, device=scores.device)
    if count and width:
        tile = min(_TILE, max(16, triton.next_power_of_2(columns)))
        _select[(count,)](scores, positions, ids, columns, width, ratio=ratio, tile=tile)
    return ids


@triton.jit
def _ranks(scores, at, visible):
    """Of scores ``at ..``, uint32 in the order of the scores."""
    score = tl.load(scores + at, mask=at < visible, other=0.0)
    # The two zeros are equal.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, ~bits)


@triton.jit
def _select(scores, positions, ids, columns, width, ratio: tl.constexpr, tile: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    visible = tl.minimum((tl.load(positions + query) + 1) // ratio, columns)
    own = scores + query * columns
    left = tl.minimum(width, visible)
    bucket = tl.arange(0, 256)
    last = (left * 0).to(tl.uint32)
    for digit in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, visible, tile):
            at = first + tl.arange(0, tile)
            rank = _ranks(own, at, visible)
            among = at < visible
            if digit > 0:
                among = among & (rank >> (32 - 8 * digit) == last)
            counts += tl.histogram(((rank >> (24 - 8 * digit)) & 0xFF).to(tl.int32), 256, mask=among)
        # The highest bucket with which there are enough.
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        chosen = tl.max(tl.where(above + counts >= left, bucket, 0), 0)
        left -= tl.sum(tl.where(bucket == chosen, above, 0), 0)
        last = (last << 8) | chosen.to(tl.uint32)
    # ``left`` of those equal to the last one are chosen.
    out = ids + query * width
    written, equal = left * 0, left * 0
    for first in range(0, visible, tile):
        at = first + tl.arange(0, tile)
        rank = _ranks(own, at, visible)
        same = ((rank == last) & (at < visible)).to(tl.int32)
        nth = equal + tl.cumsum(same, 0)
        taken = (((rank > last) & (at < visible)) | ((same == 1) & (nth <= left))).to(tl.int32)
        slot = written + tl.cumsum(taken, 0) - 1
        tl.store(out + slot, at, mask=taken == 1)
        written += tl.sum(taken, 0)
        equal += tl.sum(same, 0)
    for first in range(0, width, tile):
        slot = first + tl.arange(0, tile)
        tl.store(out + slot, tl.full((tile,), -1, tl.int32), mask=(slot >= written) & (slot < width))
