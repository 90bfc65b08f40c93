"""One memory budget for several cache managers, e.g. a target model's and a draft model's that do not share an arena.

Models that compute the same tokens in the same steps need no split: give their specs to one ``Layout.build``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kvist.errors import SpecError
from kvist.spec import CacheSpec


def block_bytes(spec: CacheSpec) -> int:
    """Bytes that a block of ``spec.block_tokens`` tokens adds to a sequence, states not counted: what the tokens of one
    model cost beside another's. Windows count in full, though a long sequence keeps its last blocks of them only."""
    return sum(
        spec.block_tokens // stream.tokens_per_row * stream.row.row_bytes
        for layer in spec.layers
        for stream in layer.streams
        if not stream.retention.exact
    )


def split_bytes(total: int, costs: Sequence[int]) -> tuple[int, ...]:
    """``total`` bytes in proportion to what a token (or an equal number of tokens) costs each manager.

    The first, the target's, gets what rounding leaves, so the sum is exactly ``total``, and so do all bytes when
    nobody's tokens cost anything. A cost of 0 gets nothing. Every rank must split the same total: the least that any
    of them has, or they plan different batches.

    Raises SpecError for no managers and for negative numbers.
    """
    total, costs = operator.index(total), [operator.index(cost) for cost in costs]
    if not costs or total < 0 or min(costs) < 0:
        raise SpecError(
            f"split_bytes({total}, {costs}) needs a budget and costs that are not negative, and at least one cost"
        )
    everything = sum(costs)
    others = [total * cost // everything if everything else 0 for cost in costs[1:]]
    return total - sum(others), *others
