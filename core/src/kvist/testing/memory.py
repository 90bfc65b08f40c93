"""The owner of the memory in tests of overlapping steps: executes each some time after its commit, reads every row."""

from __future__ import annotations

import attrs
import numpy as np

from kvist.layout import KEPT_ROLLBACK, Group
from kvist.plan import Plan
from kvist.sequence import Sequence
from kvist.spec import Spans
from kvist.step import NO_PAGE, IntArray, Step
from kvist.testing.reads import reads
from kvist.testing.values import JUNK, Array, Values


@attrs.define(eq=False)
class Live:
    """A sequence and what the machine knows of it without asking.

    text: its tokens, one byte each, further than it knows them. values: the fold at each of them.
    """

    sequence: Sequence
    scope: int
    text: bytes
    values: Array
    shares: bool
    computed: int = 0
    known: int = 0
    prompt_length: int = 0
    #: Pages for states, and did a step write anything since the pages were taken?
    columns: int = 0
    stepped: bool = False
    #: Restore points of its prompt, ascending.
    points: list[int] = attrs.Factory(list)
    #: Does its next step begin with copies of what it took from the cache?
    pending: bool = False
    #: How it began: opened, forked or resumed; with how many tokens; and has any of its steps been completed since?
    origin: str = "opened"
    claimed: int = 0
    started: bool = False
    suspended: bool = False
    closing: bool = False
    #: Did a cancelled step overwrite its state?
    lost: bool = False
    #: Leading tokens that are in the model's sets already.
    may_length: int = 0
    must_length: int = 0
    #: Was publication put off because a step was in flight?
    delayed: bool = False

    @property
    def committed(self) -> int:
        return min(self.known, self.computed)


@attrs.define(eq=False)
class Flight:
    """A committed step. kept: query tokens of each row that will stay. free: per group, pages nobody needs from then
    on, unless somebody writes to them first. snapshots: states kept, by position. tables: what the step reads of the
    tables, as it was at the commit."""

    step: Step
    plan: Plan
    rows: list[Live]
    kept: list[int]
    free: list[IntArray]
    snapshots: list[tuple[Live, int]]
    tables: list[tuple[int, int, int, IntArray]] = attrs.Factory(list)
    executed: bool = False


class Memory(Values):
    """As :class:`Values`, for steps that are executed later than they are committed.

    A page that is free when a step is committed holds nothing that anybody needs once the step's copies are done; one
    that becomes free later may still be the source of a copy of the next step. So what is overwritten with junk is what
    was free at the commit.
    """

    def free(self) -> list[IntArray]:
        return [self.manager.free_pages(group.index) for group in self.layout.groups]

    def remember(self, flight: Flight) -> None:
        """Keep what the step may read of the tables."""
        step, block = flight.step, self.layout.block_tokens
        drafts = step.drafts.tolist() or [0] * len(flight.rows)
        for slot, end, count, draft in zip(
            step.slots.tolist(), step.lengths.tolist(), step.query_lengths.tolist(), drafts
        ):
            for group in self.layout.groups:
                spans: Spans = ((0, 1 + (count if draft else 0)),)
                if not group.exact:
                    spans = tuple((low // block, -(-high // block)) for low, high in read_by(group, end - count, end))
                for first, last in spans:
                    pages = step.tables[group.index][slot, first:last].copy()
                    flight.tables.append((group.index, slot, first, pages))

    def compare_tables(self, flight: Flight) -> None:
        """What a step may read of the tables does not change until it is completed."""
        for group, slot, first, pages in flight.tables:
            now = flight.step.tables[group][slot, first : first + len(pages)]
            assert np.array_equal(now, pages), f"{self.layout.groups[group].name}: tables of a step in flight changed"

    def compare_dropped(self, flight: Flight) -> None:
        """Blocks that nobody reads any more have no page: after every run, and in a batch when a row fills a block.
        Rows that left meanwhile wait for their next run."""
        block, decode = self.layout.block_tokens, flight.plan.decode
        rows = len(flight.rows) - len(flight.plan.runs)
        for row, live in enumerate(flight.rows):
            if row < rows and (live.sequence.batch is not decode or live.computed % block):
                continue
            if live.suspended or live.sequence.closed or live.sequence.has_left:
                continue
            for group in self.layout.groups:
                if group.exact or not group.sparse:
                    continue
                for low, high in group.retention.droppable(live.computed, KEPT_ROLLBACK, block):
                    kept = flight.step.tables[group.index][live.sequence.slot, low:high]
                    assert kept.max() == NO_PAGE, f"{group.name}: keeps blocks {low}..{high - 1} at {live.computed}"

    def begin(self, flight: Flight) -> None:
        """What comes before the rows: copies, zeros."""
        self._copy(flight.step.copies)
        # All groups lie in one memory: first everything free, then what is to be zero.
        for pages, free in zip(self.whole, flight.free):
            pages[free] = JUNK
            pages[0] = JUNK
        for pages, fresh, copies in zip(self.pages, flight.step.fresh, flight.step.copies):
            if len(fresh):
                assert not np.isin(fresh, copies[:, 1]).any(), "a page is to be both copied to and filled with zeros"
                pages[fresh] = 0

    def execute(self, flight: Flight) -> None:
        """All of a step."""
        step = flight.step
        self.begin(flight)
        drafts = step.drafts.tolist() or [0] * len(flight.rows)
        for row, live in enumerate(flight.rows):
            end, count, kept = int(step.lengths[row]), int(step.query_lengths[row]), flight.kept[row]
            start = end - count
            truth = live.values[:end]
            written = truth[start:].copy()
            written[kept:] = JUNK - 1
            for group in self.layout.groups:
                table = step.tables[group.index][step.slots[row]]
                if group.retention.ring:
                    self._turn_ring(group, table, start, truth, np.concatenate([truth[:start], written]))
                    continue
                if group.exact:
                    before = int(truth[start - 1]) if start else 0
                    self._advance(group, table, start, before, written, drafts[row])
                    continue
                self._write_rows(group, table, start, written)
                if kept:
                    for low, high in read_by(group, start, start + kept):
                        self._check(group, table, low, high, truth)
        self._copy(step.saves)
        flight.executed = True

    def _write_rows(self, group: Group, table: IntArray, start: int, values: Array) -> None:
        positions = np.arange(start, start + len(values))
        pages = table[positions // self.layout.block_tokens]
        assert pages.min() > 0, f"{group.name}: no page to write positions {start}.."
        self.pages[group.index][pages, positions % self.layout.block_tokens] = values

    def _check(self, group: Group, table: IntArray, low: int, high: int, truth: Array) -> None:
        """Positions ``low .. high - 1``, all of which some query reads."""
        block = self.layout.block_tokens
        first = low // block
        pages = table[first : -(-high // block)]
        assert pages.min() > 0, f"{group.name}: a block of positions {low}..{high - 1} is gone"
        found = self.pages[group.index][pages].ravel()[low - first * block : high - first * block]
        assert np.array_equal(found, truth[low:high]), f"{group.name}: wrong rows at positions {low}..{high - 1}"


def read_by(group: Group, start: int, end: int) -> Spans:
    """Positions that some query at ``start .. end - 1`` reads."""
    *others, (low, _) = reads(group.retention, start)
    return (*others, (low, end))


def fold_on(values: Array, scope: int, tokens: bytes) -> Array:
    """``values`` with those of further ``tokens``: each depends on the scope and every token up to it."""
    state = int(values[-1]) if len(values) else (scope + 1) * 7919
    out = []
    for token in tokens:
        state = (state * 1000003 + token + 1) & 0x7FFFFFFFFFFF
        out.append(state)
    return np.concatenate([values, np.array(out, np.int64)])
