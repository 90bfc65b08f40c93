"""Moving pages together, so that a slab becomes empty and another group can have it.

Groups with unequal pages fragment the arena: a slab with one used page serves one group only, however much of it is
free. When a plan lacks slabs of one group, the few used pages of other groups' emptiest slabs move into free pages of
their own group. Least recently used content is evicted first, but only as much as is lacking in sum; what then lies
in the way moves. Moving a page costs two passes over its bytes, computing its tokens again costs a pass over the model
for each of them, so nobody loses content that a copy can keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvist.eviction import NOTHING, Eviction, Moves, choose
from kvist.keeper import Keeper
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.owed import Owed
from kvist.prefix.extent import Extent
from kvist.sequence import Sequence, Tables
from kvist.step import NO_PAGE, IntArray, present

#: A plan copies at most one part in so many of the arena if evicting more would do as well. Whatever the limit, it
#: copies less than the slabs that it gets hold.
MOST_PART = 8


class Copying(Protocol):
    """Copies in progress, to or from other tiers or processes."""

    def held(self) -> Iterable[Extent]:
        """Extents that they hold."""

    def touched(self) -> Iterable[tuple[int, IntArray]]:
        """Groups and pages that must stay where they are."""


class Defragmenter:
    """Finds room for plans where the groups' pages are unequal. Owns nothing but a count; mutates ledger, tree, tables
    and the sequences' own records of pages when moves are carried out.

    sequences: the manager's open ones, by slot. Those in a step keep the pages they have: the step's tables name them.
    """

    def __init__(
        self,
        layout: Layout,
        keeper: Keeper,
        ledger: Ledger,
        tables: Tables,
        owed: Owed,
        sequences: Mapping[int, Sequence],
    ) -> None:
        self._layout = layout
        self._keeper = keeper
        self._tree = keeper.tree
        self._ledger = ledger
        self._tables = tables
        self._owed = owed
        self._sequences = sequences
        #: Copies between tiers, and transfers to other processes.
        self.copying: list[Copying] = []
        self._exact = [group.index for group in layout.groups if group.exact]
        self._limit_bytes = layout.arena_bytes // MOST_PART
        arena = ledger.arena
        #: Can it ever help? Where every page is a slab, or one group has all, nothing fragments.
        self.useful = len(layout.groups) > 1 and any(count > 1 for count in arena.pages_per_slab)
        #: Pages moved so far, per group.
        self.moved = [0] * len(layout.groups)

    def make_room(self, needed: SequenceOf[int]) -> tuple[Eviction, list[int]]:
        """What must be evicted and moved for ``needed`` pages per group, and the pages each would lack all the same.
        Changes nothing."""
        keeper, ledger = self._keeper, self._ledger
        if not self.useful:
            return choose(keeper, ledger, needed)
        if not any(ledger.arena.shortage(needed)):
            return NOTHING, [0] * len(needed)
        fixed = self._fixed_slabs()
        movable = self._movable(fixed)
        eviction, short = choose(keeper, ledger, needed, movable)
        if any(short):
            return eviction, short
        moves = self._plan(needed, eviction, fixed)
        if moves is None:
            return eviction, short
        if self._bytes(moves) > self._limit_bytes:
            more, lacking = choose(keeper, ledger, needed)
            if not any(lacking):
                return more, lacking
            # Better a long copy than a request that waits.
            eviction, short = choose(keeper, ledger, needed, movable)
        return attrs.evolve(eviction, moves=moves), short

    def shortage(self, freed: SequenceOf[SequenceOf[IntArray]]) -> Callable[[SequenceOf[int]], list[int]]:
        """For what is needed per group: the pages each group would lack once ``freed[group]`` is given back and pages
        have moved together. Holds until something changes."""
        arena = self._ledger.arena
        if not self.useful:
            return lambda needed: arena.shortage(needed, freed)
        movable = self._movable(self._fixed_slabs())
        counts = [sum(map(len, each)) for each in freed]
        return lambda needed: arena.shortage_on_paper(needed, counts, movable)

    def carry_out(self, moves: Moves) -> None:
        """Give the moved pages their new names everywhere, and owe the copies to the next step."""
        ledger, arena = self._ledger, self._ledger.arena
        extents = list(self._extents())
        idle = [sequence for sequence in self._sequences.values() if not sequence.in_flight]
        for group, (sources, destinations) in enumerate(zip(moves.sources, moves.destinations)):
            if not len(sources):
                continue
            arena.swap(group, sources, destinations)
            if ledger.sparse[group]:
                old, new = sources.astype(np.intp), destinations.astype(np.intp)
                for column, free in ((ledger.leases[group], 1), (ledger.published[group], 0)):
                    column[new] = column[old]
                    column[old] = free
            self._owed.move(group, sources, destinations)
            self._rename(group, sources, destinations, extents, idle)
            self.moved[group] += len(sources)

    def _rename(
        self,
        group: int,
        sources: IntArray,
        destinations: IntArray,
        extents: SequenceOf[Extent],
        sequences: Iterable[Sequence],
    ) -> None:
        # The last entry is what NO_PAGE, -1, finds.
        page_count = self._layout.arena_bytes // self._layout.groups[group].page_bytes
        names = np.arange(page_count + 1, dtype=np.int32)
        names[-1] = NO_PAGE
        names[sources] = destinations
        # Few extents have a page that moves: to find them, all are looked at in one piece.
        rows = [extent.pages[group] for extent in extents]
        if rows:
            moving = np.zeros(page_count + 1, np.bool_)
            moving[sources] = True
            hits = np.flatnonzero(moving[np.concatenate(rows)])
            ends = np.cumsum([len(row) for row in rows])
            for place in np.unique(np.searchsorted(ends, hits, side="right")).tolist():
                rows[place][:] = names[rows[place]]
        table = self._tables.arrays[group]
        exact = group in self._exact
        for sequence in sequences:
            row = table[sequence.slot, : sequence.state_columns if exact else sequence.block_count]
            row[:] = names[row]
            if sequence.sources is not None:
                pages = sequence.sources.pages
                pages[group] = int(names[pages[group]])
            if exact:
                place = self._exact.index(group)
                for pages in sequence.snapshots.values():
                    pages[place] = int(names[pages[place]])

    def _plan(self, needed: SequenceOf[int], eviction: Eviction, fixed: list[npt.NDArray[np.bool_]]) -> Moves | None:
        """The cheapest pages to move, ``None`` when enough slabs are or become empty on their own."""
        arena, groups = self._ledger.arena, range(len(needed))
        freed = [sum(map(len, each)) for each in eviction.freed] or [0] * len(needed)
        lacking = arena.slabs_lacking(needed, freed)
        free: list[npt.NDArray[np.bool_]] = []
        owners, slabs, costs = [], [], []
        for group in groups:
            mask = self._free_mask(group, eviction)
            free.append(mask)
            surplus = arena.surplus_slabs(group, needed[group], freed[group])
            if not surplus:
                continue
            mine = arena.slabs_of(group)
            mine = mine[~fixed[group][mine]]
            used = arena.pages_per_slab[group] - np.count_nonzero(mask.reshape(-1, arena.pages_per_slab[group]), axis=1)
            chosen = mine[np.argsort(used[mine], kind="stable")[:surplus]]
            slabs.append(chosen)
            costs.append(used[chosen] * self._layout.groups[group].page_bytes)
            owners.append(np.full(len(chosen), group))
        if not lacking or not slabs:
            return None
        cost, owner, slab = np.concatenate(costs), np.concatenate(owners), np.concatenate(slabs)
        cheapest = np.argsort(cost, kind="stable")[:lacking]
        assert len(cheapest) == lacking
        if not cost[cheapest].any():
            return None
        pairs = [self._pairs(group, slab[cheapest[owner[cheapest] == group]], free[group]) for group in groups]
        return Moves(tuple(old for old, _ in pairs), tuple(new for _, new in pairs))

    def _pairs(self, group: int, slabs: IntArray, free: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """Used pages of ``slabs``, and as many free ones of the group's other slabs, of the fullest first."""
        arena = self._ledger.arena
        pages = arena.slab_pages(group, slabs)
        sources = pages[~free[pages]]
        if not len(sources):
            return sources, sources
        per_slab = arena.pages_per_slab[group]
        room = np.count_nonzero(free.reshape(-1, per_slab), axis=1)
        room[slabs] = 0
        others = np.flatnonzero(room)
        others = others[np.argsort(room[others], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(room[others]), len(sources))) + 1
        pages = arena.slab_pages(group, others[:enough].astype(np.int32))
        return sources, pages[free[pages]][: len(sources)]

    def _free_mask(self, group: int, eviction: Eviction) -> npt.NDArray[np.bool_]:
        """Per page of the group, is it free once the eviction is carried out?"""
        page_count = self._layout.arena_bytes // self._layout.groups[group].page_bytes
        mask = np.zeros(page_count, np.bool_)
        mask[self._ledger.arena.free_pages(group)] = True
        for pages in eviction.freed[group] if eviction.freed else ():
            mask[pages] = True
        return mask

    def _movable(self, fixed: list[npt.NDArray[np.bool_]]) -> list[int]:
        """Slabs per group all of whose pages may move."""
        arena = self._ledger.arena
        return [int(np.count_nonzero(~slabs[arena.slabs_of(group)])) for group, slabs in enumerate(fixed)]

    def _fixed_slabs(self) -> list[npt.NDArray[np.bool_]]:
        """Per group and slab, does it hold a page that a step in flight or a transfer names?"""
        per_slab = self._ledger.arena.pages_per_slab
        fixed = [np.zeros(self._layout.slab_count, np.bool_) for _ in per_slab]
        for each in self.copying:
            for group, touched in each.touched():
                fixed[group][touched // per_slab[group]] = True
        for sequence in self._sequences.values():
            if not sequence.in_flight and not sequence.arriving:
                continue
            for group, table in enumerate(self._tables.arrays):
                exact = group in self._exact
                row = table[sequence.slot, : sequence.state_columns if exact else sequence.block_count]
                fixed[group][present(row) // per_slab[group]] = True
                if exact:
                    place = self._exact.index(group)
                    for pages in sequence.snapshots.values():
                        fixed[group][pages[place] // per_slab[group]] = True
        return fixed

    def _extents(self) -> Iterator[Extent]:
        """Every extent, those too that are kept by a hold only and cannot be found any more."""
        yield from self._tree.extents()
        seen: set[int] = set()
        held = [extent for each in self.copying for extent in each.held()]
        for sequence in self._sequences.values():
            sources = sequence.sources
            held += [
                each for each in (sequence.tip, sources.extent if sources is not None else None) if each is not None
            ]
        for node in held:
            # Above the first that can be found, all can.
            while node.stale and node.parent is not None and id(node) not in seen:
                seen.add(id(node))
                yield node
                node = node.parent

    def _bytes(self, moves: Moves) -> int:
        return sum(len(each) * group.page_bytes for each, group in zip(moves.sources, self._layout.groups))
