"""Who holds each page. One lease is the right to read or write a page until it is released.

A page is *held*, *cached* (findable, no lease: evictable) or *free* (neither). Nothing but a lease keeps a page, and
nothing depends on destructors.

Sparse groups count leases page by page, because a sequence gives their blocks up while it runs. A page of a dense
group has one owner: a sequence, or once it is published the prefix tree, where holding the extent is the lease. That
is why nothing here is done per block for dense groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist.layout import Layout
from kvist.memory.arena import Arena
from kvist.step import IntArray, repeats


class Ledger:
    """The arena, and lease counts and publication marks of sparse groups as one NumPy column each.

    All methods take arrays without duplicates and without NO_PAGE. They index with intp, because NumPy writes through
    int32 indices several times slower, and count instead of asking ``any()``, for the same reason.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arena = Arena(layout)
        self.sparse = [group.sparse for group in layout.groups]
        self._dense = [group.index for group in layout.groups if not group.sparse]
        counts = [layout.arena_bytes // group.page_bytes if group.sparse else 0 for group in layout.groups]
        #: 1 for free pages too: the lease of whoever takes them next, who then has nothing to write.
        self.leases = [np.ones(count, np.int32) for count in counts]
        self.published: list[npt.NDArray[np.bool_]] = [np.zeros(count, np.bool_) for count in counts]
        #: Pages of sparse groups that are published and not leased.
        self.cached = [0] * len(counts)
        #: Pages held at most so far.
        self.held_peak = [0] * len(counts)

    def allocate(self, group: int, count: int) -> IntArray:
        """``count`` free pages, from those the arena gathered, now the caller's: with one lease each."""
        return self.arena.take(group, count)

    def allocate_one(self, group: int) -> int:
        """As ``allocate(group, 1)``, at the cost of scalar accesses."""
        return self.arena.take_one(group)

    def lease(self, group: int, pages: IntArray) -> None:
        """One more lease on pages of a sparse group that are held or cached."""
        column, ids = self.leases[group], pages.astype(np.intp)
        before = column.take(ids)
        column[ids] = before + 1
        self.cached[group] -= len(pages) - int(np.count_nonzero(before))

    def release(self, group: int, pages: IntArray) -> None:
        """One lease less. Pages without lease and not published become free at once."""
        if not self.sparse[group]:
            self.arena.give(group, pages)
            return
        held = self.arena.taken_count[group] - self.cached[group]
        if held > self.held_peak[group]:
            self.held_peak[group] = held
        column, ids = self.leases[group], pages.astype(np.intp)
        alone = column.take(ids) == 1
        # Booleans: the last lease, and not published.
        free = alone > self.published[group].take(ids)
        count = int(np.count_nonzero(free))
        if count < len(ids):
            column[ids[~free]] -= 1
            self.cached[group] += int(np.count_nonzero(alone)) - count
            ids = ids[free]
        if count:
            self.arena.give(group, ids)

    def release_one(self, group: int, page: int) -> None:
        """As ``release`` of one page of a sparse group, at the cost of scalar accesses."""
        held = self.arena.taken_count[group] - self.cached[group]
        if held > self.held_peak[group]:
            self.held_peak[group] = held
        column = self.leases[group]
        left = column.item(page) - 1
        if left or self.published[group].item(page):
            column[page] = left
            self.cached[group] += not left
        else:
            self.arena.give_one(group, page)

    def publish(self, group: int, pages: IntArray) -> None:
        """Mark held pages of a sparse group as findable by others."""
        self.published[group][pages.astype(np.intp)] = True

    def publish_one(self, group: int, page: int) -> None:
        """As ``publish`` of one page."""
        self.published[group][page] = True

    def unpublish(self, group: int, pages: IntArray) -> None:
        """Pages that left the prefix tree. Those without a lease become free at once."""
        if not len(pages):
            return
        if not self.sparse[group]:
            self.arena.give(group, pages)
            return
        ids = pages.astype(np.intp)
        self.published[group][ids] = False
        free = ids[self.leases[group].take(ids) == 0]
        if len(free):
            self.leases[group][free] = 1
            self.cached[group] -= len(free)
            self.arena.give(group, free)

    def held_count(self, group: int, idle_blocks: int) -> int:
        """Pages somebody holds; ``idle_blocks``: of the prefix tree."""
        return self.arena.taken_count[group] - (self.cached[group] if self.sparse[group] else idle_blocks)

    def note_peaks(self, idle_blocks: int) -> None:
        """Remember how many pages of dense groups are held, if it is more than ever. Call before they are given up,
        which is when the number is highest."""
        taken, peaks = self.arena.taken_count, self.held_peak
        for group in self._dense:
            held = taken[group] - idle_blocks
            if held > peaks[group]:
                peaks[group] = held

    def free_count(self, group: int) -> int:
        """Pages the group could take now without evicting, slabs that no group owns included."""
        return self.arena.free_count[group] + self.arena.unowned_count(group)

    def free_pages(self, group: int) -> IntArray:
        """Ids of every page that nobody holds and nobody can find."""
        return np.concatenate([self.arena.free_pages(group), self.arena.unowned_pages(group)])

    def check(self, owned: Sequence[IntArray], leased: Sequence[IntArray], published: Sequence[IntArray]) -> list[str]:
        """Compare with a recount, all per group. owned: pages of dense groups that sequences own; leased: pages of
        sparse groups with one entry per lease; published: every page in the prefix tree. Returns violated invariants
        in words."""
        faults = self.arena.check()
        everywhere: list[IntArray] = []
        for group, name in enumerate(each.name for each in self.layout.groups):
            pages = published[group]
            if repeats(pages):
                faults.append(f"{name}: a page is published twice")
            free = self.arena.free_pages(group)
            if self.sparse[group]:
                faults += self._column_faults(group, leased[group], pages)
                if self.published[group][free].any():
                    faults.append(f"{name}: a free page is published")
                # Each once: leased by any number, published, or both.
                used = np.flatnonzero(np.bincount(np.concatenate([leased[group], pages]))).astype(np.int32)
            else:
                used = np.concatenate([owned[group], pages])
                if repeats(used):
                    faults.append(f"{name}: a page has two owners")
            everything = np.concatenate([used, free])
            if repeats(everything):
                faults.append(f"{name}: a page is free and in use")
            if len(used) != self.arena.taken_count[group]:
                faults.append(f"{name}: {len(used)} pages are in use, {self.arena.taken_count[group]} are taken")
            everywhere.append(used)
        if self.arena.fungible:
            pages = np.concatenate(everywhere)
            if len(np.unique(pages)) != len(pages):
                faults.append("two groups use one page")
        return faults

    def _column_faults(self, group: int, leased: IntArray, published: IntArray) -> list[str]:
        column, name = self.leases[group], self.layout.groups[group].name
        faults = []
        counts = np.bincount(leased, minlength=len(column))
        unused = counts == 0
        unused[published] = False
        # Whoever takes a free page next has its lease.
        counts[unused] = 1
        if not np.array_equal(counts, column):
            faults.append(f"{name}: lease counts differ from what sequences and steps hold")
        marks = np.zeros(len(column), np.bool_)
        marks[published] = True
        if not np.array_equal(marks, self.published[group]):
            faults.append(f"{name}: publication marks differ from the prefix tree")
        cached = int(np.count_nonzero(marks & (column == 0)))
        if cached != self.cached[group]:
            faults.append(f"{name}: {cached} pages are cached, the count says {self.cached[group]}")
        return faults
