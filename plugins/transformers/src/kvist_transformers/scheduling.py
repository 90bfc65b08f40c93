"""Which requests run next, and how many of their tokens: decode first, then prompts in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvist.manager import Run
from kvist_transformers.request import FinishReason, Phase, Request, TokenArray

if TYPE_CHECKING:
    from kvist.sequence import Sequence as CacheSequence


@attrs.define(eq=False)
class Job:
    """One request inside the engine.

    arrival: order of submission; the oldest runs first and is paused last.
    tokens: what has to be in the cache before the next token can be sampled: the prompt, after a pause with
        what was generated so far.
    sequence: the open sequence while the job runs, otherwise ``None``.
    slot: its row of the slot table from first admission on, otherwise -1.
    """

    arrival: int
    request: Request
    seed: int
    tokens: TokenArray
    phase: Phase = "waiting"
    sequence: CacheSequence | None = None
    slot: int = -1
    reused_tokens: int = -1
    computed_tokens: int = 0
    pauses: int = 0
    delivered: int = 0
    output: TokenArray = attrs.Factory(lambda: np.zeros(0, np.int32))
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    on_tokens: Callable[[Job, TokenArray], None] | None = None

    @property
    def remaining(self) -> int:
        """Tokens of :attr:`tokens` not yet computed. Only while the job runs."""
        assert self.sequence is not None
        return len(self.tokens) - self.sequence.computed


class Scheduler:
    """Order of the requests. Holds no pages and decides nothing about memory.

    waiting: not admitted, paused jobs first. prefill: computing their tokens, oldest first. decode: generating.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.waiting: deque[Job] = deque()
        self.prefill: list[Job] = []
        self.decode: list[Job] = []
        # After a pause nothing is admitted until something ended: whoever came back at once would be paused again.
        self.crowded = False

    @property
    def running_count(self) -> int:
        """Jobs with an open sequence."""
        return len(self.prefill) + len(self.decode)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, now or later."""
        return not self.waiting and not self.prefill and not self.decode

    def candidates(self) -> list[Job]:
        """Waiting jobs in order of arrival; admission itself is the engine's."""
        return [] if self.crowded and self.running_count else list(self.waiting)

    def held_back(self, job: Job) -> bool:
        """Whether an older prefill is about to compute at least one more block of this job's prefix.

        Waiting for it costs a step or a few, computing the same rows twice costs more. Only older jobs are waited
        for, so nobody waits forever.
        """
        for other in self.prefill:
            if other.arrival > job.arrival or other.request.scope != job.request.scope:
                continue
            assert other.sequence is not None
            end = other.sequence.computed + self._block_tokens
            reachable = end < len(job.tokens) and end <= len(other.tokens)
            if reachable and np.array_equal(job.tokens[:end], other.tokens[:end]):
                return True
        return False

    def runs(self, budget: int) -> list[tuple[Job, int]]:
        """Prompt chunks for one step: jobs and token counts, at most ``budget`` tokens beside the decode rows."""
        chosen = []
        budget -= len(self.decode)
        for job in self.prefill:
            if budget <= 0 or not job.remaining:
                break
            assert job.sequence is not None
            start = job.sequence.computed
            # A chunk ends where a snapshot of the model's states is to be taken.
            count = job.sequence.next_end(start + min(job.remaining, budget)) - start
            chosen.append((job, count))
            budget -= count
        return chosen

    def youngest(self) -> Job:
        """The running job that arrived last."""
        return max(self.prefill + self.decode, key=lambda job: job.arrival)

    def remove(self, job: Job) -> None:
        """Take a job out of whatever list it is in."""
        jobs: Sequence[list[Job] | deque[Job]] = (self.waiting, self.prefill, self.decode)
        for part in jobs:
            if job in part:
                part.remove(job)

    def requeue(self, job: Job) -> None:
        """Put a paused job back among the waiting, by its arrival."""
        later = [index for index, other in enumerate(self.waiting) if other.arrival > job.arrival]
        self.waiting.insert(later[0] if later else len(self.waiting), job)


def as_runs(chosen: Sequence[tuple[Job, int]]) -> list[Run]:
    """For ``manager.plan``."""
    return [Run(job.sequence, count) for job, count in chosen if job.sequence is not None]
