"""A request inside the engine: what the scheduler knows of it, and what only the engine does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np

from kvist.iterations.recorder import RequestTimer
from kvist.iterations.records import Phase
from kvist.scheduling import Job, State
from kvist_transformers.request import FinishReason, Request, TokenArray, draw_seed
from kvist_transformers.sampling import TokenLogprobs

#: Where a job's time counts in its record.
_PHASES: Mapping[State, Phase] = {
    State.WAITING: "queue",
    State.DEFERRED: "queue",
    State.SUSPENDED: "queue",
    State.ARRIVING: "transfer",
    State.LOADING: "transfer",
    State.PREFILL: "prefill",
    State.DECODE: "decode",
    State.DRAFT: "decode",
}

_NO_TOKENS = np.zeros(0, np.int32)


@attrs.frozen
class Source:
    """Where a request's rows come from: its name there, and the hello of every rank of the engine that has them."""

    name: str
    hellos: tuple[bytes, ...]


@attrs.define(eq=False, kw_only=True)
class EngineJob(Job):
    """slot: its row of the slot table from its first token on, otherwise -1. output: what it has generated, once it has
    ended. delivered: how many tokens its ``on_tokens`` was given. logprobs: of each token, where they are wanted.
    timer: where its time goes, if that is recorded.

    handover: the name under which another process gets it when its prompt is computed; ``None`` if it stays here.
    arrival: where its rows come from, if another process has computed its prompt; given: the tokens that were generated
    there, with which its ``prompt`` ends.
    """

    request: Request
    seed: int
    on_tokens: Callable[[EngineJob, TokenArray], None] | None = None
    handover: str | None = None
    arrival: Source | None = None
    given: TokenArray = attrs.field(factory=lambda: np.zeros(0, np.int32))
    timer: RequestTimer | None = attrs.field(default=None, init=False)
    slot: int = attrs.field(default=-1, init=False)
    delivered: int = attrs.field(default=0, init=False)
    output: TokenArray = attrs.field(factory=lambda: np.zeros(0, np.int32), init=False)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list, init=False)
    finish_reason: FinishReason | None = attrs.field(default=None, init=False)

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        handover: str | None = None,
        arrival: Source | None = None,
        given: TokenArray = _NO_TOKENS,
    ) -> EngineJob:
        """A new job for ``request``; with a seed drawn for it where it has none."""
        job = cls(
            prompt=np.concatenate([request.tokens, given]) if len(given) else request.tokens,
            # What leaves with its first token needs no room for more.
            max_new_tokens=1 if handover is not None else request.max_new_tokens - len(given),
            scope=request.scope,
            priority=request.priority,
            wishes=request.wishes,
            remote_tokens=len(request.tokens) if len(given) else 0,
            request=request,
            seed=draw_seed(request.sampling),
            handover=handover,
            arrival=arrival,
            given=given,
        )
        job.output = given
        return job

    def note_phase(self) -> None:
        """The job is in another state: its time counts there from now on, if that is recorded."""
        if self.timer is not None and self.state is not State.DONE:
            self.timer.enter(_PHASES[self.state])
