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


@attrs.frozen(eq=False)
class Victim:
    """A leaf extent that keeps its first ``keep_blocks`` blocks; 0 removes it."""

    extent: Extent
    keep_blocks: int


@attrs.frozen(eq=False)
class Gap:
    """Pages of one group that leave an extent although its blocks stay: ``blocks`` are int64 indices in the extent."""

    extent: Extent
    group: int
    blocks: npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class Eviction:
    """What goes: victims in the order in which they must go, then gaps."""

    victims: Sequence[Victim] = ()
    gaps: Sequence[Gap] = ()


#: What goes when enough is free.
NOTHING = Eviction()
#: Pages evicted beyond the need: one part in so many of the arena, at most this many. Decoding needs a page at a time,
#: and looking for a victim costs far more than one page.
_AHEAD_PART, _AHEAD_MOST = 1024, 64


def choose(
    tree: PrefixTree, ledger: Ledger, needed: Sequence[int], dropping: Sequence[int]
) -> tuple[Eviction, list[int]]:
    """Least recently used leaves, cut from their ends, until ``needed[group]`` pages would be free in every group,
    and a few more for the steps to come where there are any.

    dropping: groups that may lack pages of published blocks. When leaves are not enough, their idle pages inside
        extents that are held for other groups go too: a hit gets shorter, and a request that runs alone can go on.

    Returns the eviction, and the pages each group would still lack. When anything is lacking nothing should be evicted:
    it is then all there is.
    """
    arena = ledger.arena
    groups = range(len(needed))
    if not any(arena.shortage(needed)):
        return NOTHING, [0 for _ in groups]
    ahead = min(len(ledger.leases[0]) // _AHEAD_PART, _AHEAD_MOST)
    wanted = [count + ahead for count in needed]
    short = arena.shortage(wanted)
    freed: list[list[IntArray]] = [[] for _ in groups]
    victims: list[Victim] = []
    looked_at: list[Extent] = []
    gone: dict[int, int] = {}
    # Parents whose children would all be gone, by last use.
    uncovered: list[tuple[int, int, Extent]] = []
    leaves = tree.leaves()
    leaf: Extent | None = None
    while any(short):
        leaf = leaf or next(leaves, None)
        if uncovered and (leaf is None or uncovered[0][0] <= leaf.last_used):
            extent = heapq.heappop(uncovered)[2]
        elif leaf is not None:
            extent, leaf = leaf, None
        else:
            break
        pages = extent.pages
        blocks = pages.shape[1]
        count = _evictable_blocks(ledger, pages, short, bool(dropping))
        if not count:
            # Held to its end: offered again when the lease is released.
            continue
        looked_at.append(extent)
        victims.append(Victim(extent, blocks - count))
        if len(short) == 1 and not dropping:
            short = [short[0] - count]
        else:
            for group in groups:
                freed[group].append(present(pages[group, blocks - count :]))
            short = arena.shortage(wanted, freed)
        parent = extent.parent
        if count == blocks and parent is not None and parent.parent is not None:
            gone[id(parent)] = gone.get(id(parent), 0) + 1
            if gone[id(parent)] == len(parent.children):
                heapq.heappush(uncovered, (parent.last_used, len(victims), parent))
    if leaf is not None:
        looked_at.append(leaf)
    tree.set_aside = looked_at
    gaps: list[Gap] = []
    if any(short):
        # Not all of what lies ahead could be had: what is lacking without it?
        short = arena.shortage(needed, freed) if len(short) > 1 or dropping else [max(0, short[0] - ahead)]
        if any(short) and dropping:
            gaps = _choose_gaps(tree, ledger, needed, dropping, {id(v.extent): v.keep_blocks for v in victims}, freed)
            short = arena.shortage(needed, freed)
    return Eviction(victims, gaps), short


def evict(tree: PrefixTree, ledger: Ledger, eviction: Eviction, dropping: Sequence[int]) -> list[int]:
    """Remove what was chosen from the index and free its pages. Returns the pages freed per group."""
    counts = [0] * len(ledger.leases)
    for victim in eviction.victims:
        removed = tree.truncate(victim.extent, victim.keep_blocks)
        for group, row in enumerate(removed):
            pages = present(row) if dropping else row
            if len(pages):
                ledger.evict(group, pages)
                counts[group] += len(pages)
    for gap in eviction.gaps:
        pages = gap.extent.pages[gap.group, gap.blocks]
        gap.extent.pages[gap.group, gap.blocks] = NO_PAGE
        ledger.evict(gap.group, pages)
        counts[gap.group] += len(pages)
    return counts


def _choose_gaps(
    tree: PrefixTree,
    ledger: Ledger,
    needed: Sequence[int],
    dropping: Sequence[int],
    keeps: Mapping[int, int],
    freed: list[list[IntArray]],
) -> list[Gap]:
    """Idle pages of dropping groups, of the least recently used extents first, until nothing is lacking.

    keeps: blocks that stay of the extents cut before. freed: per group, what is freed already; extended.
    """
    gaps = []
    for extent in sorted(tree.extents(), key=lambda each: each.last_used):
        keep = keeps.get(id(extent), extent.block_count)
        for group in dropping:
            row = extent.pages[group, :keep]
            idle = np.flatnonzero((row != NO_PAGE) & (ledger.leases[group].take(row, mode="wrap") == 0))
            if len(idle):
                gaps.append(Gap(extent, group, idle))
                freed[group].append(row[idle])
        if not any(ledger.arena.shortage(needed, freed)):
            break
    return gaps


def _evictable_blocks(ledger: Ledger, pages: IntArray, short: Sequence[int], gaps: bool) -> int:
    """How many trailing blocks to evict: none that is leased, and no more than hold what is lacking."""
    most = -(-sum(short) // len(short)) if ledger.arena.fungible else max(short)
    tail = pages[:, -most:]
    idle = _idle_blocks(ledger, tail)
    if not gaps or idle < tail.shape[1] or np.count_nonzero(tail != NO_PAGE) == tail.size:
        return idle
    idle = _idle_blocks(ledger, pages)
    return min(idle, _blocks_for(pages[:, pages.shape[1] - idle :] != NO_PAGE, short, ledger.arena.fungible))


def _idle_blocks(ledger: Ledger, pages: IntArray) -> int:
    """Trailing blocks none of whose pages is leased."""
    block_count = int(pages.shape[1])
    held: npt.NDArray[np.bool_] | None = None
    for column, row in zip(ledger.leases, pages):
        # NO_PAGE reads the last page's count, which is discarded below.
        leases = column.take(row, mode="wrap")
        if np.count_nonzero(leases):
            leased = (leases > 0) & (row != NO_PAGE)
            held = leased if held is None else held | leased
    if held is None or not np.count_nonzero(held):
        return block_count
    return int(held[::-1].argmax())


def _blocks_for(there: npt.NDArray[np.bool_], short: Sequence[int], fungible: bool) -> int:
    """Trailing blocks that hold what is lacking: by group, or in sum when any page serves any group.

    there: bool ``[groups, blocks]``, where a group has a page.
    """
    counts: npt.NDArray[np.int64] = np.cumsum(there[:, ::-1], axis=1)
    if fungible:
        counts, short = counts.sum(axis=0, keepdims=True), [sum(short)]
    return 1 + max(int(np.searchsorted(counts[g], lacking)) for g, lacking in enumerate(short) if lacking)
