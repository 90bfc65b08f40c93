"""One forward pass over a batch, as plain arrays: what the planner tells whoever owns the memory.

A step names pages, not tensors, and is picklable: one planner can drive many workers with the same page ids.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

#: "No page here" in every table.
NO_PAGE = -1
#: :attr:`Step.drafts` of a step without any.
NO_DRAFTS: IntArray = np.empty(0, np.int32)
NO_DRAFTS.flags.writeable = False


def present(pages: IntArray) -> IntArray:
    """``pages`` without NO_PAGE: the array itself when there is none in it."""
    there = pages != NO_PAGE
    return pages if np.count_nonzero(there) == len(pages) else pages[there]


def repeats(pages: IntArray) -> bool:
    """Is a page named twice? ``pages`` has no NO_PAGE in it."""
    return bool(len(pages)) and int(np.bincount(pages).max()) > 1


def overlaps(
    begin: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    other_begin: npt.NDArray[np.int64],
    other_end: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Per range ``begin .. end - 1``, does it share a number with any of the other ranges? None is empty."""
    started = np.searchsorted(np.sort(other_begin), end, side="left")
    over = np.searchsorted(np.sort(other_end), begin, side="right")
    return started > over


@attrs.define(eq=False)
class _Fields:
    """What a :class:`Step` has; apart from it only because a frozen class takes twice as long to fill, and one is made
    for every step."""

    id: int
    slots: IntArray
    query_lengths: IntArray
    lengths: IntArray
    decode_rows: int
    tables: tuple[IntArray, ...]
    copies: tuple[IntArray, ...]
    fresh: tuple[IntArray, ...] = ()
    saves: tuple[IntArray, ...] = ()
    drafts: IntArray = NO_DRAFTS


@attrs.frozen(eq=False)
class Step(_Fields):
    """A committed batch. Row ``i`` is one sequence; rows with exactly one query token come first.

    id: increases by one with every committed step of a manager.
    slots: int32 ``[rows]``, the sequence's row in every table.
    query_lengths: int32 ``[rows]``, tokens computed in this step, drafts included.
    lengths: int32 ``[rows]``, tokens in the cache *after* this step has written its rows; the queries of row ``i``
        stand at positions ``lengths[i] - query_lengths[i] .. lengths[i] - 1``.
    decode_rows: how many leading rows have one query token.
    tables: per group int32 ``[slot, block ordinal]`` -> page id, :data:`NO_PAGE` where nothing is kept. Read-only.
        What a step may read of them does not change until the step is completed; beyond that they are undefined.
        An exact group has the state's page in column 0. A row with drafts reads its state there and writes the state
        after its ``j``-th query token (from 1) to the page in column ``j``; any other row overwrites column 0, and so
        does every row of a group whose retention has no ``draft_pages``.
        No sequence has page 0: rows with which an engine fills a batch of fixed size name it.
    copies: per group int32 ``[n, 2]``, whole pages ``(source, destination)`` to copy before anything is written. All
        sources of all groups are read before any destination is written: pages of two groups may lie in the same place.
    fresh: per group int32 ``[n]``, pages to fill with zeros before anything is written: states that start cold.
    saves: per group int32 ``[n, 2]``, whole pages ``(source, destination)`` to copy after the step has written:
        snapshots of states.
    drafts: int32 ``[rows]``, how many of a row's query tokens are drafts; empty when none is.

    Whoever owns the memory executes steps in the order in which they were committed.
    """

    @classmethod
    def made(cls, *fields: Any) -> Step:
        """As ``Step(*fields)``, in half the time."""
        step = _Fields(*fields)
        step.__class__ = cls
        return step  # type: ignore[return-value]

    @property
    def row_count(self) -> int:
        return len(self.slots)

    @property
    def begins(self) -> bool:
        """Is there anything to copy or to fill with zeros before the rows are written?"""
        return any(map(len, self.copies)) or any(map(len, self.fresh))

    @property
    def token_count(self) -> int:
        """Query tokens over all rows: the length of the flattened batch."""
        return int(self.query_lengths.sum())

    @property
    def query_starts(self) -> IntArray:
        """int32 ``[rows + 1]``: row ``i``'s queries are tokens ``starts[i] .. starts[i + 1] - 1`` of the batch."""
        starts = np.zeros(len(self.slots) + 1, np.int32)
        np.cumsum(self.query_lengths, out=starts[1:])
        return starts

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 ``[token_count]``: the position of every query token in its sequence."""
        if self.decode_rows == len(self.slots):
            return self.lengths.astype(np.int64) - 1
        starts = self.query_starts
        offsets = np.repeat(self.lengths - self.query_lengths - starts[:-1], self.query_lengths)
        return offsets.astype(np.int64) + np.arange(starts[-1])

    def compact(self) -> Step:
        """The same step with tables of its own rows and no more blocks than they use, sharing no memory with the
        planner: for whoever keeps a step longer than until its completion. Pickling does the same."""
        tables = []
        for table in self.tables:
            rows = table[self.slots]
            used = np.flatnonzero((rows != NO_PAGE).any(axis=0))
            tables.append(rows[:, : int(used[-1]) + 1 if len(used) else 0].copy())
        return attrs.evolve(self, slots=np.arange(len(self.slots), dtype=np.int32), tables=tuple(tables))

    def __getstate__(self) -> dict[str, Any]:
        compact = self.compact()
        return {field.name: getattr(compact, field.name) for field in attrs.fields(Step)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
