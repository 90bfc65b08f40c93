"""What has to happen to pages before the next step writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvist.step import IntArray, Step


class Owed:
    """Copies and zeros for the next committed step, whichever sequences it has.

    Pages are written by steps only, and steps run in the order of their commits. So what a source holds now it still
    holds when the next step begins, even if the page is freed and given to somebody else until then.
    """

    def __init__(self, group_count: int) -> None:
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
        for copies, fresh, group_pairs in zip(self._copies, self._fresh, pairs):
            for source, destination in group_pairs:
                self.something = True
                if source in fresh:
                    copies.pop(destination, None)
                    fresh[destination] = None
                else:
                    fresh.pop(destination, None)
                    copies[destination] = copies.get(source, source)

    def zero(self, pages: Sequence[Iterable[int]]) -> None:
        """Fill pages, given per group, with zeros."""
        for copies, fresh, group_pages in zip(self._copies, self._fresh, pages):
            for page in group_pages:
                self.something = True
                copies.pop(page, None)
                fresh[page] = None

    def pages(self) -> list[list[int]]:
        """Per group every page that is to be copied from or written, whoever has it."""
        return [[*copies, *copies.values(), *fresh] for copies, fresh in zip(self._copies, self._fresh)]

    def again(self, step: Step) -> None:
        """The step will not run: what it was to do comes before what is owed since."""
        for group, (pairs, pages) in enumerate(zip(step.copies, step.fresh)):
            # Its copies are simultaneous: a source that is overwritten by another of them stands for what it held.
            first: dict[int, int] = {int(to): int(source) for source, to in pairs}
            zeros: dict[int, None] = dict.fromkeys(pages.tolist())
            copies, fresh = dict(first), dict(zeros)
            for to, source in self._copies[group].items():
                if source in zeros:
                    copies.pop(to, None)
                    fresh[to] = None
                else:
                    fresh.pop(to, None)
                    copies[to] = first.get(source, source)
            for page in self._fresh[group]:
                copies.pop(page, None)
                fresh[page] = None
            self._copies[group], self._fresh[group] = copies, fresh
            self.something = self.something or bool(copies or fresh)

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
