"""What a scheduler hands out for one step, and what it counts."""

from __future__ import annotations

from typing import Generic, TypeVar

import attrs

from kvist.plan import Run
from kvist.scheduling.job import Job
from kvist.scheduling.joint import JointPlan
from kvist.step import NO_DRAFTS, IntArray, Step

J = TypeVar("J", bound=Job)


@attrs.frozen(eq=False)
class Chunk(Generic[J]):
    """Rows of one job from position ``start`` on: ``count`` tokens of ``job.tokens``; or, with ``drafts``, the newest
    token that the job has generated (``count`` is 1) and behind it the drafts, int32.

    last: after the rows the next token is chosen, and with drafts after each of them.
    """

    job: J
    start: int
    count: int
    drafts: IntArray = NO_DRAFTS

    @property
    def last(self) -> bool:
        return self.start + self.count >= len(self.job.tokens)


# No slots, as for plans.
@attrs.frozen(eq=False, slots=False)
class Turn(Generic[J]):
    """A committed step. Its rows: ``decode_rows`` of the jobs that decode without drafts, in the order of
    ``Scheduler.decoding``, then ``chunks``, in this order.

    step: of the scheduler's own manager. steps: the same, and the companion's behind it.
    """

    decode_rows: int
    chunks: tuple[Chunk[J], ...]
    steps: tuple[Step, ...]
    plan: JointPlan

    @property
    def step(self) -> Step:
        return self.steps[0]

    @property
    def runs(self) -> list[Run]:
        """Of the scheduler's own manager, one per chunk."""
        return self.plan.plans[0].runs


@attrs.define
class SchedulerStats:
    """Counters since the scheduler was made; they never decrease.

    submitted, ended: jobs; refused: those that the scheduler ended itself, with an error.
    prompt_tokens: of jobs that ran, ``reused_tokens`` of which were in the cache then.
    deferred: times that a job waited for another's prefix. suspensions, pauses: preemptions with and without a copy in
        a lower tier, after which ``recomputed_tokens`` were computed a second time.
    trimmed: turns in which prompts got fewer tokens than the budget has, because pages were short.
    drafted: drafts that were computed. accepted: those that were right and stayed.
    """

    submitted: int = 0
    ended: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    deferred: int = 0
    suspensions: int = 0
    pauses: int = 0
    recomputed_tokens: int = 0
    trimmed: int = 0
    drafted: int = 0
    accepted: int = 0
