"""What would fit now, without trying: for admission, routing and dashboards. Counts only; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import numpy as np

from kvist.defrag import Defragmenter
from kvist.errors import RequestError, StateError
from kvist.layout import KEPT_ROLLBACK, Group, Layout
from kvist.ledger import Ledger
from kvist.prefix.tree import PrefixTree
from kvist.step import IntArray, present

#: Longer than any sequence.
_ENDLESS = 1 << 40


@attrs.frozen
class GroupCapacity:
    """Pages of one group now.

    free: takable at once. cached: findable and held by nobody, so evictable.
    available: what the group could take if no other group took any: free, cached, and slabs that others would give up
        once everything cached is evicted.
    """

    name: str
    page_bytes: int
    free: int
    cached: int
    available: int


@attrs.frozen(eq=False)
class Capacity:
    """Made by ``manager.capacity()``; the answers hold until the manager changes.

    groups: by group. chunk_tokens: tokens of a sequence computed in one step, ``None`` for all of them at once.

    A new sequence is one that shares nothing with the cache, and everything cached counts as evictable, also the
    prefixes that waiting requests are about to use.
    """

    groups: tuple[GroupCapacity, ...]
    chunk_tokens: int | None
    _layout: Layout
    _lacking: Callable[[list[int]], bool]
    _current: Callable[[], bool]

    @property
    def tokens(self) -> int | None:
        """Length of the longest new sequence that could be computed now; ``None`` when nothing limits it."""
        most = self._layout.spec.max_tokens
        if self.requests(1) == 0:
            return 0
        if self._fits(_ENDLESS if most is None else most, 1):
            return most
        # Fits, and does not fit.
        low, high = 1, 2
        while self._fits(high, 1):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, 1) else (low, middle)
        return low if most is None else min(low, most)

    def requests(self, length: int) -> int:
        """How many new sequences of ``length`` tokens fit at once.

        With ``chunk_tokens`` they advance side by side, a chunk of each in every step, and windows give up what they
        have passed. That many will fit. Where the groups' pages have different sizes one more may fit, if it happens
        that groups need the most at different times.

        Raises RequestError for a length below 1, StateError if the manager has changed.
        """
        if length < 1:
            raise RequestError(f"requests({length}): a sequence has at least one token")
        most = self._layout.spec.max_tokens
        if (most is not None and length > most) or not self._fits(length, 1):
            return 0
        low, high = 1, 2
        while self._fits(length, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(length, middle) else (low, middle)
        return low

    def _fits(self, length: int, count: int) -> bool:
        if not self._current():
            raise StateError("this capacity is stale: the manager changed after it was asked for", hint="ask again")
        needs = list(_needs(self._layout, length, self.chunk_tokens))
        if len({group.page_bytes for group in self._layout.groups}) > 1:
            # Slabs do not follow the needs of the moment: what a group had at its peak may be scattered over many.
            needs = [list(map(max, zip(*needs)))]
        if any(self._lacking([count * pages for pages in need]) for need in needs):
            return False
        # What open() asks before anything else. One step with all tokens needs at least as much.
        return self.chunk_tokens is None or self._layout.fits(length)


def _needs(layout: Layout, length: int, chunk: int | None) -> Iterator[list[int]]:
    """Pages per group that a sequence has while it is computed in chunks, for each step that may need the most.

    A group that drops blocks repeats itself after as many steps as there are tokens in a block, and one that does not
    only grows: the last steps need the most.
    """
    block = layout.block_tokens
    chunk = length if chunk is None else chunk
    last = -(-length // chunk)
    for step in range(max(0, last - block - 1), last):
        start, end = step * chunk, min(length, (step + 1) * chunk)
        yield [
            1 if group.exact else -(-end // block) - (_dropped(group, start, block) if group.sparse else 0)
            for group in layout.groups
        ]


def _dropped(group: Group, length: int, block: int) -> int:
    """Blocks that a sequence of ``length`` computed tokens has given up."""
    return sum(high - low for low, high in group.retention.droppable(length, KEPT_ROLLBACK, block))


def capacity_of(
    layout: Layout,
    tree: PrefixTree,
    ledger: Ledger,
    defragmenter: Defragmenter,
    chunk_tokens: int | None,
    current: Callable[[], bool],
) -> Capacity:
    """current: is the manager still as it is now? Raises RequestError for chunks below 1."""
    if chunk_tokens is not None and chunk_tokens < 1:
        raise RequestError(f"capacity(chunk_tokens={chunk_tokens}) must be at least 1, or None for whole prompts")
    evictable = [[pages] for pages in _evictable(tree, ledger)]
    shortage = defragmenter.shortage(evictable)
    groups = []
    for group in layout.groups:
        index, everything = group.index, layout.page_capacity(group)
        needed = [everything if other == index else 0 for other in range(len(layout.groups))]
        available = everything - shortage(needed)[index]
        cached = sum(map(len, evictable[index]))
        groups.append(GroupCapacity(group.name, group.page_bytes, ledger.free_count(index), cached, available))

    def lacking(needed: list[int]) -> bool:
        return any(shortage(needed))

    return Capacity(tuple(groups), chunk_tokens, layout, lacking, current)


def _evictable(tree: PrefixTree, ledger: Ledger) -> list[IntArray]:
    """Pages per group that are published and held by nobody."""
    idle = [extent.pages for extent in tree.extents() if not extent.holds]
    pages = np.concatenate(idle, axis=1) if idle else np.empty((len(ledger.sparse), 0), np.int32)
    return [
        np.flatnonzero(ledger.published[group] & (ledger.leases[group] == 0)).astype(np.int32)
        if sparse
        else present(pages[group])
        for group, sparse in enumerate(ledger.sparse)
    ]
