"""Pages that another process reads or writes: kept until it has ended, whatever becomes of their sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import attrs
import numpy as np

from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.sequence import Sequence, Tables
from kvist.step import NO_PAGE, IntArray, present
from kvist.tiers.level import Pin, pinned


@attrs.define(eq=False)
class Hold:
    """Keeps pages of a sequence, whatever becomes of it. Made by ``manager.hand_over``, ``lend`` and ``give_up``.

    length: tokens whose rows are there.
    pages: per group int32 ``[blocks]``, the page of each block ordinal, NO_PAGE where there is none; of groups with one
        page per sequence, that page. Do not write to them.
    """

    length: int
    pages: tuple[IntArray, ...]
    _release: Callable[[], None] | None

    @property
    def released(self) -> bool:
        return self._release is None

    def release(self) -> None:
        """Nobody reads or writes the pages any more. Idempotent; for the thread that drives the manager."""
        release, self._release = self._release, None
        if release is not None:
            release()


@attrs.define(eq=False)
class Landing:
    """A sequence whose rows are to come from another process. Made by ``manager.land``.

    length: its tokens then. pages: per group as of :class:`Hold`, with pages only where something has to come: what is
    cached here has none. The sequence is ``arriving`` until ``manager.landed`` or ``manager.give_up``.

    tables: the same with what is cached here, from which what is to come may be computed. Do not write to cached pages.
    """

    sequence: Sequence
    length: int
    pages: tuple[IntArray, ...]
    tables: tuple[IntArray, ...]

    @property
    def complete(self) -> bool:
        """Is there nothing to come, because all of it is cached?"""
        return not any((pages != NO_PAGE).any() for pages in self.pages)


class Handovers:
    """The holds of a manager. Owns nothing; mutates ledger and tree.

    released: called with the pages ``[groups, n]`` that left the tree when a hold is released.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        tree: PrefixTree,
        tables: Tables,
        released: Callable[[list[IntArray]], None],
    ) -> None:
        self._groups = layout.groups
        self._block = layout.block_tokens
        self._ledger = ledger
        self._tree = tree
        self._tables = tables
        self._released = released
        #: For the audit, and for whoever moves pages.
        self.pins: list[Pin] = []

    def held(self) -> Iterator[Extent]:
        """Extents that holds keep."""
        return (pin.extent for pin in self.pins if pin.extent is not None)

    @property
    def copying(self) -> list[int]:
        """Pages per group that holds keep, a page once for each."""
        return pinned(self.pins, len(self._groups))

    def touched(self) -> Iterator[tuple[int, IntArray]]:
        """Groups and pages that others read or write, and which must stay where they are."""
        for pin in self.pins:
            yield from enumerate(pin.pages)
            yield from enumerate(pin.read)

    def lease_states(self, sequence: Sequence) -> list[IntArray]:
        """Per group the sequence's state, with one more lease; empty for other groups. Before it is published, because
        the sequence gives it up then."""
        states = []
        for group in self._groups:
            count = min(1, sequence.state_columns) if group.exact else 0
            pages = self._tables.arrays[group.index][sequence.slot, :count].copy()
            if count:
                self._ledger.lease(group.index, pages)
            states.append(pages)
        return states

    def keep(self, sequence: Sequence, length: int, states: SequenceOf[IntArray]) -> Hold:
        """Take over the sequence's first ``length`` tokens, and with them whatever only it has: it is about to be
        vacated. ``states`` as from :meth:`lease_states`."""
        slot, blocks, shared = sequence.slot, sequence.block_count, sequence.shared
        count = -(-length // self._block)
        nothing: IntArray = np.empty(0, np.int32)
        listed, kept, read = [], [], []
        for group in self._groups:
            row = self._tables.arrays[group.index][slot, :blocks].copy()
            if group.exact:
                listed.append(states[group.index])
                kept.append(states[group.index])
            elif group.sparse:
                pages = present(row)
                self._ledger.lease(group.index, pages)
                listed.append(row[:count])
                kept.append(pages)
            else:
                listed.append(row[:count])
                kept.append(row[shared:])
            read.append(nothing if group.sparse else row[:shared])
        # What is the sequence's alone is the hold's from now on.
        sequence.shared = blocks
        if sequence.tip is not None:
            self._tree.hold(sequence.tip)
        pin = Pin(sequence.tip, kept, read)
        self.pins.append(pin)
        return Hold(length, tuple(listed), lambda: self._unpin(pin))

    def lend(self, sequence: Sequence) -> Hold:
        """Keep what a sequence has published of dense groups, which goes on."""
        nothing: IntArray = np.empty(0, np.int32)
        rows = [
            nothing if group.sparse else self._tables.arrays[group.index][sequence.slot, : sequence.shared].copy()
            for group in self._groups
        ]
        if sequence.tip is not None:
            self._tree.hold(sequence.tip)
        pin = Pin(sequence.tip, [nothing for _ in rows], rows)
        self.pins.append(pin)
        return Hold(sequence.published, tuple(rows), lambda: self._unpin(pin))

    def _unpin(self, pin: Pin) -> None:
        self.pins.remove(pin)
        self._ledger.note_peaks(self._tree.idle_blocks)
        for group, pages in enumerate(pin.pages):
            if len(pages):
                self._ledger.release(group, pages)
        if pin.extent is not None:
            self._released(self._tree.release(pin.extent))
