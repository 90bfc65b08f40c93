"""How jobs come, begin, give way and go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np

from kvist.contract import CacheManager
from kvist.errors import CapacityError, KvistError, SpecError, StateError
from kvist.plan import Shortage
from kvist.scheduling.admission import AdmissionPolicy, Watermark
from kvist.scheduling.gate import Gate
from kvist.scheduling.job import Job, State
from kvist.scheduling.joint import Companion
from kvist.scheduling.prefixes import Prefixes
from kvist.scheduling.remote import Remote
from kvist.scheduling.roster import Roster
from kvist.scheduling.turn import SchedulerStats, Turn
from kvist.sequence import Sequence as CacheSequence
from kvist.step import IntArray

J = TypeVar("J", bound=Job)

#: Waiting jobs that are compared before one is admitted, and how many of their prompts are looked up anew in a turn.
_LOOKED_AT, _LOOKED_UP = 256, 8


class Intake(Generic[J]):
    """The part of a scheduler that concerns one job at a time. The arguments are those of
    :class:`~kvist.scheduling.Scheduler`.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        generated: Callable[[J], IntArray],
        admission: AdmissionPolicy | None = None,
        ageing_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        companion: Companion | None = None,
        remote: Remote[J] | None = None,
    ) -> None:
        if not 1 <= max_sequences <= max_batch_tokens:
            raise SpecError(f"max_sequences={max_sequences} must be in 1 .. max_batch_tokens={max_batch_tokens}")
        if not 0 <= ageing_s < math.inf:
            raise SpecError(f"ageing_s={ageing_s} must be a number of seconds")
        self.manager = manager
        self.batch = manager.decode_batch()
        self.stats = SchedulerStats()
        self._roster: Roster[J] = Roster()
        self._prefixes: Prefixes[J] = Prefixes(manager.layout.block_tokens)
        self._gate = Gate(manager, companion, admission or Watermark())
        self._companion = companion
        self._remote = remote
        self._generated = generated
        self._clock = clock
        self._ageing_s = ageing_s
        self.max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._turn: Turn[J] | None = None
        #: What the last step that did not fit at all has lacked.
        self._shortages: tuple[Shortage, ...] = ()
        #: Prompt tokens that a step may have since pages were short; None without a limit of that kind.
        self._cap: int | None = None
        self._refused: list[J] = []
        #: Turns in which somebody might have been admitted, and the latest one in which prompts were looked up.
        self._turns = self._looked_up = 0

    # ------------------------------------------------------------------ jobs come and go

    def submit(self, job: J) -> None:
        """Take a new job.

        Raises CapacityError for one that could not run even if it had the whole cache; nothing is changed then.
        """
        if job.remote_tokens and self._remote is None:
            raise StateError("a job with remote_tokens needs a scheduler with a remote")
        for manager in self._gate.managers:
            manager.layout.require_fit(job.end)
        job.number = self.stats.submitted
        job.arrival_s = self._clock()
        job.rank = job.arrival_s - job.priority * self._ageing_s
        self._roster.enter(job)
        self.stats.submitted += 1

    def watch(self, moved: Callable[[J], None]) -> None:
        """Call ``moved`` with every job that comes into another state from now on, in the midst of what moves it: it
        may look at the job's state and nothing else."""
        self._roster.watch = moved

    def finish(self, job: J) -> None:
        """End a job in whatever state it is; what it computed stays reusable. Not between ``turn`` and ``complete`` for
        a job that computes. Idempotent."""
        if job.state is State.DONE:
            return
        self._require_no_turn(job)
        if job.state is State.ARRIVING:
            assert self._remote is not None
            self._remote.cancel(job)
        self._give_up(job, close=True)
        self._end(job)

    def detach(self, job: J) -> CacheSequence:
        """End a job whose prompt is computed, and leave its open sequence, with all its tokens known, to the caller: to
        hand it over to another process, or to close it."""
        if job.state is not State.DECODE or job.sequence is None:
            raise StateError(
                f"detach() of request {job.number}, which is {job.state.value}",
                hint="detach it when its prompt is computed",
            )
        self._require_no_turn(job)
        sequence = job.sequence
        self.batch.leave(sequence)
        sequence.extend(self._new_ids(job))
        job.sequence = None
        if self._companion is not None:
            self._companion.give_up(job)
        self._end(job)
        return sequence

    def landed(self, job: J, sequence: CacheSequence) -> None:
        """The rows that an arriving job waits for are here, and ``sequence``, the scheduler's from now on, has them."""
        self._require_arriving(job, "landed()")
        job.sequence = sequence
        job.remote_tokens = 0
        self._compute(job)

    def lost(self, job: J) -> None:
        """The rows that an arriving job waits for will not come: it computes them itself, in its turn."""
        self._require_arriving(job, "lost()")
        job.remote_tokens = 0
        self._gate.opened()
        self._roster.move(job, State.WAITING)

    @property
    def idle(self) -> bool:
        """Has every job ended?"""
        return self._roster.idle

    @property
    def running_count(self) -> int:
        """Jobs that hold memory."""
        return self._roster.holding_count

    @property
    def waiting_count(self) -> int:
        """Jobs that hold none."""
        return len(self._roster.queue) + len(self._roster.deferred)

    @property
    def decoding(self) -> SequenceOf[J]:
        """Jobs that get one token a step, in row order. Do not change it."""
        return self._roster.decode

    def jobs(self) -> list[J]:
        """All that have not ended."""
        return list(self._roster)

    def take_refused(self) -> list[J]:
        """Jobs that the scheduler has ended itself since the last call, each with its ``error``."""
        refused, self._refused = self._refused, []
        return refused

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        self._turns += 1
        while (job := self._next()) is not None:
            if job.state is State.WAITING and not job.remote_tokens:
                job.behind = self._prefixes.wait_for(job)
                if job.behind is not None:
                    self.stats.deferred += 1
                    self._roster.move(job, State.DEFERRED)
                    continue
            try:
                begun = self._begin(job)
            except CapacityError:
                # No room for rows from another process.
                begun = False
            except KvistError as error:
                self._refuse(job, error)
                continue
            if not begun:
                self._gate.closed_at = self._roster.queue[0]
                return

    def _next(self) -> J | None:
        """Who would begin next, if there is work for it in the next step."""
        roster = self._roster
        queue = roster.queue
        if not queue:
            return None
        if roster.holding_count and (self._gate.crowded or self._gate.closed_at is queue[0]):
            return None
        queued = len(roster.decode) + sum(each.remaining for each in roster.prefill)
        if queued >= self.max_batch_tokens:
            return None
        if roster.started_count < self._max_sequences:
            return self._most_urgent(queue)
        if roster.preempted_count:
            return self._most_urgent([each for each in queue if each.started])
        return None

    def _most_urgent(self, jobs: SequenceOf[J]) -> J:
        """The first in order, unless the cache has more of one that came little later: a prompt that is cached goes as
        if it had one level more of priority, a part of it in proportion."""
        last = jobs[0].rank + self._ageing_s
        near = [job for job in jobs[:_LOOKED_AT] if job.rank < last]
        if len(near) < 2:
            return jobs[0]
        if self._looked_up != self._turns:
            self._looked_up = self._turns
            for job in sorted(near, key=lambda job: job.looked_up)[:_LOOKED_UP]:
                self._look_up(job)
        while True:
            best = min(near, key=lambda job: (job.rank - self._ageing_s * job.cached_share, job.number))
            if best.looked_up == self._turns:
                return best
            # It may have been evicted meanwhile.
            self._look_up(best)

    def _look_up(self, job: J) -> None:
        if job.looked_up == self._turns:
            return
        job.looked_up = self._turns
        if job.state is State.SUSPENDED:
            job.cached_share = 1.0
        elif not job.remote_tokens:
            job.cached_share = self.manager.probe(job.tokens, job.scope) / len(job.tokens)

    def _begin(self, job: J) -> bool:
        """Give a job its sequence, unless there is no room for it now."""
        manager, roster = self.manager, self._roster
        if job.remote_tokens:
            assert self._remote is not None
            if not self._gate.admits(job, roster):
                return False
            self._remote.receive(job)
            self._count_in(job)
            roster.move(job, State.ARRIVING)
            return True
        if job.sequence is None:
            job.sequence = manager.open(job.tokens, job.scope, wishes=job.wishes)
        else:
            manager.resume(job.sequence)
        sequence = job.sequence
        if not self._gate.admits(job, roster):
            if job.state is State.SUSPENDED:
                manager.suspend(sequence)
            else:
                manager.close(sequence)
                job.sequence = None
            return False
        self._count_in(job)
        if self._companion is not None:
            self._companion.begin(job)
        if sequence.loadable > sequence.computed and manager.load(sequence):
            self._prefixes.add(job)
            roster.move(job, State.LOADING)
        else:
            self._compute(job)
        return True

    def _count_in(self, job: J) -> None:
        if not job.started:
            job.admitted_s = self._clock()
            self._roster.started_count += 1
            # It is still in the queue.
            self._roster.preempted_count += 1

    def _compute(self, job: J) -> None:
        """The job has all that it will get without computing."""
        sequence = job.sequence
        assert sequence is not None
        if job.reused_tokens < 0:
            job.reused_tokens = sequence.computed - sequence.received
            self.stats.prompt_tokens += len(job.prompt)
            self.stats.reused_tokens += job.reused_tokens
        lost = max(0, job.had_tokens - sequence.computed)
        job.recomputed_tokens += lost
        self.stats.recomputed_tokens += lost
        job.had_tokens = 0
        if job.state is not State.LOADING:
            self._prefixes.add(job)
        self._roster.move(job, State.PREFILL)

    def _wake(self, jobs: SequenceOf[J]) -> None:
        for job in jobs:
            job.behind = None
            self._roster.move(job, State.WAITING)

    # ------------------------------------------------------------------ giving way

    def preempt(self, job: J) -> None:
        """Take a computing job's pages: suspend it, if a lower tier has room for what it has, otherwise pause it. It
        comes back in its old place in the order, when somebody has ended and it could finish beside those that run."""
        if self._gate.parks(job, self._roster):
            self._give_up(job, close=False)
            job.suspensions += 1
            self.stats.suspensions += 1
            self._roster.move(job, State.SUSPENDED)
        else:
            self.pause(job)
        # Whoever came in at once would be the next to give way.
        self._gate.crowded = True

    def pause(self, job: J) -> None:
        """Take a computing job's pages without a copy: it computes again what is evicted until it comes back."""
        self._give_up(job, close=True)
        job.pauses += 1
        self.stats.pauses += 1
        self._roster.move(job, State.WAITING)

    def _refuse(self, job: J, error: KvistError) -> None:
        job.error = error
        self.stats.refused += 1
        self._refused.append(job)
        self.finish(job)

    def _give_up(self, job: J, *, close: bool) -> None:
        """Take a job's sequence out of everything, and leave what it has computed to the cache."""
        if job.behind is not None:
            self._prefixes.forget(job, job.behind)
            job.behind = None
        sequence = job.sequence
        if sequence is None:
            return
        self._wake(self._prefixes.remove(job))
        if sequence.batch is not None:
            self.batch.leave(sequence)
        # What was generated becomes known, so that others can reuse it.
        sequence.extend(self._new_ids(job))
        if job.state in (State.PREFILL, State.DECODE):
            job.had_tokens = sequence.suspended_at if sequence.suspended else sequence.computed
            job.tokens = np.concatenate([job.prompt, self._generated(job)])
        if close:
            self.manager.close(sequence)
            job.sequence = None
        else:
            self.manager.suspend(sequence)
        if self._companion is not None:
            self._companion.give_up(job)
        self._gate.opened()

    def _new_ids(self, job: J) -> IntArray:
        """Generated tokens that the sequence does not know."""
        assert job.sequence is not None
        return self._generated(job)[job.sequence.known - len(job.prompt) :]

    def _end(self, job: J) -> None:
        job.ended_s = self._clock()
        self.stats.ended += 1
        self._roster.move(job, State.DONE)
        self._gate.opened()
        self._gate.crowded = False

    @property
    def _busy(self) -> bool:
        """Are copies or transfers under way that will give pages back?"""
        return bool(self.manager.copying) or (self._remote is not None and self._remote.open > 0)

    def _require_no_turn(self, job: J) -> None:
        if self._turn is not None and job.state in (State.PREFILL, State.DECODE, State.DRAFT):
            raise StateError(
                f"request {job.number} is in a step", hint="complete() the turn first, then end the request"
            )

    def _require_arriving(self, job: J, call: str) -> None:
        if job.state is not State.ARRIVING:
            raise StateError(f"{call} of request {job.number}, which is {job.state.value}")
