"""Sequences from opening to closing: what they take from the cache, and what they leave there."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from kvist.books import Books
from kvist.errors import CapacityError, RequestError, StateError
from kvist.layout import Layout
from kvist.plan import room_hint
from kvist.policies import EvictionPolicy
from kvist.prefix.match import Match
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence, as_prompt, frozen_tokens
from kvist.spec import Scope
from kvist.stats import Cleared
from kvist.tiers.config import Tiers
from kvist.tiers.lower import LowerTiers, Owner
from kvist.tiers.transfer import Transfer
from kvist.wishes import Wishes

_DEFAULT_SCOPE = Scope()


class Residents(Books):
    """The calls of a manager that concern one sequence and no step, and those of the tiers."""

    def __init__(
        self,
        layout: Layout,
        restore: RestorePolicy | None = None,
        backoff_tokens: int = 0,
        eviction: EvictionPolicy | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        super().__init__(layout, restore, backoff_tokens, eviction)
        if tiers is not None:
            owner = Owner(self._new_pages, self._pages_in_use, self._take_again, self._limits)
            self._lower = LowerTiers(owner, tiers, layout, self._tree, self._ledger, backoff_tokens)
            self._defragmenter.copying.append(self._lower.device)

    def open(
        self,
        tokens: npt.ArrayLike,
        scope: Scope = _DEFAULT_SCOPE,
        *,
        reuse: bool = True,
        restore_at: SequenceOf[int] = (),
        wishes: Wishes | None = None,
    ) -> Sequence:
        prompt = frozen_tokens(as_prompt(tokens, self.layout.spec))
        length = len(prompt)
        if length > self._fits_up_to:
            self.layout.require_fit(length)
        slot = self._tables.acquire()
        sequence = Sequence(self.layout, scope, slot, prompt)
        if reuse:
            if wishes is not None:
                sequence.wishes = wishes.by_block(length, self._block)
            match = self._match(prompt, scope, length - 1)
            self._claims.claim(sequence, match)
            self._found(sequence, match)
            if self._lower is not None:
                self._lower.look(sequence, length - 1)
            if self._sparse:
                points = self._policy.prompt_points(length, match.length, match.known, self._block, tuple(restore_at))
                sequence.chunk_ends = points if self._has_states else ()
                ends = self._policy.end_points(length, self._block)
                sequence.points = sorted({*points, *ends}) if self._windows else []
        else:
            sequence.shares = False
        self._sequences[slot] = sequence
        self._epoch += 1
        return sequence

    def probe(self, tokens: npt.ArrayLike, scope: Scope = _DEFAULT_SCOPE) -> int:
        prompt = as_prompt(tokens, self.layout.spec).astype(np.int32, copy=False)
        return self._match(prompt, scope, len(prompt) - 1).length

    def close(self, sequence: Sequence) -> None:
        if sequence.closed:
            return
        self._require_own(sequence, "close()")
        if sequence.arriving:
            raise StateError(
                "close() of a sequence whose rows are on their way from another process",
                hint="give_up() its landing; the pages stay until nobody writes to them any more",
            )
        batch = sequence.batch
        if batch is not None and not sequence.has_left:
            batch.leave(sequence)
        if sequence.in_flight:
            if not sequence.closing:
                sequence.closing = True
                self._closing.append(sequence)
                self._epoch += 1
            return
        self._tally.catch_up((sequence,))
        self._publish_all(sequence)
        self._end(sequence)

    def suspend(self, sequence: Sequence) -> None:
        self._require_idle(sequence, "suspend()")
        if not sequence.suspended:
            self._publish_all(sequence)
            tip = sequence.tip
            self._park(sequence)
            self._tally.suspended(sequence)
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
            self._publish_all(sequence)
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
                child.wishes = sequence.wishes
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
            raise CapacityError(
                "no room for a fork: " + "; ".join(map(str, shortages)),
                hint=room_hint(self._copies, "fork", "close a sequence first"),
            )
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
        if self._events is not None:
            self._events.catch_up()

    @property
    def copying(self) -> int:
        """Batches of copies between tiers that :meth:`poll` has not taken in yet."""
        return 0 if self._lower is None else self._lower.copying

    def _child(self, sequence: Sequence) -> Sequence:
        """An empty sequence with the same tokens, which is no request of its own."""
        child = Sequence(self.layout, sequence.scope, self._tables.acquire(), frozen_tokens(sequence.tokens))
        child.origin = "forked"
        child.wishes = sequence.wishes
        self._sequences[child.slot] = child
        return child

    def _publish_all(self, sequence: Sequence) -> None:
        """Leave all that a sequence has committed to the cache, before it gives its pages up."""
        if self._has_states:
            self._states.donate(sequence)
        self._publisher.publish(sequence, ended=True)

    def _end(self, sequence: Sequence) -> None:
        """Take everything from a sequence that has published what it has, and close it."""
        self._epoch += 1
        if sequence.shares and sequence.computed > sequence.reused:
            if self._keeper.learns:
                cached = self._ledger.arena.taken_count[0] * self._block
                self._keeper.ended(
                    sequence.tip, sequence.claimed_mark, sequence.first_key, sequence.committed, sequence.reused, cached
                )
            self._tree.pass_time(sequence.committed)
        self._leave_tiers(sequence)
        self._claims.vacate(sequence)
        self._tables.release(sequence.slot)
        del self._sequences[sequence.slot]
        sequence.closed = True

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
        if suspended:
            had = min(sequence.suspended_at, sequence.known)
            sequence.had = had if sequence.started else max(sequence.had, had)
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
                    self._publisher.leave(sequence)
                    self._park(sequence)
                    self._tally.suspended(sequence)
        if self._closing:
            waiting, self._closing = self._closing, []
            for sequence in waiting:
                sequence.closing = False
                self.close(sequence)
