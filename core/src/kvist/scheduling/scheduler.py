"""Decides what the next step computes, and who gives way when memory is short."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

from kvist.errors import StateError
from kvist.plan import Run
from kvist.scheduling.intake import Intake
from kvist.scheduling.job import Job, State
from kvist.scheduling.joint import JointPlan
from kvist.scheduling.turn import Chunk, Turn
from kvist.scheduling.waits import Wait, deadlock, does_not_fit, outside_of, waits
from kvist.step import NO_DRAFTS, IntArray

J = TypeVar("J", bound=Job)


class Scheduler(Intake[J]):
    """Continuous batching over one cache manager, for the thread that drives that manager.

    Every turn gives each decoding job one token, and what is left of the budget to prompts, the first in order first.
    The order is that of arrival, in which a priority counts as ``ageing_s`` seconds a level, and for admission what the
    cache has of a prompt as one level at most: so nobody is overtaken by whoever comes more than that later.

    manager: only this scheduler opens sequences of it, or knows of those who do: see :class:`DeadlockError`.
    max_batch_tokens: most tokens of one step. max_sequences: most jobs between first admission and end.
    generated: the tokens that a job has generated so far, int32; asked when it ends or gives way.
    admission: who may begin beside those that run; :class:`Watermark` unless said otherwise.
    ageing_s: seconds that one level of priority is worth.
    clock: seconds from any origin; only differences count.
    companion: a second cache that goes along. remote: who brings the rows of jobs with ``remote_tokens``.
    """

    @property
    def draft_room(self) -> int:
        """Most drafts of the next turn, over all jobs: prompts that are being computed need none of their tokens for
        certain, so they go first."""
        rows = len(self._roster.decode) + sum(job.remaining for job in self._roster.prefill)
        return max(0, self.max_batch_tokens - rows)

    def turn(self, drafts: Mapping[int, IntArray] | None = None) -> Turn[J] | None:
        """Admit who may begin, make room, and commit the next step. ``None``: nothing can be computed now, because
        there is nothing to do, or because copies or transfers have to end first.

        drafts: by job number, tokens (int32) that a job which decodes may generate after its next one; the step
            computes them behind the job's newest token. They are a bet: a job whose drafts leave no room for what is
            certain gets none, nobody gives way for them, and drafts of a job that does not decode are ignored. A job
            takes at most as many as it has tokens to generate but one, and as the manager can take back. With a
            companion there can be none.

        Raises DeadlockError, with who waits for what, when there is something to do that nobody will ever make
        possible. It can be tried again when others have given pages back.
        """
        if self._turn is not None:
            raise StateError("turn() before the turn before is complete", hint="complete() or abort() it first")
        self._gate.poll()
        roster = self._roster
        if roster.loading:
            for job in [job for job in roster.loading if job.sequence is not None and not job.sequence.loading]:
                self._compute(job)
        self._shortages = ()
        if roster.queue:
            self._admit()
        while roster.prefill or roster.decode:
            self._turn = self._fitting(drafts or {})
            if self._turn is not None:
                return self._turn
            if not self._give_way():
                return None
            if roster.queue and not roster.holding_count:
                # The only one that ran was refused.
                self._admit()
        if roster.queue and not (roster.holding_count or self._busy):
            raise deadlock(self.waits(), outside_of(self.manager, roster))
        return None

    def complete(self, turn: Turn[J], accepted: SequenceOf[int] = ()) -> list[J]:
        """The turn's rows are computed. Returns the jobs for which the next token can be chosen, in the order of the
        turn's chunks: they decode from now on. The companion's step is for its owner to complete.

        accepted: for each chunk with drafts, in the order of the turn's chunks, how many of its tokens stay: the newest
            token, which counts as 1, and the drafts that were right. Jobs with drafts decode on; they are not among
            those returned.
        """
        self._require_turn(turn)
        drafting = sum(1 for chunk in turn.chunks if len(chunk.drafts))
        if len(accepted) != drafting:
            raise StateError(f"complete() got {len(accepted)} accepted counts for {drafting} chunks with drafts")
        kept = iter(accepted)
        counts = [next(kept) if len(chunk.drafts) else chunk.count for chunk in turn.chunks]
        self.manager.complete(turn.step, counts if accepted else None)
        self._turn = None
        ready = []
        for chunk, count in zip(turn.chunks, counts):
            job = chunk.job
            if len(chunk.drafts):
                self.stats.drafted += len(chunk.drafts)
                self.stats.accepted += count - 1
                self._rejoin(job)
                continue
            job.computed_tokens += chunk.count
            if job.remaining:
                self._wake(self._prefixes.advanced(job))
                continue
            ready.append(job)
            if math.isnan(job.first_token_s):
                job.first_token_s = self._clock()
            self._wake(self._prefixes.remove(job))
            self._roster.move(job, State.DECODE)
            assert job.sequence is not None
            self.batch.join(job.sequence)
        return ready

    def abort(self, turn: Turn[J], *, ran: bool = True) -> None:
        """The turn failed. Its jobs stay as they are, but where the step may have overwritten states they are paused.

        ran: has the step begun? As for ``manager.cancel``.
        """
        self._require_turn(turn)
        turn.plan.cancel(turn.steps, ran=ran)
        self._turn = None
        for job in list(self._roster.draft):
            self._rejoin(job)
        for job in [*self._roster.decode, *self._roster.prefill]:
            if job.sequence is not None and job.sequence.suspended:
                self.pause(job)

    def waits(self) -> list[Wait]:
        """Who waits for what, of all that do not compute. For people and dashboards."""
        return waits(self._roster, self._shortages, self._busy)

    # ------------------------------------------------------------------ what fits

    def _fitting(self, drafts: Mapping[int, IntArray]) -> Turn[J] | None:
        """The largest step that fits, committed. Prompts get fewer tokens before anybody gives way; ``None`` when not
        even a token for each decoding job fits, or, without any, one of the first prompt."""
        rows = len(self._roster.decode)
        full = self.max_batch_tokens - rows
        budget = full if self._cap is None else min(full, max(1, 2 * self._cap))
        while True:
            chunks = self._chunks(budget)
            if not chunks and not rows:
                return None
            plan = self._plan(chunks)
            if plan.fits:
                break
            if not chunks:
                self._shortages = plan.shortages
                return None
            budget = min(budget, sum(count for _, count in chunks)) // 2
            if not budget and not rows:
                self._shortages = plan.shortages
                return None
        self._cap = None if budget >= full else budget
        self.stats.trimmed += budget < full
        if not chunks and not drafts:
            return Turn(rows, (), plan.commit(), plan)
        jobs = {id(job.sequence): job for job, _ in chunks}
        taken = self._take_drafts(drafts, chunks) if drafts else {}
        if taken:
            jobs.update((id(job.sequence), job) for job in self._roster.draft)
            plan = self._plan(chunks, taken)
            if not plan.fits:
                for job in list(self._roster.draft):
                    self._rejoin(job)
                taken = {}
                plan = self._plan(chunks)
        made = []
        for run in plan.plans[0].runs:
            job = jobs[id(run.sequence)]
            made.append(Chunk(job, run.sequence.computed, run.new_tokens, taken.get(job.number, NO_DRAFTS)))
        return Turn(len(self._roster.decode), tuple(made), plan.commit(), plan)

    def _take_drafts(self, drafts: Mapping[int, IntArray], chunks: list[tuple[J, int]]) -> dict[int, IntArray]:
        """What of the drafts there is room for. Their jobs leave the decode batch for this step."""
        if self._companion is not None:
            raise StateError("turn(drafts=...) of a scheduler with a companion", hint="give it no drafts")
        room = self.max_batch_tokens - len(self._roster.decode) - sum(count for _, count in chunks)
        most = self.manager.layout.most_drafts
        taken = {}
        for job in [job for job in self._roster.decode if job.number in drafts]:
            sequence = job.sequence
            assert sequence is not None
            limits = [room, job.end - 1 - sequence.computed, *([] if most is None else [most])]
            tokens = drafts[job.number][: max(0, min(limits))]
            if len(tokens):
                room -= len(tokens)
                taken[job.number] = tokens
                self.batch.leave(sequence)
                self._roster.move(job, State.DRAFT)
        return taken

    def _rejoin(self, job: J) -> None:
        """The job's step with drafts is over: it decodes on."""
        assert job.sequence is not None
        self._roster.move(job, State.DECODE)
        if not job.sequence.suspended:
            self.batch.join(job.sequence)

    def _chunks(self, budget: int) -> list[tuple[J, int]]:
        """Prompt tokens for one step, at most ``budget``, the first in order first."""
        chosen = []
        for job in self._roster.prefill:
            if budget <= 0:
                break
            sequence = job.sequence
            assert sequence is not None
            start = sequence.computed
            # A chunk ends where a snapshot of the model's states is to be taken.
            count = sequence.next_end(start + min(job.remaining, budget)) - start
            chosen.append((job, count))
            budget -= count
        return chosen

    def _plan(self, chunks: list[tuple[J, int]], drafts: Mapping[int, IntArray] | None = None) -> JointPlan:
        runs = [Run(job.sequence, count) for job, count in chunks if job.sequence is not None]
        if drafts:
            drafting = self._roster.draft
            runs += [Run(job.sequence, 1, len(drafts[job.number])) for job in drafting if job.sequence is not None]
        own = self.manager.plan(runs, decode=self.batch)
        if self._companion is None:
            return JointPlan((self.manager,), (own,))
        other = self._companion.manager
        return JointPlan((self.manager, other), (own, other.plan(*self._companion.runs(chunks))))

    # ------------------------------------------------------------------ who gives way

    def _give_way(self) -> bool:
        """One rung of the ladder; the manager has evicted all it can. False: wait, for what is under way."""
        roster = self._roster
        if any(shortage.copies for shortage in self._shortages):
            return False
        if len(roster.prefill) + len(roster.decode) > 1:
            self.preempt(roster.last())
            return True
        if roster.loading or roster.arriving or self._busy:
            return False
        outside = outside_of(self.manager, roster)
        if outside:
            raise deadlock(self.waits(), outside)
        self._refuse(roster.last(), does_not_fit(self.manager, self._shortages))
        return True

    def _require_turn(self, turn: Turn[J]) -> None:
        if turn is not self._turn:
            raise StateError("a turn ends once, by complete() or abort()")
