"""The cache manager: open, plan, commit, complete, close. Bookkeeping only; it names pages and touches no bytes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from kvist.audit import faults_of
from kvist.batch import DecodeBatch
from kvist.contract import CacheManager
from kvist.errors import RequestError, SpecError, StateError
from kvist.eviction import NOTHING, choose, evict
from kvist.layout import KEPT_ROLLBACK, Layout
from kvist.ledger import Ledger
from kvist.plan import Plan, Run, Shortage, accepted_counts, ordered_runs
from kvist.prefix.match import Match, find
from kvist.prefix.tree import Cursor, PrefixTree
from kvist.publish import Publisher, RestorePolicy
from kvist.sequence import Partial, Sequence, Tables, as_prompt, frozen_tokens
from kvist.spec import Scope
from kvist.stats import ManagerStats, group_stats
from kvist.step import NO_PAGE, IntArray, Step, present

__all__ = ["CacheManager", "DecodeBatch", "PagedCacheManager", "Plan", "Run", "Sequence", "Shortage"]

_DEFAULT_SCOPE = Scope()
_NO_RUNS: list[Run] = []


class PagedCacheManager:
    """Implements :class:`CacheManager` for any mix of block-paged retentions on one arena.

    layout: from ``Layout.build``; its arena is this manager's alone.
    restore: where groups that drop blocks stay resumable.
    """

    def __init__(self, layout: Layout, restore: RestorePolicy | None = None) -> None:
        for group in layout.groups:
            if group.retention.exact:
                raise SpecError(
                    f"group {group.name} keeps one state per sequence, which PagedCacheManager does not serve",
                    hint="select a cache manager made for recurrent state",
                )
        self.layout = layout
        self._block = layout.block_tokens
        self._group_range = range(len(layout.groups))
        self._ledger = Ledger(layout)
        self._tree = PrefixTree(self._block, len(layout.groups))
        self._tables = Tables(len(layout.groups))
        self._publisher = Publisher(layout, self._tree, self._ledger, self._tables, restore or RestorePolicy())
        self._sequences: dict[int, Sequence] = {}
        self._drops = [group for group in self._group_range if self._publisher.drops[group]]
        self._in_flight: dict[int, Plan] = {}
        self._closing: list[Sequence] = []
        #: Longest sequence that is known to fit the whole arena.
        self._fits_up_to = 0
        self._nothing_needed = [0 for _ in layout.groups]
        self._epoch = 0
        self._step_count = 0
        self._no_copies = tuple(np.empty((0, 2), np.int32) for _ in layout.groups)
        self._evicted = [0] * len(layout.groups)
        self._requests = self._prompt_tokens = self._reused_tokens = self._computed_tokens = self._completed = 0

    def open(self, tokens: npt.ArrayLike, scope: Scope = _DEFAULT_SCOPE) -> Sequence:
        prompt = frozen_tokens(as_prompt(tokens, self.layout.spec))
        if len(prompt) > self._fits_up_to:
            self.layout.require_fit(len(prompt))
        match = self._match(prompt, scope)
        slot = self._tables.acquire()
        sequence = Sequence(self.layout, scope, slot, prompt)
        self._claim(sequence, match)
        self._sequences[slot] = sequence
        self._epoch += 1
        return sequence

    def probe(self, tokens: npt.ArrayLike, scope: Scope = _DEFAULT_SCOPE) -> int:
        return self._match(as_prompt(tokens, self.layout.spec).astype(np.int32, copy=False), scope).length

    def decode_batch(self) -> DecodeBatch:
        return DecodeBatch(self._block, self.layout.spec.max_tokens, self._changed)

    def plan(self, runs: Iterable[Run] = (), decode: DecodeBatch | None = None) -> Plan:
        ordered = ordered_runs(runs, self._sequences, self.layout.spec.max_tokens) if runs else _NO_RUNS
        blocks = 0
        for run in ordered:
            sequence = run.sequence
            blocks += max(0, sequence.blocks_for(sequence.computed + run.query_tokens) - sequence.block_count)
        due: list[Sequence] = []
        if decode is not None:
            if decode.in_flight:
                raise StateError("plan() of a decode batch whose step is in flight", hint="complete the step first")
            if decode.ticks >= decode.limit_tick:
                raise RequestError(
                    f"a row of the decode batch has the model's {self.layout.spec.max_tokens} tokens",
                    hint="take it out of the batch with leave(), or close it",
                )
            due = decode.at_boundary()
            if due and decode.irregular:
                due = [s for s in due if s.block_count * self._block <= s.computed]
            blocks += len(due)
        needed = [blocks] * len(self._group_range) if blocks else self._nothing_needed
        eviction = NOTHING
        shortages: tuple[Shortage, ...] = ()
        if blocks and min(self._ledger.arena.free_count) < blocks:
            eviction, short = choose(self._tree, self._ledger, needed, self._drops)
            if any(short):
                shortages = tuple(
                    Shortage(group.name, needed[group.index], needed[group.index] - short[group.index])
                    for group in self.layout.groups
                    if short[group.index]
                )
        return Plan(decode, ordered, due, blocks, needed, eviction, shortages, self._epoch, self._commit)

    def _commit(self, plan: Plan) -> Step:
        if plan.epoch != self._epoch:
            raise StateError(
                "this plan is stale: the manager changed after it was made", hint="plan again, then commit at once"
            )
        self._epoch += 1
        if plan.eviction is not NOTHING:
            for group, count in enumerate(evict(self._tree, self._ledger, plan.eviction, self._drops)):
                self._evicted[group] += count
        decode, runs = plan.decode, plan.runs
        if plan.blocks and len(self._group_range) > 1:
            self._ledger.arena.gather(plan.needed)
        if plan.due:
            self._open_blocks(plan.due)
        self._step_count += 1
        self._in_flight[self._step_count] = plan
        if decode is not None:
            decode.in_flight = True
            if not runs:
                lengths = decode.lengths + decode.ones
                # By position: by keyword it costs twice as much.
                lengths.setflags(False)  # type: ignore[call-arg]
                plan.lengths = lengths
                return Step(
                    self._step_count,
                    decode.slots,
                    decode.ones,
                    lengths,
                    len(lengths),
                    self._tables.views,
                    self._no_copies,
                )
        self._grow(runs)
        copies = self._copies(plan)
        slots = np.array([run.sequence.slot for run in runs], np.int32)
        queries = np.array([run.query_tokens for run in runs], np.int32)
        lengths = np.array([run.sequence.computed for run in runs], np.int32) + queries
        decode_rows = int(np.count_nonzero(queries == 1))
        for run in runs:
            run.sequence.in_flight = True
        if decode is not None:
            slots = np.concatenate([decode.slots, slots])
            queries = np.concatenate([decode.ones, queries])
            lengths = np.concatenate([decode.lengths + decode.ones, lengths])
            decode_rows += len(decode)
        for array in (slots, queries, lengths, *copies):
            array.setflags(write=False)
        plan.lengths = lengths
        return Step(self._step_count, slots, queries, lengths, decode_rows, self._tables.views, copies)

    def complete(self, step: Step, accepted: SequenceOf[int] | None = None) -> None:
        plan = self._flight(step)
        runs = plan.runs
        if runs or accepted is not None:
            kept = accepted_counts(runs, accepted)
        del self._in_flight[step.id]
        self._epoch += 1
        self._completed += 1
        decode = plan.decode
        if decode is not None:
            rows = len(decode.sequences)
            decode.in_flight = False
            decode.tick(step.lengths[:rows] if runs else step.lengths)
            self._computed_tokens += rows
            if self._drops:
                for sequence in decode.at_boundary():
                    if self._publisher.at_intervals:
                        self._publisher.publish(sequence, ended=False)
                    self._drop(sequence)
        if runs:
            self._complete_runs(runs, kept)
            for holder in plan.sources:
                self._release_partial(holder)
        if self._closing:
            self._close_waiting()

    def cancel(self, step: Step) -> None:
        plan = self._flight(step)
        del self._in_flight[step.id]
        self._epoch += 1
        if plan.decode is not None:
            plan.decode.in_flight = False
            plan.decode.irregular = True
        for run in plan.runs:
            run.sequence.in_flight = False
        for holder in plan.sources:
            # The copy may not have happened: the next step repeats it.
            holder.sequence.partial = holder
        if self._closing:
            self._close_waiting()

    def close(self, sequence: Sequence) -> None:
        if sequence.closed:
            return
        if self._sequences.get(sequence.slot) is not sequence:
            raise StateError("close() of another manager's sequence")
        batch = sequence.batch
        if sequence.in_flight or (batch is not None and batch.in_flight):
            if not sequence.closing:
                sequence.closing = True
                self._closing.append(sequence)
            return
        if batch is not None:
            batch.leave(sequence)
        self._epoch += 1
        if sequence.computed > sequence.reused:
            self._count_start(sequence)
        self._publisher.publish(sequence, ended=True)
        slot, blocks = sequence.slot, sequence.block_count
        for group, table in enumerate(self._tables.arrays):
            row = table[slot, :blocks]
            self._ledger.release(group, present(row) if self._drops else row)
        self._tables.release(slot, blocks)
        if sequence.partial is not None:
            self._release_partial(sequence.partial)
        if sequence.tip is not None:
            self._tree.touch(sequence.tip, sequence.published)
            self._tree.offer(sequence.tip)
        del self._sequences[slot]
        sequence.closed = True

    def free_pages(self, group: int) -> IntArray:
        """Ids of all pages of a group that nobody holds or can find, e.g. to poison them in a test."""
        return self._ledger.free_pages(group)

    def shuffle_free_pages(self, rng: np.random.Generator) -> None:
        """Hand out free pages in random order from now on, so that tests meet page tables of every kind."""
        self._ledger.arena.shuffle(rng)
        self._epoch += 1

    def check(self) -> None:
        partials = [s.partial for s in self._sequences.values() if s.partial is not None]
        partials += [holder for plan in self._in_flight.values() for holder in plan.sources]
        faults = faults_of(self._ledger, self._tree, self._tables, list(self._sequences.values()), partials)
        if faults:
            raise AssertionError("; ".join(faults))

    def stats(self) -> ManagerStats:
        groups = group_stats(self.layout, self._ledger, self._evicted)
        return ManagerStats(
            self._requests,
            self._prompt_tokens,
            self._reused_tokens,
            self._computed_tokens,
            self._completed,
            len(self._sequences),
            self._tree.extent_count,
            groups,
        )

    def _changed(self) -> None:
        self._epoch += 1

    def _match(self, prompt: IntArray, scope: Scope) -> Match:
        # While a part of a block is copied, source and copy exist: a prompt that fits only just goes without.
        spare = len(prompt) + self._block
        if spare > self._fits_up_to and self.layout.fits(spare):
            self._fits_up_to = spare
        return find(self._tree, self.layout, self._drops, scope, prompt, whole_blocks=spare > self._fits_up_to)

    def _claim(self, sequence: Sequence, match: Match) -> None:
        """Take leases on what ``match`` found and set the sequence's lengths to it."""
        length = match.length
        if not length:
            return
        whole = length // self._block
        self._tables.ensure_blocks(whole)
        partial = [NO_PAGE] * len(self._group_range)
        for group in self.layout.groups:
            index = group.index
            row = match.pages[index]
            for low, high in group.retention.live(length, self._block):
                # What is live may be more than what resuming requires, and then some of it may be gone.
                self._ledger.lease(index, present(row[low:high]))
                if high > whole:
                    partial[index] = int(row[whole])
                    high = whole
                self._tables.arrays[index][sequence.slot, low:high] = row[low:high]
        sequence.reused = length
        sequence.advance(length)
        sequence.block_count = whole
        boundary = whole * self._block
        for extent, matched in match.path:
            if extent.start < boundary <= extent.start + matched:
                # A claim that ends inside an extent splits it, so that only what was used counts as just used.
                tip = self._tree.split_at(extent, whole - extent.start // self._block)
                sequence.published = boundary
                sequence.tip = tip
                sequence.cursor = Cursor.at(tip, boundary)
                self._tree.touch(tip, boundary)
            if boundary < length <= extent.start + matched:
                sequence.partial = Partial(sequence, partial, extent)
                break

    def _open_blocks(self, due: list[Sequence]) -> None:
        """One new page per group for each sequence. Few are due at once, so scalar accesses beat arrays."""
        tables, allocate = self._tables, self._ledger.allocate_one
        for sequence in due:
            block = sequence.block_count
            if block >= tables.columns:
                tables.ensure_blocks(block + 1)
            slot = sequence.slot
            for group in self._group_range:
                tables.arrays[group][slot, block] = allocate(group)
            sequence.block_count = block + 1

    def _grow(self, runs: list[Run]) -> None:
        for run in runs:
            sequence = run.sequence
            first, end = sequence.block_count, sequence.blocks_for(sequence.computed + run.query_tokens)
            if end > first:
                self._tables.ensure_blocks(end)
                for group in self._group_range:
                    pages = self._ledger.allocate(group, end - first)
                    self._tables.arrays[group][sequence.slot, first:end] = pages
                sequence.block_count = end

    def _copies(self, plan: Plan) -> tuple[IntArray, ...]:
        """Pairs of pages to copy for sequences that reuse a part of a block; moves their leases to the plan."""
        plan.sources = [run.sequence.partial for run in plan.runs if run.sequence.partial is not None]
        if not plan.sources:
            return self._no_copies
        pairs: list[list[tuple[int, int]]] = [[] for _ in self._group_range]
        for holder in plan.sources:
            sequence = holder.sequence
            block = sequence.computed // self._block
            for group, source in enumerate(holder.pages):
                if source != NO_PAGE:
                    pairs[group].append((source, int(self._tables.arrays[group][sequence.slot, block])))
            sequence.partial = None
        return tuple(np.array(pair, np.int32).reshape(-1, 2) for pair in pairs)

    def _flight(self, step: Step) -> Plan:
        plan = self._in_flight.get(step.id)
        if plan is None or plan.lengths is not step.lengths:
            raise StateError(
                f"step {step.id} is not in flight",
                hint="complete or cancel each committed step once, with the manager that it came from",
            )
        return plan

    def _complete_runs(self, runs: list[Run], kept: list[int]) -> None:
        for run, count in zip(runs, kept):
            sequence = run.sequence
            sequence.in_flight = False
            sequence.advance(count)
            self._computed_tokens += count
            self._count_start(sequence)
            self._publisher.publish(sequence, ended=False)
            if self._drops:
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Release blocks that the groups do not read any more."""
        length = sequence.computed
        for group in self._drops:
            table = self._tables.arrays[group][sequence.slot]
            for low, high in self.layout.groups[group].retention.droppable(length, KEPT_ROLLBACK, self._block):
                row = table[low:high]
                pages = row[row != NO_PAGE]
                if len(pages):
                    self._ledger.release(group, pages)
                    row[:] = NO_PAGE
                    if sequence.tip is not None:
                        self._tree.offer(sequence.tip)

    def _release_partial(self, holder: Partial) -> None:
        for group, page in enumerate(holder.pages):
            if page != NO_PAGE:
                self._ledger.release(group, np.array([page], np.int32))
        self._tree.offer(holder.extent)

    def _close_waiting(self) -> None:
        waiting, self._closing = self._closing, []
        for sequence in waiting:
            sequence.closing = False
            self.close(sequence)

    def _count_start(self, sequence: Sequence) -> None:
        if not sequence.started:
            sequence.started = True
            self._requests += 1
            self._prompt_tokens += sequence.prompt_length
            self._reused_tokens += sequence.reused
