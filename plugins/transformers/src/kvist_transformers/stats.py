"""What an engine did, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs


@attrs.define
class EngineStats:
    """Counters since the engine was built; they never decrease.

    prompt_tokens: tokens of admitted prompts, split into reused_tokens and what was computed of them at first.
    computed_tokens: rows computed in all steps: prompts, recomputation after pauses, and generated tokens fed back.
    plan_ns, model_ns, complete_ns, sample_ns: where the steps' time went; ``plan`` is admission, planning and
        building inputs, ``complete`` is publishing and bookkeeping. All but ``model`` is the host's own work;
        ``sample`` ends when the tokens are on the host.
    drafted_tokens: guesses that were computed, accepted_tokens of which were right. draft_ns: time to make them.
    """

    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    pauses: int = 0
    steps: int = 0
    plan_ns: int = 0
    model_ns: int = 0
    complete_ns: int = 0
    sample_ns: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_ns: int = 0

    @property
    def host_us_per_step(self) -> float:
        """Microseconds of planning and completing per step."""
        return (self.plan_ns + self.complete_ns) / 1000 / max(self.steps, 1)

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the time of the block to ``field``."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + time.perf_counter_ns() - begin)
