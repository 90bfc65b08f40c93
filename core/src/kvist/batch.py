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
    looks at the due ones only. Made by ``manager.decode_batch()``.
    """

    def __init__(self, block_tokens: int, max_tokens: int | None, changed: Callable[[], None]) -> None:
        self.block_tokens = block_tokens
        #: Row order of the batch's part of a step. Read only.
        self.sequences: list[Sequence] = []
        self.ticks = 0
        self.in_flight = False
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
        #: Computed tokens of each row.
        self.lengths: IntArray = np.empty(0, np.int32)
        self._all_ones: IntArray = np.ones(64, np.int32)
        self.ones: IntArray = self._all_ones[:0]
        self._wheel: list[list[Sequence]] = [[] for _ in range(block_tokens)]

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence as the last row.

        Raises StateError while a step is in flight, if the sequence is in a batch or a step, or if it has no page for
        its next token although that continues a block.
        """
        self._require_idle("join()")
        if sequence.closed or sequence.in_flight or sequence.batch is not None:
            raise StateError(
                "join() needs an open sequence that is in no batch and no step",
                hint="complete the step first, or leave the other batch",
            )
        if sequence.partial is not None or (
            sequence.computed % self.block_tokens and sequence.block_count * self.block_tokens <= sequence.computed
        ):
            raise StateError(
                "join() of a sequence that has no page for its next token yet",
                hint="compute its first token with a Run, then join",
            )
        row = len(self.sequences)
        if row == len(self._slots):
            self._slots = np.resize(self._slots, 2 * row)
            self._all_ones = np.ones(2 * row, np.int32)
        self._slots[row] = sequence.slot
        self._show(row + 1, np.concatenate((self.lengths, np.array((sequence.computed,), np.int32))))
        self.sequences.append(sequence)
        self._wheel[(self.ticks - sequence.computed) % self.block_tokens].append(sequence)
        if sequence.block_count * self.block_tokens >= sequence.computed + self.block_tokens:
            self.irregular = True
        if self._max_tokens is not None:
            self.limit_tick = min(self.limit_tick, self.ticks + self._max_tokens - sequence.computed)
        sequence.joined_tick = self.ticks
        sequence.batch = self
        self._changed()

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence; the rows after it move up. Raises StateError while a step is in flight."""
        self._require_idle("leave()")
        if sequence.batch is not self:
            raise StateError("leave() of a sequence that is not in this batch")
        computed = sequence.computed
        self._wheel[(self.ticks - computed) % self.block_tokens].remove(sequence)
        row = self.sequences.index(sequence)
        del self.sequences[row]
        # A new array: steps in other hands keep the old one.
        self._slots = np.concatenate((self._slots[:row], self._slots[row + 1 :], self._slots[:1]))
        self._show(len(self.sequences), np.concatenate((self.lengths[:row], self.lengths[row + 1 :])))
        sequence.rebase(computed)
        if self._max_tokens is not None:
            longest = max((other.computed for other in self.sequences), default=-math.inf)
            self.limit_tick = self.ticks + self._max_tokens - longest
        self._changed()

    def at_boundary(self) -> list[Sequence]:
        """Sequences whose computed length is a multiple of the block now: their next token opens a block."""
        return self._wheel[self.ticks % self.block_tokens]

    def tick(self, lengths: IntArray) -> None:
        """For the manager: every row has computed one token more."""
        self.ticks += 1
        self.lengths = lengths

    def _show(self, rows: int, lengths: IntArray) -> None:
        self.slots, self.ones, self.lengths = self._slots[:rows], self._all_ones[:rows], lengths
        self.slots.setflags(write=False)
        self.ones.setflags(write=False)

    def _require_idle(self, call: str) -> None:
        if self.in_flight:
            raise StateError(
                f"{call} while a step of this batch is in flight", hint="complete or cancel the step first"
            )
