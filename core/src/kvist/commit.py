"""From a plan that fits to a step: allocating pages, filling tables, naming what is to be copied."""

from __future__ import annotations

import numpy as np

from kvist.claim import Claims
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.owed import Owed
from kvist.plan import Plan, Run
from kvist.sequence import Sequence, Tables
from kvist.states import States
from kvist.step import NO_DRAFTS, NO_PAGE, IntArray, Step


class Committer:
    """Owns nothing; mutates ledger, tables and the plan's sequences."""

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        tables: Tables,
        claims: Claims,
        states: States,
        owed: Owed,
        nothing_needed: list[int],
    ) -> None:
        self._block = layout.block_tokens
        self._ledger = ledger
        self._tables = tables
        self._claims = claims
        self._states = states
        self._owed = owed
        self._paged = [group.index for group in layout.groups if not group.exact]
        self._group_count = len(layout.groups)
        self._several = len(layout.groups) > 1
        self._nothing = nothing_needed
        self._no_rows: IntArray = np.empty(0, np.int32)

    def commit(self, plan: Plan, step_id: int) -> Step:
        """Make the step. The plan's evictions have happened, so what it needs is there."""
        if self._several and plan.needed is not self._nothing:
            self._ledger.arena.gather(plan.needed)
        if plan.due:
            self._open_blocks(plan.due)
        decode = plan.decode
        if plan.runs:
            slots, queries, lengths, drafts = self._start_runs(plan.runs, step_id)
            rows = queries.tolist().count(1)
            if decode is not None:
                counts = decode.lengths + decode.ones
                plan.tick = decode.started
                plan.decode_rows = len(counts)
                decode.start(counts)
                slots = np.concatenate((decode.slots, slots))
                queries = np.concatenate((decode.ones, queries))
                lengths = np.concatenate((counts, lengths))
                if len(drafts):
                    drafts = np.concatenate((np.zeros(len(counts), np.int32), drafts))
                rows += len(counts)
                for array in (slots, queries, drafts):
                    array.setflags(write=False)
        elif decode is not None:
            slots, queries, drafts = decode.slots, decode.ones, NO_DRAFTS
            lengths = decode.lengths + queries
            rows = plan.decode_rows = len(lengths)
            plan.tick = decode.started
            decode.start(lengths)
        else:
            slots = queries = lengths = self._no_rows
            drafts, rows = NO_DRAFTS, 0
        # By position: by keyword it costs twice as much.
        lengths.setflags(False)  # type: ignore[call-arg]
        copies, fresh = self._owed.take() if self._owed.something else self._owed.nothing
        saves = self._states.save(plan.snapshots) if plan.snapshots else self._owed.nothing[0]
        return Step.made(step_id, slots, queries, lengths, rows, self._tables.views, copies, fresh, saves, drafts)

    def _start_runs(self, runs: list[Run], step_id: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Give the runs their pages. Returns slots, query tokens, lengths and drafts of their rows."""
        self._grow(runs)
        rows = []
        for run in runs:
            sequence, count = run.sequence, run.new_tokens + run.drafts
            sequence.flights.append(step_id)
            sequence.ahead += count
            sequence.undecided = run.drafts > 0
            rows.append((sequence.slot, count, sequence.scheduled, run.drafts))
        # Read-only, like every view of it. One array costs less than four.
        columns = np.array([*zip(*rows)], np.int32)
        columns.setflags(False)  # type: ignore[call-arg]
        return columns[0], columns[1], columns[2], columns[3] if any(row[3] for row in rows) else NO_DRAFTS

    def _open_blocks(self, due: list[Sequence]) -> None:
        """One new page per group for each sequence. Few are due at once, so scalar accesses beat arrays."""
        tables, allocate = self._tables, self._ledger.allocate_one
        for sequence in due:
            block = sequence.block_count
            if block >= tables.columns:
                tables.ensure_blocks(block + 1)
            slot = sequence.slot
            for group in self._paged:
                tables.arrays[group][slot, block] = allocate(group)
            sequence.block_count = block + 1

    def _grow(self, runs: list[Run]) -> None:
        tables = self._tables
        for run in runs:
            sequence = run.sequence
            slot, first = sequence.slot, sequence.block_count
            end = -(-(sequence.scheduled + run.query_tokens) // self._block)
            if end > first:
                if end > tables.columns:
                    tables.ensure_blocks(end)
                for group in self._paged:
                    tables.arrays[group][slot, first:end] = self._ledger.allocate(group, end - first)
                sequence.block_count = end
            if self._states.groups and self._states.missing(run):
                fresh: list[list[int]] = [[] for _ in range(self._group_count)]
                self._states.grow(run, fresh)
                self._owed.zero(fresh)
            if sequence.sources is not None:
                self._use_sources(sequence)

    def _use_sources(self, sequence: Sequence) -> None:
        """Copy the shared first rows of a block, and the snapshot of the states, into the sequence's own pages."""
        assert sequence.sources is not None
        block = sequence.computed // self._block
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self._group_count)]
        for group, source in enumerate(sequence.sources.pages):
            if source != NO_PAGE:
                column = 0 if group in self._states.groups else block
                pairs[group].append((source, int(self._tables.arrays[group][sequence.slot, column])))
        self._owed.copy(pairs)
        # The copies run before anything that could overwrite the sources.
        self._claims.drop_sources(sequence, used=False)
