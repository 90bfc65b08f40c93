"""A submitted request, for its caller."""

from __future__ import annotations

from typing import Protocol

import attrs

from kvist.errors import StateError
from kvist.scheduling import State
from kvist_transformers.job import EngineJob
from kvist_transformers.request import Completion, TokenArray
from kvist_transformers.sampling import TokenLogprobs


class Owner(Protocol):
    """What a handle needs of its engine."""

    def cancel(self, handle: Handle) -> None:
        """End the handle's request now."""

    def generated(self, job: EngineJob) -> TokenArray:
        """What a job has generated so far."""


@attrs.frozen
class Times:
    """Readings of a clock in seconds, of which only differences count; NaN for what has not happened."""

    arrival_s: float
    admitted_s: float
    first_token_s: float
    ended_s: float


class Handle:
    """A submitted request, for its caller. Made by :meth:`Engine.submit`."""

    def __init__(self, engine: Owner, job: EngineJob) -> None:
        self._engine = engine
        self._job = job

    @property
    def request_id(self) -> int:
        """Unique in its engine, in order of submission."""
        return self._job.number

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._job.state is State.DONE

    @property
    def tokens(self) -> TokenArray:
        """int32, what has been generated so far."""
        return self._engine.generated(self._job)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One for each of :attr:`tokens` where the request asks for them, otherwise empty. The engine adds to it."""
        return self._job.logprobs

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose rows were in the cache when the request first ran, 0 before."""
        return max(self._job.reused_tokens, 0)

    @property
    def running(self) -> bool:
        """Whether it has been admitted and has not ended: a step may have computed some of it."""
        return self._job.started and not self.done

    @property
    def times(self) -> Times:
        """When it came, was admitted, had its first token and ended."""
        job = self._job
        return Times(job.arrival_s, job.admitted_s, job.first_token_s, job.ended_s)

    def cancel(self) -> None:
        """End the request now and free its pages. Does nothing when it has ended."""
        self._engine.cancel(self)

    def completion(self) -> Completion:
        """The result. Raises StateError while the request runs."""
        job = self._job
        if job.finish_reason is None:
            raise StateError(f"request {job.number} has not ended", hint="call engine.step() until handle.done")
        return Completion(
            job.number,
            len(job.request.tokens),
            job.output,
            job.finish_reason,
            self.reused_tokens,
            job.computed_tokens,
            job.pauses + job.suspensions,
            job.error,
        )
