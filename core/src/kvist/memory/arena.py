"""Which slab belongs to which group, and which pages of a group are free. Integers only, no bytes.

Groups take slabs when they need pages; a slab whose pages are all free can go to another group. A group's page id
times its page bytes is the byte offset in the arena, so ids stay below ``arena_bytes // page_bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

import numpy as np
import numpy.typing as npt

from kvist.layout import Layout
from kvist.step import IntArray, repeats


class Arena:
    """Free pages of one tier. A page is free or taken, nothing else."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pages_per_slab = [layout.slab_bytes // group.page_bytes for group in layout.groups]
        # Slabs that a group keeps whatever the others need: they hold the pages its floor promises. A group that is
        # alone has all of them anyway.
        self._floor_slabs = layout.floor_slabs if len(layout.groups) > 1 else (0,)
        #: One slab is one page of every group: any free page serves any group, so all groups have the same free pages,
        #: and no slab has an owner.
        self.fungible = all(count == 1 for count in self.pages_per_slab) and not any(self._floor_slabs)
        #: Do several groups take from one stack?
        self._shared = self.fungible and len(layout.groups) > 1
        self._slab_owner = np.full(layout.slab_count, -1, np.int32)
        # Stacks, top at the end: pages and slabs are handed out from the low end. Slab 0 holds every group's page 0,
        # the reserved one, and is never handed out.
        self._free_slabs = np.arange(layout.slab_count - 1, 0, -1, dtype=np.int32)
        self._free = [np.empty(0, np.int32) for _ in layout.groups]
        #: Free pages per group, slabs that no group owns not counted.
        self.free_count = [0] * len(layout.groups)
        #: Pages per group that are not free.
        self.taken_count = [0] * len(layout.groups)
        if self.fungible:
            self._free = [self._free_slabs] * len(layout.groups)
            self.free_count = [len(self._free_slabs)] * len(layout.groups)
            self._free_slabs = np.empty(0, np.int32)
        elif any(self._floor_slabs):
            for group, count in enumerate(self._floor_slabs):
                self._add_slabs(group, count)

    def free_pages(self, group: int) -> IntArray:
        """A copy of the group's free page ids, without those of slabs that no group owns."""
        return self._free[group][: self.free_count[group]].copy()

    def unowned_pages(self, group: int) -> IntArray:
        """Page ids that slabs owned by no group would give ``group``."""
        return self._slab_pages(group, self._free_slabs)

    def unowned_count(self, group: int) -> int:
        """How many these are."""
        return len(self._free_slabs) * self.pages_per_slab[group]

    def has(self, needed: Sequence[int]) -> bool:
        """Are ``needed`` pages per group free, without moving a slab?"""
        if self.fungible:
            return sum(needed) <= self.free_count[0]
        return all(map(le, needed, self.free_count))

    def shortage(self, needed: Sequence[int], freed: Sequence[Sequence[IntArray]] = ()) -> list[int]:
        """Pages each group would still lack after giving back ``freed[group]``, a list of page arrays each; slabs
        moving between groups included. Changes nothing."""
        free = self.free_count
        if self.fungible:
            left = free[0] + sum(len(array) for arrays in freed for array in arrays)
            short = []
            for want in needed:
                short.append(max(0, want - left))
                left = max(0, left - want)
            return short
        if freed:
            free = [count + sum(map(len, arrays)) for count, arrays in zip(free, freed)]
        short = [want - have if want > have else 0 for want, have in zip(needed, free)]
        if not any(short):
            return short
        slabs = len(self._free_slabs)
        for group in range(len(free)):
            surplus = self._surplus(group, free[group] - needed[group])
            if surplus > 0:
                slabs += min(surplus, len(self._empty_slabs(group, freed[group] if freed else ())))
        for group, lacking in enumerate(short):
            used = min(slabs, -(-lacking // self.pages_per_slab[group]))
            slabs -= used
            short[group] = max(0, lacking - used * self.pages_per_slab[group])
        return short

    def shortage_on_paper(self, needed: Sequence[int], freed: Sequence[int], movable: Sequence[int]) -> list[int]:
        """As :meth:`shortage` if pages could change their places first: slabs then count as far as their group's other
        slabs have room for what is in them, and not only when they are empty.

        freed: pages given back, per group. movable: slabs per group all of whose pages may move. Changes nothing.
        """
        spare = [have + more - want for have, more, want in zip(self.free_count, freed, needed)]
        slabs = len(self._free_slabs)
        for group, over in enumerate(spare):
            if over > 0:
                slabs += min(self._surplus(group, over), movable[group])
        short = []
        for over, per_slab in zip(spare, self.pages_per_slab):
            used = min(slabs, -(over // per_slab)) if over < 0 else 0
            slabs -= used
            short.append(max(0, -over - used * per_slab))
        return short

    def slabs_lacking(self, needed: Sequence[int], freed: Sequence[int]) -> int:
        """Slabs that groups must get from others, beside those that nobody owns, once ``freed[group]`` pages are given
        back."""
        lacking = (want - have - more for want, have, more in zip(needed, self.free_count, freed))
        slabs = sum(-(-pages // per_slab) for pages, per_slab in zip(lacking, self.pages_per_slab) if pages > 0)
        return max(0, slabs - len(self._free_slabs))

    def surplus_slabs(self, group: int, needed: int, freed: int) -> int:
        """Slabs whose worth of free pages ``group`` can do without, once ``freed`` pages are given back."""
        return max(0, self._surplus(group, self.free_count[group] + freed - needed))

    def slabs_of(self, group: int) -> IntArray:
        """Slabs that ``group`` owns, ascending."""
        return np.flatnonzero(self._slab_owner == group).astype(np.int32)

    def slab_pages(self, group: int, slabs: IntArray) -> IntArray:
        """Page ids of ``slabs``, in their order."""
        return self._slab_pages(group, slabs)

    def swap(self, group: int, taken: IntArray, free: IntArray) -> None:
        """Make ``taken`` pages free and as many ``free`` ones taken instead."""
        stack = self._free[group][: self.free_count[group]]
        places = np.isin(stack, free)
        assert np.count_nonzero(places) == len(free) == len(taken)
        stack[places] = taken

    def gather(self, needed: Sequence[int]) -> None:
        """Move slabs between groups until each has ``needed[group]`` free pages. The caller has made sure with
        ``shortage`` that there are enough. All groups at once, before any takes a page out of an empty slab."""
        if self.fungible:
            return
        for group, count in enumerate(needed):
            lacking = count - self.free_count[group]
            if lacking > 0:
                self._add_slabs(group, -(-lacking // self.pages_per_slab[group]), needed)

    def take(self, group: int, count: int) -> IntArray:
        """``count`` page ids, now the caller's, from those gathered before."""
        top = self.free_count[group] - count
        assert top >= 0
        self._set_free(group, top)
        self.taken_count[group] += count
        return self._free[group][top : top + count].copy()

    def take_one(self, group: int) -> int:
        """As ``take(group, 1)``, at the cost of one array read."""
        left = self.free_count[group] - 1
        assert left >= 0
        if self._shared:
            self._set_free(group, left)
        else:
            self.free_count[group] = left
        self.taken_count[group] += 1
        return self._free[group].item(left)

    def give(self, group: int, pages: npt.NDArray[np.integer]) -> None:
        """Return pages taken before. Each page is given back once."""
        self.taken_count[group] -= len(pages)
        self._push(group, pages)

    def give_one(self, group: int, page: int) -> None:
        """As ``give`` of one page, at the cost of one array write."""
        count = self.free_count[group]
        if count == len(self._free[group]):
            self.give(group, np.array((page,), np.int32))
            return
        self.taken_count[group] -= 1
        self._free[group][count] = page
        self._set_free(group, count + 1)

    def _push(self, group: int, pages: npt.NDArray[np.integer]) -> None:
        count = self.free_count[group]
        end = count + len(pages)
        stack = self._free[group]
        if end > len(stack):
            grown = np.empty(max(end, 2 * len(stack), 64), np.int32)
            grown[:count] = stack[:count]
            self._free[group] = stack = grown
        stack[count:end] = pages
        self._set_free(group, end)

    def _set_free(self, group: int, count: int) -> None:
        if self._shared:
            self.free_count = [count] * len(self.free_count)
        else:
            self.free_count[group] = count

    def shuffle(self, rng: np.random.Generator) -> None:
        """Hand out the free pages in random order from now on, so that tests meet every page table."""
        for group, count in enumerate(self.free_count[: 1 if self.fungible else None]):
            rng.shuffle(self._free[group][:count])
        rng.shuffle(self._free_slabs)

    def check(self) -> list[str]:
        """Violated invariants in words; empty when all is well."""
        faults = []
        for group, stack in enumerate(self._free):
            pages = stack[: self.free_count[group]]
            name = self.layout.groups[group].name
            if repeats(pages):
                faults.append(f"{name}: a page is free twice")
            if len(pages) and int(pages.min()) < self.pages_per_slab[group]:
                faults.append(f"{name}: a reserved page is free")
            if self.fungible:
                continue
            if not (self._slab_owner[pages // self.pages_per_slab[group]] == group).all():
                faults.append(f"{name}: a free page lies in another group's slab")
            owned = int(np.count_nonzero(self._slab_owner == group)) * self.pages_per_slab[group]
            if owned != self.free_count[group] + self.taken_count[group]:
                faults.append(f"{name}: owns {owned} pages, not {self.free_count[group]} + {self.taken_count[group]}")
            if owned < self._floor_slabs[group] * self.pages_per_slab[group]:
                faults.append(f"{name}: owns {owned} pages, fewer than its floor")
        if self.fungible and self.free_count[0] + sum(self.taken_count) != self.layout.slab_count - 1:
            faults.append(f"{self.free_count[0]} free pages and {self.taken_count} taken are not all there are")
        if (self._slab_owner[self._free_slabs] != -1).any():
            faults.append("a free slab has an owner")
        return faults

    def _surplus(self, group: int, spare_pages: int) -> int:
        """Whole slabs in ``spare_pages``, as far as the group's floor lets them go; perhaps negative."""
        slabs = spare_pages // self.pages_per_slab[group]
        floor = self._floor_slabs[group]
        if floor:
            slabs = min(slabs, int(np.count_nonzero(self._slab_owner == group)) - floor)
        return slabs

    def _slab_pages(self, group: int, slabs: IntArray) -> IntArray:
        """Page ids of ``slabs``, in their order."""
        per_slab = self.pages_per_slab[group]
        pages: IntArray = (slabs[:, None] * per_slab + np.arange(per_slab, dtype=np.int32)).astype(np.int32).ravel()
        return pages

    def _add_slabs(self, group: int, count: int, needed: Sequence[int] = ()) -> None:
        if len(self._free_slabs) < count:
            self._reclaim(count - len(self._free_slabs), needed)
        keep = len(self._free_slabs) - count
        slabs, self._free_slabs = self._free_slabs[keep:], self._free_slabs[:keep]
        self._slab_owner[slabs] = group
        # Descending, so that ids come out ascending.
        self._push(group, self._slab_pages(group, np.sort(slabs))[::-1])

    def _empty_slabs(self, group: int, freed: Sequence[IntArray] = ()) -> IntArray:
        """Slabs of ``group`` whose pages are all free (once ``freed`` are)."""
        pages = self._free[group][: self.free_count[group]]
        if freed:
            pages = np.concatenate([pages, *freed])
        per_slab = self.pages_per_slab[group]
        counts = np.bincount(pages // per_slab, minlength=len(self._slab_owner))
        return np.flatnonzero(counts == per_slab).astype(np.int32)

    def _reclaim(self, count: int, needed: Sequence[int]) -> None:
        """Take ``count`` empty slabs back from groups that have more free pages than they need, richest first."""
        surplus = [
            self._surplus(group, free - want)
            for group, (free, want) in enumerate(zip(self.free_count, needed, strict=True))
        ]
        for group in sorted(range(len(surplus)), key=lambda g: -surplus[g]):
            if surplus[group] <= 0:
                break
            slabs = self._empty_slabs(group)[-min(count, surplus[group]) :]
            if not len(slabs):
                continue
            pages = self._free[group][: self.free_count[group]]
            keep = pages[~np.isin(pages // self.pages_per_slab[group], slabs)]
            self._free[group][: len(keep)] = keep
            self.free_count[group] = len(keep)
            self._slab_owner[slabs] = -1
            self._free_slabs = np.concatenate([self._free_slabs, slabs])
            count -= len(slabs)
            if not count:
                return
        raise AssertionError("gather() without enough free slabs: the caller did not ask shortage() first")
