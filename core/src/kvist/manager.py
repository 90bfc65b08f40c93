"""The cache manager: open, plan, commit, complete, close. Bookkeeping only; it names pages and touches no bytes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from kvist.batch import DecodeBatch
from kvist.contract import CacheManager
from kvist.errors import RequestError, StateError
from kvist.eviction import NOTHING, Eviction
from kvist.exchange import Exchange
from kvist.plan import Plan, Run, Shortage, accepted_counts, ordered_runs
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence
from kvist.step import Step
from kvist.tiers.config import Tiers

__all__ = [
    "CacheManager",
    "DecodeBatch",
    "PagedCacheManager",
    "Plan",
    "RestorePolicy",
    "Run",
    "Sequence",
    "Shortage",
    "Tiers",
]

_NO_RUNS: list[Run] = []


class PagedCacheManager(Exchange):
    """Implements :class:`CacheManager` for any mix of retentions on one arena.

    layout: from ``Layout.build``; its arena is this manager's alone.
    restore: where sparse groups stay resumable.
    backoff_tokens: tokens to compute again at the end of everything reused, for draft models that need them.
    eviction: which published blocks go first; this manager's alone. Least recently used ones by default.
    tiers: below the device; their content is this manager's alone.
    """

    def decode_batch(self) -> DecodeBatch:
        return DecodeBatch(self._block, self.layout.spec.max_tokens, self._changed)

    def plan(self, runs: Iterable[Run] = (), decode: DecodeBatch | None = None) -> Plan:
        ordered = _NO_RUNS
        if runs:
            ordered = ordered_runs(runs, self._sequences, self.layout.spec.max_tokens, self.layout.most_drafts)
        block = self._block
        blocks = 0
        for run in ordered:
            sequence = run.sequence
            blocks += max(0, -(-(sequence.scheduled + run.query_tokens) // block) - sequence.block_count)
        due: list[Sequence] = []
        if decode is not None:
            if decode.started >= decode.limit_tick:
                raise RequestError(
                    f"a row of the decode batch has the model's {self.layout.spec.max_tokens} tokens",
                    hint="take it out of the batch with leave(), or close it",
                )
            due = decode.at_boundary(decode.started)
            if due and decode.irregular:
                due = [s for s in due if s.block_count * block <= s.scheduled]
            blocks += len(due)
        if self._has_states:
            return self._plan_states(ordered, decode, due, blocks)
        if not blocks:
            return Plan(decode, ordered, due, 0, self._nothing_needed, (), NOTHING, (), self._epoch, self._commit)
        needed = [blocks] * len(self._group_range)
        eviction: Eviction = NOTHING
        shortages: tuple[Shortage, ...] = ()
        if not self._ledger.arena.has(needed):
            eviction, shortages = self._make_room(needed)
        return Plan(decode, ordered, due, blocks, needed, (), eviction, shortages, self._epoch, self._commit)

    def complete(self, step: Step, accepted: SequenceOf[int] | None = None) -> None:
        plan = self._flight(step)
        runs, decode = plan.runs, plan.decode
        if runs or accepted is not None:
            kept = accepted_counts(runs, accepted, overwrites=self._overwrites, most_drafts=self.layout.most_drafts)
            for run in runs:
                if run.sequence.flights[0] != step.id:
                    raise StateError(
                        f"step {step.id} is not the oldest of its sequences", hint="complete steps in order"
                    )
        if decode is not None:
            if plan.tick != decode.ticks:
                raise StateError(f"step {step.id} is not the oldest of its batch", hint="complete steps in order")
            decode.finish()
            self._tally.computed_tokens += plan.decode_rows
            if self._sparse:
                for sequence in decode.at_boundary(decode.ticks):
                    if self._publisher.at_intervals or sequence.points or sequence.snapshots:
                        self._publisher.publish(sequence, ended=False, switch=not decode.in_flight)
                    self._drop(sequence)
        del self._in_flight[step.id]
        if step.id > self._newest_run:
            self._newest_run = step.id
        self._epoch += 1
        self._tally.steps += 1
        if runs:
            for run, count in zip(runs, kept):
                sequence = run.sequence
                del sequence.flights[0]
                sequence.ahead -= run.query_tokens
                if not sequence.flights:
                    # Only the newest of its steps can have drafts.
                    sequence.undecided = False
                sequence.advance(count)
                self._tally.computed_tokens += count
                if not sequence.started:
                    self._tally.begin(sequence)
                if self._has_states:
                    self._states.accept(run, count)
                self._publisher.publish(sequence, ended=False, switch=not sequence.ahead)
                if self._sparse:
                    self._drop(sequence)
        if self._closing or self._spoiled:
            self._end_waiting()

    def cancel(self, step: Step, *, ran: bool = True) -> None:
        plan = self._flight(step)
        decode = plan.decode
        if any(run.sequence.flights[-1] != step.id for run in plan.runs) or (
            decode is not None and plan.tick != decode.started - 1
        ):
            raise StateError(f"step {step.id} is not the newest of its sequences", hint="cancel steps in reverse order")
        if ran:
            self._newest_run = max(self._newest_run, step.id)
        elif step.begins and max(self._newest_run, *self._in_flight) > step.id:
            raise StateError(
                f"step {step.id} has copies or zeros that have to come before a later step",
                hint="cancel the later step first, or carry them out and cancel with ran=True",
            )
        del self._in_flight[step.id]
        self._epoch += 1
        rows = decode.rows_of(plan.tick) if decode is not None else []
        if decode is not None:
            decode.withdraw()
        for run in plan.runs:
            sequence = run.sequence
            del sequence.flights[-1]
            sequence.ahead -= run.query_tokens
            sequence.undecided = False
        for sequence, position in plan.snapshots:
            pages = sequence.snapshots.pop(position, None)
            if pages is not None:
                self._publisher.drop_snapshot(pages)
        if not ran:
            self._owed.again(step)
        elif self._overwrites:
            # Their states and rings may be overwritten in part; other rows are simply written again.
            for sequence in [*rows, *(run.sequence for run in plan.runs)]:
                if sequence.batch is not None and not sequence.has_left:
                    sequence.batch.leave(sequence)
                # Nothing more can be planned with it.
                sequence.undecided = True
                self._spoiled.append(sequence)
        self._end_waiting()

    def _plan_states(self, runs: list[Run], decode: DecodeBatch | None, due: list[Sequence], blocks: int) -> Plan:
        """As ``plan``, with pages for states and, where there is room for them, snapshots."""
        states = sum(self._states.missing(run) for run in runs)
        rows = decode.at_boundary(decode.started + 1) if decode is not None else ()
        snapshots = self._states.due(runs, rows)
        for kept in (snapshots, []):
            eviction: Eviction = NOTHING
            shortages: tuple[Shortage, ...] = ()
            count = states + len(kept)
            if not blocks and not count:
                needed = self._nothing_needed
                break
            needed = [count if group.exact else blocks for group in self.layout.groups]
            if self._ledger.arena.has(needed):
                break
            eviction, shortages = self._make_room(needed)
            if not shortages:
                break
        return Plan(decode, runs, due, blocks, needed, kept, eviction, shortages, self._epoch, self._commit)

    def _commit(self, plan: Plan) -> Step:
        if plan.epoch != self._epoch:
            raise StateError(
                "this plan is stale: the manager changed after it was made", hint="plan again, then commit at once"
            )
        self._epoch += 1
        if plan.eviction is not NOTHING:
            self._evict(plan.eviction)
        self._step_count += 1
        step = plan.step = self._committer.commit(plan, self._step_count)
        if plan.needed is not self._nothing_needed:
            for group, count in enumerate(plan.needed):
                self._tally.taken[group] += count
        self._in_flight[self._step_count] = plan
        return step

    def _flight(self, step: Step) -> Plan:
        plan = self._in_flight.get(step.id)
        if plan is None or plan.step is None or plan.step.lengths is not step.lengths:
            raise StateError(
                f"step {step.id} is not in flight",
                hint="complete or cancel each committed step once, with the manager that it came from",
            )
        return plan
