"""Sequences that advance by one token a step, at a cost that follows block crossings instead of rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvist.errors import StateError
from kvist.sequence import Sequence
from kvist.step import IntArray

if TYPE_CHECKING:
    from collections.abc import Callable


class DecodeBatch:
    """Rows that each compute exactly one token in every step planned with ``decode=batch``.

    A row needs a page once per block, so rows are filed by the tick at which they cross into a new block, and a step
    looks at the due ones only. Made by ``manager.decode_batch()``. Rows may come and go while steps are in flight; the
    change concerns later steps.
    """

    def __init__(self, block_tokens: int, max_tokens: int | None, changed: Callable[[], None]) -> None:
        self.block_tokens = block_tokens
        #: Row order of the batch's part of the next step. Read only.
        self.sequences: list[Sequence] = []
        #: Steps completed, and steps committed.
        self.ticks = 0
        self.started = 0
        self._max_tokens = max_tokens
        #: The tick at which the first row reaches the model's length.
        self.limit_tick: float = math.inf
        #: Some rows may have a page for their next token although it opens a block: after a cancelled step, or when
        #: they reserved room for drafts before they joined.
        self.irregular = False
        self._changed = changed
        self._slots: IntArray = np.empty(64, np.int32)
        #: int32 ``[rows]``; a view that is replaced, not changed, when rows come and go.
        self.slots: IntArray = self._slots[:0]
        #: Scheduled tokens of each row.
        self.lengths: IntArray = np.empty(0, np.int32)
        self._all_ones = _ones(64)
        self.ones: IntArray = self._all_ones[:0]
        self._wheel: list[list[Sequence]] = [[] for _ in range(block_tokens)]
        #: Rows that left while a step with them was in flight.
        self._leaving: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def in_flight(self) -> bool:
        """Is a step of this batch committed and not completed?"""
        return self.started != self.ticks

    def join(self, sequence: Sequence) -> None:
        """Add a sequence as the last row.

        Raises StateError if the sequence is in a batch or a step, or if it has no page for its next token although that
        continues a block.
        """
        sequence.settle()
        if sequence.closed or sequence.suspended or sequence.in_flight or sequence.batch is not None:
            raise StateError(
                "join() needs an open sequence that is in no batch and no step",
                hint="complete the step first, or leave the other batch",
            )
        if sequence.loading:
            raise StateError("join() of a sequence that is loading", hint="poll() until it is not")
        if sequence.arriving:
            raise StateError("join() of a sequence that is arriving", hint="wait for its transfer, then call landed()")
        computed = sequence.computed
        if (
            sequence.sources is not None
            or (computed % self.block_tokens and sequence.block_count * self.block_tokens <= computed)
            or (not sequence.state_columns and sequence.layout.has_states)
        ):
            raise StateError(
                "join() of a sequence that has no page for its next token yet",
                hint="compute its first token with a Run, then join",
            )
        row = len(self.sequences)
        if row == len(self._slots):
            self._slots = np.resize(self._slots, 2 * row)
            self._all_ones = _ones(2 * row)
        self._slots[row] = sequence.slot
        lengths = np.empty(row + 1, np.int32)
        lengths[:row] = self.lengths
        lengths[row] = computed
        self._show(row + 1, lengths)
        self.sequences.append(sequence)
        self._wheel[(self.started - computed) % self.block_tokens].append(sequence)
        if sequence.block_count * self.block_tokens >= computed + self.block_tokens:
            self.irregular = True
        if self._max_tokens is not None:
            self.limit_tick = min(self.limit_tick, self.started + self._max_tokens - computed)
        sequence.joined_tick = self.started
        sequence.batch = self
        self._changed()

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence; the rows after it move up. Steps in flight still advance it."""
        if sequence.batch is not self or sequence.has_left:
            raise StateError("leave() of a sequence that is not in this batch")
        self._wheel[self._spoke(sequence)].remove(sequence)
        row = self.sequences.index(sequence)
        del self.sequences[row]
        # New arrays: steps in other hands keep the old ones.
        slots, lengths = self._slots.copy(), self.lengths[:-1].copy()
        slots[row:-1] = slots[row + 1 :]
        lengths[row:] = self.lengths[row + 1 :]
        self._slots = slots
        self._show(len(self.sequences), lengths)
        sequence.left_tick = self.started
        sequence.settle()
        if sequence.batch is self:
            self._leaving.append(sequence)
        if self._max_tokens is not None:
            longest = max((other.scheduled for other in self.sequences), default=-math.inf)
            self.limit_tick = self.started + self._max_tokens - longest
        self._changed()

    def at_boundary(self, tick: int) -> list[Sequence]:
        """Rows whose length is a multiple of the block when ``tick`` steps are done: their next token opens a block."""
        return self._wheel[tick % self.block_tokens]

    def rows_of(self, tick: int) -> list[Sequence]:
        """Who is in the step committed after ``tick`` others, in no particular order: not those that joined since, but
        those that left since."""
        return [s for s in (*self.sequences, *self._leaving) if s.joined_tick <= tick < s.left_tick]

    def start(self, lengths: IntArray) -> None:
        """For the manager: a step is committed in which every row computes one token more."""
        self.started += 1
        self.lengths = lengths

    def finish(self) -> None:
        """For the manager: the oldest step in flight is completed."""
        self.ticks += 1
        if self._leaving:
            self._settle()

    def withdraw(self) -> None:
        """For the manager: the newest step in flight will not run."""
        self.started -= 1
        for sequence in self._leaving:
            sequence.left_tick = min(sequence.left_tick, self.started)
        self._settle()
        for sequence in self.sequences:
            # Whoever joined after it is not in it.
            sequence.joined_tick = min(sequence.joined_tick, self.started)
        self.irregular = True
        self._wheel = [[] for _ in range(self.block_tokens)]
        for sequence in self.sequences:
            self._wheel[self._spoke(sequence)].append(sequence)
        self._show(len(self.sequences), np.array([each.scheduled for each in self.sequences], np.int32))

    def _settle(self) -> None:
        """Let go of the rows that left and are in no step of this batch any more; they may join again."""
        for sequence in self._leaving:
            sequence.settle()
        self._leaving = [sequence for sequence in self._leaving if sequence.batch is self]

    def _spoke(self, sequence: Sequence) -> int:
        return (self.started - sequence.scheduled) % self.block_tokens

    def _show(self, rows: int, lengths: IntArray) -> None:
        self.slots, self.ones, self.lengths = self._slots[:rows], self._all_ones[:rows], lengths
        # By position: by keyword it costs five times as much.
        self.slots.setflags(False)  # type: ignore[call-arg]


def _ones(count: int) -> IntArray:
    ones = np.ones(count, np.int32)
    # Views of it are read-only too.
    ones.setflags(write=False)
    return ones
