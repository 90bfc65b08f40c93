"""Which blocks of keys a query reads: the numbers of the rule. No torch."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from kvist.errors import SpecError

GroupReduce = Literal["per_index_head", "union", "max"]


@attrs.frozen
class Selection:
    """The rule of one model's sparse layers. A block is ``block_tokens`` keys from a multiple of ``block_tokens`` on.

    The score of a block is the largest product of the index query with an index key in it that the query may see.
    A query at position ``p`` reads the ``topk`` blocks with the highest scores; of equal ones the lowest.

    block_tokens: keys per block; pages are as long or divide it.
    topk: blocks that a query reads, forced ones included.
    local_blocks: the query's own block and the ones before it that are read whatever their score, 0 for none.
    init_blocks: leading blocks that are read whatever their score; they come before the local ones.
    group_reduce: how several index heads of one key head agree. ``"per_index_head"``: each selects for its own slice of
        the query heads. ``"union"``: all query heads read what any of the index heads selects, up to ``topk`` blocks
        each. ``"max"``: one selection by the largest score of any of them. Without effect for one index head per
        key head.
    """

    block_tokens: int = 128
    topk: int = 16
    local_blocks: int = 1
    init_blocks: int = 0
    group_reduce: GroupReduce = "per_index_head"

    def __attrs_post_init__(self) -> None:
        for name, least in (("block_tokens", 1), ("topk", 1), ("local_blocks", 0), ("init_blocks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"Selection({name}={value!r}): must be an int of at least {least}")
        if self.group_reduce not in get_args(GroupReduce):
            raise SpecError(
                f"Selection(group_reduce={self.group_reduce!r}) is unknown",
                hint=f"use one of {', '.join(get_args(GroupReduce))}",
            )

    def require_pages(self, page_tokens: int) -> None:
        """Raise SpecError unless pages of ``page_tokens`` divide a block, so that a block is whole pages."""
        if self.block_tokens % page_tokens:
            raise SpecError(
                f"pages of {page_tokens} tokens do not divide sparse blocks of {self.block_tokens}",
                hint=f"use block_tokens={self.block_tokens}, or a divisor of it",
            )
