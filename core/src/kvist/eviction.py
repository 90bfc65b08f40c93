"""Which published pages go when a plan needs more than is free. Decided on paper first; nothing moves here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvist.keeper import Keeper
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
class Moves:
    """Per group, pages that are in use and the free pages that take their places: ``sources[i]`` goes to
    ``destinations[i]``."""

    sources: tuple[IntArray, ...]
    destinations: tuple[IntArray, ...]


@attrs.frozen(eq=False)
class Eviction:
    """What goes: victims in the order in which they must go, then gaps. looked_at: leaves that the tree has set aside
    meanwhile. spare: one of them that stays as it is. freed: the pages that become free, per group (for one dense group
    nobody asks). moves: pages that change their places after that."""

    victims: Sequence[Victim] = ()
    gaps: Sequence[Gap] = ()
    looked_at: Sequence[Extent] = ()
    spare: Extent | None = None
    freed: Sequence[Sequence[IntArray]] = ()
    moves: Moves | None = None


#: What goes when enough is free.
NOTHING = Eviction()
#: Pages evicted beyond the need: one part in so many of the arena, at most this many. Decoding needs a page at a time,
#: and looking for a victim costs far more than one page.
_AHEAD_PART, _AHEAD_MOST = 512, 128


def choose(
    keeper: Keeper, ledger: Ledger, needed: Sequence[int], movable: Sequence[int] | None = None
) -> tuple[Eviction, list[int]]:
    """Idle leaves in the keeper's order, cut from their ends, until ``needed[group]`` pages would be free in every
    group, and a few more for the steps to come where there are any.

    When leaves are not enough, cached pages of sparse groups inside extents that are held go too: a hit gets shorter,
    and a request that runs alone can go on.

    movable: slabs per group that may be emptied by moving pages, which the caller then does. ``None``: a slab changes
    its group only when eviction empties it.

    Returns the eviction, and the pages each group would still lack. When anything is lacking nothing should be evicted:
    it is then all there is.
    """
    arena, layout = ledger.arena, ledger.layout
    groups = range(len(needed))
    alone = len(needed) == 1 and not ledger.sparse[0]
    ahead = min(layout.page_capacity(layout.groups[0]) // _AHEAD_PART, _AHEAD_MOST)
    if alone:
        return _choose_alone(keeper, needed[0] - arena.free_count[0], ahead)
    freed: list[list[IntArray]] = [[] for _ in groups]
    shortage = _Shortage(ledger, freed, movable)
    if not any(shortage(needed)):
        return NOTHING, [0 for _ in groups]
    wanted = [count if group.exact else count + ahead for count, group in zip(needed, layout.groups)]
    short = shortage(wanted)
    queue = keeper.queue()
    while any(short):
        extent = queue.pop()
        if extent is None:
            break
        pages = extent.pages
        blocks = pages.shape[1]
        count = shortage.blocks_for(pages != NO_PAGE, wanted, short)
        for group in groups:
            freed[group].append(present(pages[group, blocks - count :]))
        short = shortage(wanted)
        queue.cut(extent, blocks - count)
    gaps: list[Gap] = []
    if any(short):
        # Not all of what lies ahead could be had: what is lacking without it?
        short = shortage(needed)
        if any(short) and any(ledger.sparse):
            keeps = {id(extent): keep for extent, keep in queue.victims}
            gaps = _choose_gaps(keeper.tree, ledger, needed, keeps, shortage)
            short = shortage(needed)
    return Eviction(queue.victims, gaps, *queue.looked_at(), freed), short


def _choose_alone(keeper: Keeper, lacking: int, ahead: int) -> tuple[Eviction, list[int]]:
    """As :func:`choose` for one dense group, which is plain counting."""
    if lacking <= 0:
        return NOTHING, [0]
    left = lacking + ahead
    queue = keeper.queue()
    while left:
        extent = queue.pop()
        if extent is None:
            break
        blocks = extent.block_count
        count = min(blocks, left)
        left -= count
        queue.cut(extent, blocks - count)
    return Eviction(queue.victims, (), *queue.looked_at()), [max(0, left - ahead)]


class _Shortage:
    """What would be lacking once ``freed`` is given back; ``movable`` as in :func:`choose`."""

    def __init__(self, ledger: Ledger, freed: list[list[IntArray]], movable: Sequence[int] | None) -> None:
        self._arena = ledger.arena
        self.freed = freed
        self._movable = movable

    def __call__(self, needed: Sequence[int]) -> list[int]:
        if self._movable is None:
            return self._arena.shortage(needed, self.freed)
        return self._arena.shortage_on_paper(needed, [sum(map(len, each)) for each in self.freed], self._movable)

    def blocks_for(self, there: npt.NDArray[np.bool_], wanted: Sequence[int], short: Sequence[int]) -> int:
        """Trailing blocks of an extent to evict: as few as needed, or all. ``there`` as in :func:`_blocks_for`.

        Where pages may move, any page that goes can help any group, so the right number is searched for. Where they may
        not, looking at every length would cost more than evicting a little too much.
        """
        if self._movable is None:
            return _blocks_for(there, short, self._arena.fungible)
        counts = np.cumsum(there[:, ::-1], axis=1)
        before = [sum(map(len, each)) for each in self.freed]
        low, high = 1, int(there.shape[1])
        while low < high:
            middle = (low + high) // 2
            more = counts[:, middle - 1].tolist()
            if any(self._arena.shortage_on_paper(wanted, [a + b for a, b in zip(before, more)], self._movable)):
                low = middle + 1
            else:
                high = middle
        return low


def evict(keeper: Keeper, ledger: Ledger, eviction: Eviction) -> list[int]:
    """Remove what was chosen from the index and free its pages. Returns the pages freed per group."""
    tree = keeper.tree
    counts = [0] * len(ledger.sparse)
    if tree.set_aside is eviction.looked_at:
        # Victims that are only cut are offered again below. Another plan's leaves wait for the next search.
        tree.set_aside = []
        if eviction.spare is not None:
            tree.offer(eviction.spare)
    for extent, keep_blocks in eviction.victims:
        if keeper.learns:
            keeper.cutting(extent, keep_blocks)
        removed = tree.truncate(extent, keep_blocks)
        for group, row in enumerate(removed):
            pages = present(row) if ledger.sparse[group] else row
            ledger.unpublish(group, pages)
            counts[group] += len(pages)
    for gap in eviction.gaps:
        pages = gap.extent.pages[gap.group, gap.blocks]
        if tree.watcher is not None:
            tree.watcher.lost(gap.extent, gap.group, gap.blocks)
        gap.extent.pages[gap.group, gap.blocks] = NO_PAGE
        ledger.unpublish(gap.group, pages)
        counts[gap.group] += len(pages)
    return counts


def _choose_gaps(
    tree: PrefixTree,
    ledger: Ledger,
    needed: Sequence[int],
    keeps: Mapping[int, int],
    shortage: _Shortage,
) -> list[Gap]:
    """Cached pages of sparse groups, of the least recently used extents first and of the lowest priority before that,
    until nothing is lacking.

    keeps: blocks that stay of the extents cut before. shortage: with what is freed already; extended.
    """
    gaps = []
    for extent in sorted(tree.extents(), key=lambda each: (tree.priority(each), each.last_used)):
        keep = keeps.get(id(extent), extent.block_count)
        for group, sparse in enumerate(ledger.sparse):
            if not sparse:
                continue
            row = extent.pages[group, :keep]
            idle = np.flatnonzero((row != NO_PAGE) & (ledger.leases[group].take(row, mode="wrap") == 0))
            if len(idle):
                gaps.append(Gap(extent, group, idle))
                shortage.freed[group].append(row[idle])
        if not any(shortage(needed)):
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
