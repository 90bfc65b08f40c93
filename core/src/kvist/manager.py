"""The cache manager: open, plan, commit, complete, close. Bookkeeping only; it names pages and touches no bytes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from kvist.audit import faults_of, tier_faults
from kvist.batch import DecodeBatch
from kvist.capacity import Capacity, capacity_of
from kvist.claim import Claims
from kvist.commit import Committer
from kvist.contract import CacheManager
from kvist.defrag import Defragmenter
from kvist.errors import CapacityError, RequestError, StateError
from kvist.events import Events, Listener
from kvist.eviction import NOTHING, Eviction, choose, evict
from kvist.keeper import Keeper
from kvist.layout import KEPT_ROLLBACK, Layout
from kvist.ledger import Ledger
from kvist.owed import Owed
from kvist.plan import Plan, Run, Shortage, accepted_counts, ordered_runs
from kvist.policies import EvictionPolicy
from kvist.prefix.match import Match, find
from kvist.prefix.tree import PrefixTree
from kvist.publish import Publisher
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence, Tables, as_prompt, frozen_tokens
from kvist.spec import Scope
from kvist.states import States
from kvist.stats import Cleared, ManagerStats, Tally, group_stats
from kvist.step import NO_PAGE, IntArray, Step
from kvist.tiers.config import Tiers
from kvist.tiers.lower import LowerTiers, Owner
from kvist.tiers.transfer import Transfer

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

_DEFAULT_SCOPE = Scope()
_NO_RUNS: list[Run] = []


class PagedCacheManager:
    """Implements :class:`CacheManager` for any mix of retentions on one arena.

    layout: from ``Layout.build``; its arena is this manager's alone.
    restore: where sparse groups stay resumable.
    backoff_tokens: tokens to compute again at the end of everything reused, for draft models that need them.
    eviction: which published blocks go first; this manager's alone. Least recently used ones by default.
    tiers: below the device; their content is this manager's alone.
    """

    def __init__(
        self,
        layout: Layout,
        restore: RestorePolicy | None = None,
        backoff_tokens: int = 0,
        eviction: EvictionPolicy | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        policy = restore or RestorePolicy()
        self.layout = layout
        self._block = layout.block_tokens
        self._policy = policy
        self._backoff = backoff_tokens
        self._group_range = range(len(layout.groups))
        self._sparse = [group for group in layout.groups if group.sparse]
        self._windows = [group for group in self._sparse if not group.exact]
        self._paged = [group.index for group in layout.groups if not group.exact]
        self._ledger = Ledger(layout)
        self._tree = PrefixTree(self._block, len(layout.groups))
        self._tables = Tables(len(layout.groups))
        self._keeper = Keeper(self._tree, eviction)
        self._claims = Claims(layout, self._keeper, self._ledger, self._tables)
        self._publisher = Publisher(layout, self._keeper, self._ledger, self._tables, policy)
        self._states = States(layout, self._ledger, self._tables, policy)
        self._has_states = layout.has_states
        #: Does a step overwrite what the one before has left?
        self._overwrites = layout.has_states or layout.has_rings
        self._owed = Owed(layout)
        self._nothing_needed = [0 for _ in layout.groups]
        self._committer = Committer(
            layout, self._ledger, self._tables, self._claims, self._states, self._owed, self._nothing_needed
        )
        self._sequences: dict[int, Sequence] = {}
        self._defragmenter = Defragmenter(layout, self._keeper, self._ledger, self._tables, self._owed, self._sequences)
        self._in_flight: dict[int, Plan] = {}
        #: The latest step that was completed, or cancelled after it had begun.
        self._newest_run = 0
        self._closing: list[Sequence] = []
        self._events: Events | None = None
        #: Sequences whose states a cancelled step may have overwritten, and that are in older steps still.
        self._spoiled: list[Sequence] = []
        #: Longest sequence that is known to fit the whole arena, with a page per group to start from.
        self._fits_up_to = 0
        self._epoch = 0
        self._step_count = 0
        self._tally = Tally(len(layout.groups))
        self._lower: LowerTiers | None = None
        if tiers is not None:
            owner = Owner(self._take_room, self._pages_in_use, self._take_again, self._limits)
            self._lower = LowerTiers(owner, tiers, layout, self._tree, self._ledger, backoff_tokens)
            self._defragmenter.copying = self._lower.device

    def open(
        self,
        tokens: npt.ArrayLike,
        scope: Scope = _DEFAULT_SCOPE,
        *,
        reuse: bool = True,
        restore_at: SequenceOf[int] = (),
    ) -> Sequence:
        prompt = frozen_tokens(as_prompt(tokens, self.layout.spec))
        length = len(prompt)
        if length > self._fits_up_to:
            self.layout.require_fit(length)
        slot = self._tables.acquire()
        sequence = Sequence(self.layout, scope, slot, prompt)
        if reuse:
            match = self._match(prompt, scope, length - 1)
            self._claims.claim(sequence, match)
            self._found(sequence, match)
            if self._lower is not None:
                self._lower.look(sequence, length - 1)
            if self._sparse:
                points = self._policy.prompt_points(length, match.length, match.known, self._block, tuple(restore_at))
                sequence.chunk_ends = points if self._has_states else ()
                # Resuming at the end takes the next turn, resuming before it takes the same prompt once more.
                sequence.points = sorted({*points, max(1, length - 1), length}) if self._windows else []
        else:
            sequence.shares = False
        self._sequences[slot] = sequence
        self._epoch += 1
        return sequence

    def probe(self, tokens: npt.ArrayLike, scope: Scope = _DEFAULT_SCOPE) -> int:
        prompt = as_prompt(tokens, self.layout.spec).astype(np.int32, copy=False)
        return self._match(prompt, scope, len(prompt) - 1).length

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
        self._newest_run = max(self._newest_run, step.id)
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

    def close(self, sequence: Sequence) -> None:
        if sequence.closed:
            return
        self._require_own(sequence, "close()")
        batch = sequence.batch
        if batch is not None and not sequence.has_left:
            batch.leave(sequence)
        if sequence.in_flight:
            if not sequence.closing:
                sequence.closing = True
                self._closing.append(sequence)
                self._epoch += 1
            return
        self._epoch += 1
        self._tally.catch_up((sequence,))
        if self._has_states:
            self._states.donate(sequence)
        self._publisher.publish(sequence, ended=True)
        if self._keeper.learns and sequence.shares and sequence.computed > sequence.reused:
            cached = self._ledger.arena.taken_count[0] * self._block
            self._keeper.ended(
                sequence.tip, sequence.claimed_mark, sequence.first_key, sequence.committed, sequence.reused, cached
            )
        self._leave_tiers(sequence)
        self._claims.vacate(sequence)
        self._tables.release(sequence.slot)
        del self._sequences[sequence.slot]
        sequence.closed = True

    def suspend(self, sequence: Sequence) -> None:
        self._require_idle(sequence, "suspend()")
        if not sequence.suspended:
            if self._has_states:
                self._states.donate(sequence)
            self._publisher.publish(sequence, ended=True)
            tip = sequence.tip
            self._park(sequence)
            if self._lower is not None and tip is not None:
                self._lower.save(tip)

    def resume(self, sequence: Sequence) -> int:
        self._require_idle(sequence, "resume()")
        if sequence.suspended:
            limit = max(sequence.known - 1, min(sequence.known, sequence.suspended_at))
            self._reclaim(sequence, limit, suspended=True)
        return sequence.computed

    def truncate(self, sequence: Sequence, length: int) -> int:
        self._require_idle(sequence, "truncate()")
        if not 1 <= length <= sequence.known:
            raise RequestError(f"truncate() to {length} of {sequence.known} known tokens")
        suspended = sequence.suspended
        if not suspended:
            if self._has_states:
                self._states.donate(sequence)
            self._publisher.publish(sequence, ended=True)
            self._park(sequence)
        limit = min(length, sequence.suspended_at)
        sequence.shorten(length)
        self._reclaim(sequence, limit, suspended=suspended)
        return sequence.computed

    def fork(self, sequence: Sequence) -> Sequence:
        self._require_idle(sequence, "fork()")
        if sequence.suspended or sequence.known < sequence.computed or not sequence.shares:
            raise StateError(
                "fork() of a sequence that is suspended, opted out of reuse, or has computed tokens of unknown ids",
                hint="resume() it, give it a salt of its own instead, or extend() it with its tokens first",
            )
        if sequence.sources is not None or not sequence.computed:
            # All that it has came from the prefix tree: a second look gives the same.
            if not sequence.started and sequence.origin == "opened":
                child = self.open(sequence.tokens, sequence.scope)
            else:
                child = self._child(sequence)
                self._reclaim(child, sequence.computed + self._backoff, suspended=False)
                child.reused = child.computed
            child.origin = "forked"
            return child
        self._publisher.publish(sequence, ended=False)
        self._epoch += 1
        needed = self._claims.fork_needs(sequence)
        eviction, shortages = self._make_room(needed)
        if shortages:
            raise CapacityError("no room for a fork: " + "; ".join(map(str, shortages)), hint="close a sequence first")
        self._evict(eviction)
        if len(self._group_range) > 1:
            self._ledger.arena.gather(needed)
        child = self._child(sequence)
        own = [self._ledger.allocate(group, count) for group, count in enumerate(needed)]
        self._owed.copy(self._claims.fork(sequence, child, own))
        child.reused = child.claimed = child.computed
        return child

    def clear(self) -> Cleared:
        tiers = () if self._lower is None else self._lower.clear()
        for sequence in self._sequences.values():
            sequence.shares = False
            self._leave_tiers(sequence)
        self._epoch += 1
        freed = self._claims.forget()
        held = [self._ledger.held_count(group, self._tree.idle_blocks) for group in self._group_range]
        return Cleared(tuple(freed), tuple(held), tiers)

    def load(self, sequence: Sequence) -> bool:
        self._require_idle(sequence, "load()")
        if sequence.suspended:
            raise StateError("load() of a suspended sequence", hint="resume() it first")
        if self._lower is None or not self._lower.load(sequence):
            return False
        self._epoch += 1
        return True

    def poll(self) -> None:
        if self._lower is not None and self._lower.poll():
            self._epoch += 1

    @property
    def copying(self) -> int:
        """Batches of copies between tiers that :meth:`poll` has not taken in yet."""
        return 0 if self._lower is None else self._lower.copying

    def free_pages(self, group: int) -> IntArray:
        """Ids of all pages of a group that nobody holds or can find, e.g. to poison them in a test."""
        return self._ledger.free_pages(group)

    def shuffle_free_pages(self, rng: np.random.Generator) -> None:
        """Hand out free pages in random order from now on, so that tests meet page tables of every kind."""
        self._ledger.arena.shuffle(rng)
        self._epoch += 1

    def check(self) -> None:
        lower = self._lower
        pins = [] if lower is None else list(lower.device.pins.values())
        faults = faults_of(self._ledger, self._tree, self._tables, list(self._sequences.values()), pins)
        if lower is not None:
            faults += tier_faults(lower)
        if faults:
            raise AssertionError("; ".join(faults))

    def listen(self, max_blocks: int = 1 << 16) -> Listener:
        if self._events is None:
            self._events = Events(self.layout, self._tree)
        return self._events.attach(max_blocks)

    def capacity(self, chunk_tokens: int | None = None) -> Capacity:
        epoch = self._epoch
        return capacity_of(
            self.layout, self._tree, self._ledger, self._defragmenter, chunk_tokens, lambda: self._epoch == epoch
        )

    def stats(self) -> ManagerStats:
        self._ledger.note_peaks(self._tree.idle_blocks)
        tally = self._tally
        tally.catch_up(self._sequences.values())
        return ManagerStats(
            tally.requests,
            tally.prompt_tokens,
            tally.reused_tokens,
            tally.resumes,
            tally.resumed_tokens,
            tally.forks,
            tally.forked_tokens,
            tally.computed_tokens,
            tally.steps,
            len(self._sequences),
            self._tree.extent_count,
            group_stats(self.layout, self._ledger, self._tree.idle_blocks, tally, self._defragmenter.moved),
            () if self._lower is None else self._lower.stats(tally),
        )

    def _changed(self) -> None:
        self._epoch += 1

    def _limits(self, length: int, limit: int) -> tuple[int, bool]:
        """For a run of ``length`` tokens: the limit of its reuse, and must it end at a block boundary?"""
        # While a part of a block is copied, source and copy exist: a prompt that fits only just goes without.
        if length > self._fits_up_to and self.layout.fits(length, spare_pages=1):
            self._fits_up_to = length
        whole_blocks = length > self._fits_up_to
        if whole_blocks and self._has_states:
            # The same holds for a state and the snapshot that it starts from.
            limit = 0
        return limit, whole_blocks

    def _match(self, prompt: IntArray, scope: Scope, limit: int) -> Match:
        limit, whole_blocks = self._limits(len(prompt), limit)
        return find(
            self._tree,
            self.layout,
            self._sparse,
            scope,
            prompt,
            limit,
            backoff=self._backoff,
            whole_blocks=whole_blocks,
        )

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

    def _make_room(self, needed: list[int]) -> tuple[Eviction, tuple[Shortage, ...]]:
        """What must be evicted for ``needed`` pages per group, and what would be lacking all the same."""
        eviction, short = self._defragmenter.make_room(needed)
        if not any(short):
            return eviction, ()
        return eviction, tuple(
            Shortage(group.name, needed[group.index], needed[group.index] - short[group.index])
            for group in self.layout.groups
            if short[group.index]
        )

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
        self._in_flight[self._step_count] = plan
        return step

    def _evict(self, eviction: Eviction) -> None:
        for group, count in enumerate(evict(self._keeper, self._ledger, eviction)):
            self._tally.evicted[group] += count
        if eviction.moves is not None:
            self._defragmenter.carry_out(eviction.moves)

    def _flight(self, step: Step) -> Plan:
        plan = self._in_flight.get(step.id)
        if plan is None or plan.step is None or plan.step.lengths is not step.lengths:
            raise StateError(
                f"step {step.id} is not in flight",
                hint="complete or cancel each committed step once, with the manager that it came from",
            )
        return plan

    def _child(self, sequence: Sequence) -> Sequence:
        """An empty sequence with the same tokens, which is no request of its own."""
        child = Sequence(self.layout, sequence.scope, self._tables.acquire(), frozen_tokens(sequence.tokens))
        child.origin = "forked"
        self._sequences[child.slot] = child
        return child

    def _park(self, sequence: Sequence) -> None:
        """Give up what a sequence holds until it is reclaimed."""
        computed = sequence.computed
        self._tally.catch_up((sequence,))
        self._leave_tiers(sequence)
        self._claims.vacate(sequence)
        sequence.rebase(0)
        sequence.suspended_at = computed
        self._epoch += 1

    def _reclaim(self, sequence: Sequence, limit: int, *, suspended: bool) -> None:
        """Take back what the prefix tree still has of a parked sequence, up to ``limit`` tokens."""
        sequence.suspended_at = -1
        self._epoch += 1
        if sequence.shares:
            match = self._match(sequence.tokens, sequence.scope, limit)
            self._claims.claim(sequence, match)
            sequence.points = [point for point in sequence.points if point > sequence.computed]
            if not sequence.started and sequence.origin == "opened":
                # It has done nothing yet: what counts is what it has now.
                self._found(sequence, match)
        elif not sequence.started and sequence.origin == "opened":
            # Nor has it anything now: the cache was cleared.
            sequence.reused = 0
        sequence.claimed = sequence.computed
        if sequence.started and suspended:
            sequence.origin, sequence.started = "resumed", False
        if self._lower is not None:
            self._lower.look(sequence, limit)

    def _found(self, sequence: Sequence, match: Match) -> None:
        """Note what a sequence that has computed nothing takes from the cache, and why it is not more."""
        sequence.reused = sequence.claimed = match.length
        sequence.matched, sequence.limited_by, sequence.lost = match.known, match.limited_by, match.lost

    def _take_again(self, sequence: Sequence, limit: int, arriving: Transfer) -> None:
        """What was loaded for a sequence arrives: it claims that as if it had just been opened or resumed."""
        assert self._lower is not None
        self._park(sequence)
        self._lower.arrive(arriving)
        self._reclaim(sequence, limit, suspended=False)

    def _leave_tiers(self, sequence: Sequence) -> None:
        if self._lower is not None and sequence.below is not None:
            self._lower.leave(sequence)

    def _take_room(self, needed: list[int]) -> bool:
        # Without moving pages: a load would overwrite those that the next step is still to move.
        eviction, short = choose(self._keeper, self._ledger, needed)
        if any(short):
            return False
        self._epoch += 1
        self._evict(eviction)
        return True

    def _pages_in_use(self) -> list[SequenceOf[int]]:
        """Per group the pages whose bytes steps in flight and the next one copy from or to: they are executed after
        their commit, and copies between tiers would not wait for that."""
        pages = self._owed.pages()
        for plan in self._in_flight.values():
            assert plan.step is not None
            for pairs in (plan.step.copies, plan.step.saves, plan.step.fresh):
                for group, each in enumerate(pairs):
                    pages[group].extend(each.ravel().tolist())
        sizes = [group.page_bytes for group in self.layout.groups]
        ranges = [(page * size, (page + 1) * size) for each, size in zip(pages, sizes) for page in set(each)]
        # A page that was given up may belong to another group by now.
        return [
            sorted({page for low, high in ranges for page in range(low // size, -(-high // size))}) for size in sizes
        ]

    def _drop(self, sequence: Sequence) -> None:
        """Release blocks that the groups do not read any more."""
        length = sequence.computed
        for group in self._windows:
            table = self._tables.arrays[group.index][sequence.slot]
            for low, high in group.retention.droppable(length, KEPT_ROLLBACK, self._block):
                row = table[low:high]
                pages = row[row != NO_PAGE]
                if len(pages):
                    self._ledger.release(group.index, pages)
                    row[:] = NO_PAGE

    def _end_waiting(self) -> None:
        """Park and close what waited for the end of a step."""
        if self._spoiled:
            waiting, self._spoiled = self._spoiled, []
            for sequence in waiting:
                if sequence.in_flight:
                    sequence.undecided = True
                    self._spoiled.append(sequence)
                elif not sequence.suspended:
                    sequence.undecided = False
                    self._park(sequence)
        if self._closing:
            waiting, self._closing = self._closing, []
            for sequence in waiting:
                sequence.closing = False
                self.close(sequence)

    def _require_own(self, sequence: Sequence, call: str) -> None:
        if self._sequences.get(sequence.slot) is not sequence:
            raise StateError(f"{call} of another manager's sequence")

    def _require_idle(self, sequence: Sequence, call: str) -> None:
        if sequence.closed or sequence.closing:
            raise StateError(f"{call} of a closed sequence", hint="open a new one")
        self._require_own(sequence, call)
        sequence.settle()
        if sequence.in_flight or sequence.batch is not None:
            raise StateError(
                f"{call} of a sequence that is in a step or in a decode batch",
                hint="complete the step first, and leave the batch",
            )
