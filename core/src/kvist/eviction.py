"""Which published pages go when a plan needs more than is free. Decided on paper first; nothing moves here."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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


#: Pages evicted beyond the need: one part in so many of the arena, at most this many. Decoding needs a page at a time,
#: and looking for a victim costs far more than one page.
_AHEAD_PART, _AHEAD_MOST = 1024, 64


def choose_victims(
    tree: PrefixTree, ledger: Ledger, needed: Sequence[int], gaps: bool
) -> tuple[list[Victim], list[int]]:
    """Least recently used leaves, cut from their ends, until ``needed[group]`` pages would be free in every group,
    and a few more for the steps to come where there are any.

    gaps: some groups may lack pages of published blocks.

    Returns the victims in the order in which they must go, and the pages each group would still lack. When anything
    is lacking nothing should be evicted: the victims are then all there are.
    """
    arena = ledger.arena
    groups = range(len(needed))
    if not any(arena.shortage(needed)):
        return [], [0 for _ in groups]
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
        count = _evictable_blocks(ledger, pages, short, gaps)
        if not count:
            # Held to its end: offered again when the lease is released.
            continue
        looked_at.append(extent)
        victims.append(Victim(extent, blocks - count))
        if len(short) == 1 and not gaps:
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
    if any(short):
        # Not all of what lies ahead could be had: what is lacking without it?
        short = arena.shortage(needed, freed) if len(short) > 1 or gaps else [max(0, short[0] - ahead)]
    return victims, short


def evict(tree: PrefixTree, ledger: Ledger, victims: Sequence[Victim], gaps: bool) -> list[int]:
    """Remove the victims from the index and free their pages. Returns the pages freed per group."""
    counts = [0] * len(ledger.leases)
    for victim in victims:
        removed = tree.truncate(victim.extent, victim.keep_blocks)
        for group, row in enumerate(removed):
            pages = present(row) if gaps else row
            if len(pages):
                ledger.evict(group, pages)
                counts[group] += len(pages)
    return counts


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
