"""Who holds each page. One lease is the right to read or write a page until it is released.

A page is *held* (leases > 0), *cached* (published, no lease: evictable) or *free* (neither). Nothing but a lease
keeps a page, and nothing depends on destructors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist.layout import Layout
from kvist.memory.arena import Arena
from kvist.step import IntArray


class Ledger:
    """Lease counts and publication marks of every page, as one NumPy column each per group.

    All methods take arrays without duplicates and without NO_PAGE. They index with intp, because NumPy writes through
    int32 indices several times slower, and count instead of asking ``any()``, for the same reason.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arena = Arena(layout)
        counts = [layout.arena_bytes // group.page_bytes for group in layout.groups]
        self.leases = [np.zeros(count, np.int32) for count in counts]
        self.published: list[npt.NDArray[np.bool_]] = [np.zeros(count, np.bool_) for count in counts]
        #: Pages with at least one lease, per group, now and at most so far.
        self.held_count = [0] * len(counts)
        self.held_peak = [0] * len(counts)

    def allocate(self, group: int, count: int) -> IntArray:
        """``count`` free pages, each with one lease, from those the arena gathered."""
        pages = self.arena.take(group, count)
        self.leases[group][pages.astype(np.intp)] = 1
        self._hold(group, count)
        return pages

    def allocate_one(self, group: int) -> int:
        """As ``allocate(group, 1)``, at the cost of scalar accesses."""
        page = self.arena.take_one(group)
        self.leases[group][page] = 1
        held = self.held_count[group] + 1
        self.held_count[group] = held
        if held > self.held_peak[group]:
            self.held_peak[group] = held
        return page

    def lease(self, group: int, pages: IntArray) -> None:
        """One more lease on pages that are held or cached."""
        column, ids = self.leases[group], pages.astype(np.intp)
        before = column.take(ids)
        column[ids] = before + 1
        self._hold(group, len(pages) - int(np.count_nonzero(before)))

    def release(self, group: int, pages: IntArray) -> None:
        """One lease less. Pages without lease and not published become free at once."""
        column, ids = self.leases[group], pages.astype(np.intp)
        after = column.take(ids)
        after -= 1
        column[ids] = after
        shared = int(np.count_nonzero(after))
        if shared:
            ids = ids[after == 0]
        self.held_count[group] -= len(ids)
        marks = self.published[group].take(ids)
        if np.count_nonzero(marks) < len(ids):
            self.arena.give(group, ids[~marks])

    def publish(self, group: int, pages: IntArray) -> None:
        """Mark held pages as findable by others."""
        self.published[group][pages.astype(np.intp)] = True

    def unpublish(self, group: int, pages: IntArray) -> None:
        """Pages are no longer findable. Those without a lease become free at once."""
        ids = pages.astype(np.intp)
        self.published[group][ids] = False
        free = ids[self.leases[group].take(ids) == 0]
        if len(free):
            self.arena.give(group, free)

    def evict(self, group: int, pages: IntArray) -> None:
        """Cached pages become free."""
        self.published[group][pages.astype(np.intp)] = False
        self.arena.give(group, pages)

    def cached_count(self, group: int) -> int:
        """Published pages without a lease."""
        return int(np.count_nonzero(self.published[group] & (self.leases[group] == 0)))

    def free_count(self, group: int) -> int:
        """Pages the group could take now without evicting, slabs that no group owns included."""
        return self.arena.free_count[group] + len(self.arena.unowned_pages(group))

    def free_pages(self, group: int) -> IntArray:
        """Ids of every page that nobody holds and nobody can find."""
        return np.concatenate([self.arena.free_pages(group), self.arena.unowned_pages(group)])

    def check(self, expected_leases: Sequence[IntArray], published: Sequence[IntArray]) -> list[str]:
        """Compare with a recount. ``expected_leases``: per group, page ids with one entry per lease;
        ``published``: per group, every page id in the prefix tree. Returns violated invariants in words."""
        faults = self.arena.check()
        for group, column in enumerate(self.leases):
            name = self.layout.groups[group].name
            if not np.array_equal(np.bincount(expected_leases[group], minlength=len(column)), column):
                faults.append(f"{name}: lease counts differ from what sequences and steps hold")
            pages = published[group]
            if len(np.unique(pages)) != len(pages):
                faults.append(f"{name}: a page is published twice")
            marks = np.zeros(len(column), np.bool_)
            marks[pages] = True
            if not np.array_equal(marks, self.published[group]):
                faults.append(f"{name}: publication marks differ from the prefix tree")
            free = self.arena.free_pages(group)
            if ((column[free] > 0) | self.published[group][free]).any():
                faults.append(f"{name}: a free page is held or published")
            held = int(np.count_nonzero(column))
            if held != self.held_count[group]:
                faults.append(f"{name}: {held} pages are held, the count says {self.held_count[group]}")
            owned = self.arena.owned_page_count(group)
            cached = self.cached_count(group)
            if len(free) + cached + held != owned:
                faults.append(f"{name}: {len(free)} free + {cached} cached + {held} held is not {owned}")
        return faults

    def _hold(self, group: int, count: int) -> None:
        self.held_count[group] += count
        if self.held_count[group] > self.held_peak[group]:
            self.held_peak[group] = self.held_count[group]
