"""Pages of exact groups: one state per sequence, scratch pages for drafts, snapshots at restore points."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.plan import Run
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence, Tables
from kvist.step import IntArray


class States:
    """Owns nothing; mutates ledger, tables and the sequences' own records of states."""

    def __init__(self, layout: Layout, ledger: Ledger, tables: Tables, policy: RestorePolicy) -> None:
        self._ledger = ledger
        self._tables = tables
        self._unit = policy.every(layout.block_tokens)
        self._block = layout.block_tokens
        self._no_pairs: IntArray = np.empty((0, 2), np.int32)
        self._no_pairs.setflags(write=False)
        self.groups = [group.index for group in layout.groups if group.exact]
        #: Those whose rows with drafts write every state to a page of its own.
        self._with_draft_pages = [index for index in self.groups if layout.groups[index].retention.draft_pages]

    def missing(self, run: Run) -> int:
        """Pages of each exact group that a run still needs."""
        return max(0, self._columns(run) - run.sequence.state_columns)

    def due(self, plan_runs: Iterable[Run], rows: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Sequences that reach a restore point in a step with these runs, and these decode rows that then fill a
        block; with the position each reaches. Runs with drafts have none: nobody knows yet where they will end."""
        found = []
        for run in plan_runs:
            if not run.drafts and run.sequence.shares:
                end = run.sequence.scheduled + run.new_tokens
                if end in run.sequence.chunk_ends or (self._unit and end % self._unit == 0):
                    found.append((run.sequence, end))
        if self._unit:
            for sequence in rows:
                end = sequence.scheduled + 1
                if end % self._unit == 0 and sequence.shares:
                    found.append((sequence, end))
        return found

    def grow(self, run: Run, fresh: list[list[int]]) -> None:
        """Allocate what :meth:`missing` said, which is more than nothing. ``fresh`` gets the pages that must be zero,
        per group."""
        sequence = run.sequence
        have, want = sequence.state_columns, self._columns(run)
        self._tables.ensure_blocks(want)
        for group in self.groups:
            pages = self._ledger.allocate(group, want - have)
            self._tables.arrays[group][sequence.slot, have:want] = pages
            if not have and sequence.sources is None:
                fresh[group].append(int(pages[0]))
        sequence.state_columns = want

    def save(self, snapshots: Iterable[tuple[Sequence, int]]) -> tuple[IntArray, ...]:
        """Allocate a page for each snapshot. Returns the pairs ``(state, snapshot)`` per group, as a step has them."""
        tables = self._tables.arrays
        pairs: dict[int, list[tuple[int, int]]] = {group: [] for group in self.groups}
        for sequence, position in snapshots:
            pages = sequence.snapshots[position] = []
            for group, group_pairs in pairs.items():
                page = self._ledger.allocate_one(group)
                group_pairs.append((tables[group].item(sequence.slot, 0), page))
                pages.append(page)
        saves = [self._no_pairs] * len(tables)
        for group, group_pairs in pairs.items():
            saves[group] = np.array(group_pairs, np.int32)
            saves[group].setflags(False)  # type: ignore[call-arg]
        return tuple(saves)

    def accept(self, run: Run, count: int) -> None:
        """After a run with drafts: the state after ``count`` query tokens becomes the sequence's state."""
        if count and run.drafts:
            slot = run.sequence.slot
            for group in self._with_draft_pages:
                row = self._tables.arrays[group][slot]
                row[0], row[count] = row[count], row[0]

    def donate(self, sequence: Sequence) -> None:
        """Make the state itself the snapshot at the sequence's end: nobody needs it any more."""
        computed = sequence.computed
        if not sequence.state_columns or sequence.committed != computed or computed in sequence.snapshots:
            return
        pages: IntArray = np.array([self._tables.arrays[group][sequence.slot, 0] for group in self.groups], np.int32)
        sequence.snapshots[computed] = pages.tolist()
        for group in self.groups:
            # The scratch pages move down by one.
            row, columns = self._tables.arrays[group][sequence.slot], sequence.state_columns
            row[: columns - 1] = row[1:columns].copy()
            row[columns - 1] = -1
        sequence.state_columns -= 1

    def _columns(self, run: Run) -> int:
        if not self._with_draft_pages:
            return 1
        return 1 + (run.query_tokens if run.drafts else 0)
