"""What has to happen to pages before the next step writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvist.layout import Layout
from kvist.step import IntArray, Step


class Owed:
    """Copies and zeros for the next committed step, whichever sequences it has.

    Pages are written by steps only, and steps run in the order of their commits. So what a source holds now it still
    holds when the next step begins, even if the page is freed and given to somebody else until then.

    What was owed to a page that has been given up is done all the same, which harms nobody, unless something else is
    owed to the same bytes: then only that.
    """

    def __init__(self, layout: Layout) -> None:
        group_count = len(layout.groups)
        self._page_bytes = [group.page_bytes for group in layout.groups]
        self._none = tuple(_frozen(np.empty((0, 2), np.int32)) for _ in range(group_count))
        self._no_pages = tuple(_frozen(np.empty(0, np.int32)) for _ in range(group_count))
        #: Copies and fresh pages of a step that has none.
        self.nothing = self._none, self._no_pages
        #: Per group: destination -> source, and pages to fill with zeros.
        self._copies: list[dict[int, int]] = [{} for _ in range(group_count)]
        self._fresh: list[dict[int, None]] = [{} for _ in range(group_count)]
        #: Is anything owed?
        self.something = False

    def copy(self, pairs: Sequence[Iterable[tuple[int, int]]]) -> None:
        """Copy whole pages ``(source, destination)``, given per group. A source that is itself still to be copied to
        stands for its own source."""
        for group, (copies, fresh, group_pairs) in enumerate(zip(self._copies, self._fresh, pairs)):
            for source, destination in group_pairs:
                if self.something:
                    self._void(group, destination)
                self.something = True
                if source in fresh:
                    copies.pop(destination, None)
                    fresh[destination] = None
                else:
                    fresh.pop(destination, None)
                    copies[destination] = copies.get(source, source)

    def move(self, group: int, sources: IntArray, destinations: IntArray) -> None:
        """Copy many pages of one group whose places others will take. As :meth:`copy`, without a loop where nothing
        else is owed."""
        pairs = zip(sources.tolist(), destinations.tolist())
        if self.something:
            self.copy([pairs if each == group else () for each in range(len(self._copies))])
        else:
            self._copies[group].update((to, source) for source, to in pairs)
            self.something = len(sources) > 0

    def zero(self, pages: Sequence[Iterable[int]]) -> None:
        """Fill pages, given per group, with zeros."""
        for group, (copies, fresh, group_pages) in enumerate(zip(self._copies, self._fresh, pages)):
            for page in group_pages:
                if self.something:
                    self._void(group, page)
                self.something = True
                copies.pop(page, None)
                fresh[page] = None

    def again(self, step: Step) -> None:
        """The step has not begun and will not: what it was to do comes before what is owed since."""
        since = self._copies, self._fresh
        groups = len(self._copies)
        self._copies, self._fresh = [{} for _ in range(groups)], [{} for _ in range(groups)]
        self.copy([[(int(source), int(to)) for source, to in pairs] for pairs in step.copies])
        self.zero([pages.tolist() for pages in step.fresh])
        self.copy([[(source, to) for to, source in copies.items()] for copies in since[0]])
        self.zero(since[1])

    def _void(self, group: int, page: int) -> None:
        """Forget what is owed to pages of other groups that lie where ``page`` of ``group`` does: they were given up,
        or it could not lie there."""
        for other, (copies, fresh) in enumerate(zip(self._copies, self._fresh)):
            if other != group and (copies or fresh):
                size, own = self._page_bytes[other], self._page_bytes[group]
                for place in range(page * own // size, -(-(page + 1) * own // size)):
                    copies.pop(place, None)
                    fresh.pop(place, None)

    def take(self) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """Everything owed, as a step has it; from now on nothing is."""
        copies = tuple(
            _frozen(np.array([(source, to) for to, source in each.items()], np.int32)) if each else none
            for each, none in zip(self._copies, self._none)
        )
        fresh = tuple(
            _frozen(np.array(list(each), np.int32)) if each else none for each, none in zip(self._fresh, self._no_pages)
        )
        for group_copies, group_fresh in zip(self._copies, self._fresh):
            group_copies.clear()
            group_fresh.clear()
        self.something = False
        return copies, fresh


def _frozen(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array
