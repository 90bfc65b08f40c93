"""Which published pages go when a plan needs more than is free. Decided on paper first; nothing moves here."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.step import NO_PAGE, IntArray, present

#: A leaf extent, and how many of its first blocks it keeps; 0 removes it.
Victim = tuple[Extent, int]


@attrs.frozen(eq=False)
class Gap:
    """Pages of one group that leave an extent although its blocks stay: ``blocks`` are int64 indices in the extent."""

    extent: Extent
    group: int
    blocks: npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class Eviction:
    """What goes: victims in the order in which they must go, then gaps. looked_at: leaves that the tree has set aside
    meanwhile. spare: one of them that stays as it is."""

    victims: Sequence[Victim] = ()
    gaps: Sequence[Gap] = ()
    looked_at: Sequence[Extent] = ()
    spare: Extent | None = None


#: What goes when enough is free.
NOTHING = Eviction()
#: Pages evicted beyond the need: one part in so many of the arena, at most this many. Decoding needs a page at a time,
#: and looking for a victim costs far more than one page.
_AHEAD_PART, _AHEAD_MOST = 1024, 64


def choose(tree: PrefixTree, ledger: Ledger, needed: Sequence[int]) -> tuple[Eviction, list[int]]:
    """Least recently used idle leaves, cut from their ends, until ``needed[group]`` pages would be free in every group,
    and a few more for the steps to come where there are any.

    When leaves are not enough, cached pages of sparse groups inside extents that are held go too: a hit gets shorter,
    and a request that runs alone can go on.

    Returns the eviction, and the pages each group would still lack. When anything is lacking nothing should be evicted:
    it is then all there is.
    """
    arena, layout = ledger.arena, ledger.layout
    groups = range(len(needed))
    alone = len(needed) == 1 and not ledger.sparse[0]
    ahead = min(layout.page_capacity(layout.groups[0]) // _AHEAD_PART, _AHEAD_MOST)
    if alone:
        return _choose_alone(tree, needed[0] - arena.free_count[0], ahead)
    if not any(arena.shortage(needed)):
        return NOTHING, [0 for _ in groups]
    wanted = [count if group.exact else count + ahead for count, group in zip(needed, layout.groups)]
    short = arena.shortage(wanted)
    freed: list[list[IntArray]] = [[] for _ in groups]
    queue = _Queue(tree)
    while any(short):
        extent = queue.pop()
        if extent is None:
            break
        pages = extent.pages
        blocks = pages.shape[1]
        count = _blocks_for(pages != NO_PAGE, short, arena.fungible)
        for group in groups:
            freed[group].append(present(pages[group, blocks - count :]))
        short = arena.shortage(wanted, freed)
        queue.cut(extent, blocks - count)
    gaps: list[Gap] = []
    if any(short):
        # Not all of what lies ahead could be had: what is lacking without it?
        short = arena.shortage(needed, freed)
        if any(short) and any(ledger.sparse):
            gaps = _choose_gaps(tree, ledger, needed, {id(extent): keep for extent, keep in queue.victims}, freed)
            short = arena.shortage(needed, freed)
    return queue.eviction(gaps), short


def _choose_alone(tree: PrefixTree, lacking: int, ahead: int) -> tuple[Eviction, list[int]]:
    """As :func:`choose` for one dense group, which is plain counting."""
    if lacking <= 0:
        return NOTHING, [0]
    left = lacking + ahead
    queue = _Queue(tree)
    while left:
        extent = queue.pop()
        if extent is None:
            break
        blocks = extent.block_count
        count = min(blocks, left)
        left -= count
        queue.cut(extent, blocks - count)
    return queue.eviction(()), [max(0, left - ahead)]


class _Queue:
    """Idle leaves, least recently used first, and what would become a leaf when they were gone. Changes nothing."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._leaves = tree.leaves()
        self._leaf = next(self._leaves, None)
        self._gone: dict[int, int] = {}
        #: Parents whose children would all be gone, by last use.
        self._uncovered: list[tuple[int, int, Extent]] = []
        self.victims: list[Victim] = []

    def pop(self) -> Extent | None:
        """The next extent to cut."""
        leaf = self._leaf
        if self._uncovered and (leaf is None or self._uncovered[0][0] <= leaf.last_used):
            return heapq.heappop(self._uncovered)[2]
        if leaf is not None:
            self._leaf = next(self._leaves, None)
        return leaf

    def cut(self, extent: Extent, keep_blocks: int) -> None:
        """Note a victim."""
        self.victims.append((extent, keep_blocks))
        parent = extent.parent
        if not keep_blocks and parent is not None and parent.parent is not None and not parent.holds:
            gone = self._gone.get(id(parent), 0) + 1
            self._gone[id(parent)] = gone
            if gone == len(parent.children):
                heapq.heappush(self._uncovered, (parent.last_used, len(self.victims), parent))

    def eviction(self, gaps: Sequence[Gap]) -> Eviction:
        """What was chosen. Until it is carried out, the leaves looked at stay candidates."""
        looked_at = [extent for extent, _ in self.victims]
        if self._leaf is not None:
            looked_at.append(self._leaf)
        self._tree.set_aside = looked_at
        return Eviction(self.victims, gaps, looked_at, self._leaf)


def evict(tree: PrefixTree, ledger: Ledger, eviction: Eviction) -> list[int]:
    """Remove what was chosen from the index and free its pages. Returns the pages freed per group."""
    counts = [0] * len(ledger.sparse)
    if tree.set_aside is eviction.looked_at:
        # Victims that are only cut are offered again below. Another plan's leaves wait for the next search.
        tree.set_aside = []
        if eviction.spare is not None:
            tree.offer(eviction.spare)
    for extent, keep_blocks in eviction.victims:
        removed = tree.truncate(extent, keep_blocks)
        for group, row in enumerate(removed):
            pages = present(row) if ledger.sparse[group] else row
            ledger.unpublish(group, pages)
            counts[group] += len(pages)
    for gap in eviction.gaps:
        pages = gap.extent.pages[gap.group, gap.blocks]
        gap.extent.pages[gap.group, gap.blocks] = NO_PAGE
        ledger.unpublish(gap.group, pages)
        counts[gap.group] += len(pages)
    return counts


def _choose_gaps(
    tree: PrefixTree,
    ledger: Ledger,
    needed: Sequence[int],
    keeps: Mapping[int, int],
    freed: list[list[IntArray]],
) -> list[Gap]:
    """Cached pages of sparse groups, of the least recently used extents first, until nothing is lacking.

    keeps: blocks that stay of the extents cut before. freed: per group, what is freed already; extended.
    """
    gaps = []
    for extent in sorted(tree.extents(), key=lambda each: each.last_used):
        keep = keeps.get(id(extent), extent.block_count)
        for group, sparse in enumerate(ledger.sparse):
            if not sparse:
                continue
            row = extent.pages[group, :keep]
            idle = np.flatnonzero((row != NO_PAGE) & (ledger.leases[group].take(row, mode="wrap") == 0))
            if len(idle):
                gaps.append(Gap(extent, group, idle))
                freed[group].append(row[idle])
        if not any(ledger.arena.shortage(needed, freed)):
            break
    return gaps


def _blocks_for(there: npt.NDArray[np.bool_], short: Sequence[int], fungible: bool) -> int:
    """Trailing blocks that hold what is lacking, as far as they do: by group, or in sum when any page serves any group.

    there: bool ``[groups, blocks]``, where a group has a page.
    """
    counts: npt.NDArray[np.int64] = np.cumsum(there[:, ::-1], axis=1)
    if fungible:
        counts, short = counts.sum(axis=0, keepdims=True), [sum(short)]
    needed: int = 1 + max(int(np.searchsorted(counts[g], lacking)) for g, lacking in enumerate(short) if lacking)
    return min(needed, int(there.shape[1]))
