"""An engine without a model: admits the requests of a trace, computes nothing, and drives a cache manager.

First in, first out; a request is admitted when prompt and output fit beside what running requests will need; prompts
are computed as they are admitted, then every running request gets one token per step. A request that cannot go on
all the same (groups that share an arena can get into each other's way) is preempted, the youngest first, and
computed again later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvist.errors import CapacityError
from kvist.iterations.recorder import Iterations, RequestTimer
from kvist.manager import CacheManager, Run, Sequence
from kvist.replay.traces import TraceRequest
from kvist.spec import Scope, ceil_div
from kvist.step import IntArray, Step

if TYPE_CHECKING:
    from kvist.stats import ManagerStats

#: CPU time of this thread: neighbours on the machine do not matter.
_now = time.thread_time_ns
_SCOPE = Scope()


@attrs.define
class ReplayResult:
    """What a replay did.

    reused: per request of the trace, the prompt tokens taken from the cache; -1 where the request was refused.
    refused: requests whose prompt is longer than the model takes.
    cut_tokens: output tokens not generated because a request reached the model's length.
    recomputed_tokens: rows computed again after a preemption.
    prompt_ns: CPU nanoseconds in the manager for all prompts: opening, planning, completing, closing.
    decode_ns: the same for all decode steps.
    """

    reused: list[int] = attrs.field(factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    cut_tokens: int = 0
    refused: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    peak_running: int = 0
    prompt_ns: int = 0
    decode_ns: int = 0
    stats: ManagerStats | None = None

    @property
    def served(self) -> int:
        """Requests that ran to their end."""
        return len(self.reused) - self.refused

    @property
    def hit_rate(self) -> float:
        """Reused share of all prompt tokens of served requests."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def prompt_us(self) -> float:
        """Host microseconds per request."""
        return self.prompt_ns / max(1, self.served) / 1e3

    @property
    def decode_step_us(self) -> float:
        """Host microseconds per decode step of the whole batch."""
        return self.decode_ns / max(1, self.decode_steps) / 1e3

    @property
    def decode_token_us(self) -> float:
        """Host microseconds per generated token."""
        return self.decode_ns / max(1, self.output_tokens) / 1e3


@attrs.define(eq=False)
class _Job:
    """One request on its way. ``done`` output tokens are generated of ``output_length``."""

    request: TraceRequest
    output_length: int
    pages: list[int]
    done: int = 0
    sequence: Sequence | None = None
    ends_at: int = 0
    timer: RequestTimer | None = None


class Engine:
    """Replays one trace on one manager, once.

    concurrency: requests that run at the same time, at most.
    chunk_tokens: prompt tokens per step; ``None`` computes a prompt in one step.
    on_progress: called with the number of finished requests whenever it grows.
    record: makes the recorder of the run; it is given a clock that counts the manager's steps. A request is in the
        queue from the moment when only memory keeps it from running.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        concurrency: int = 16,
        chunk_tokens: int | None = None,
        on_progress: Callable[[int], None] | None = None,
        record: Callable[[Callable[[], float]], Iterations] | None = None,
    ) -> None:
        self._manager = manager
        self._layout = manager.layout
        self._concurrency = concurrency
        self._chunk_tokens = chunk_tokens
        self._on_progress = on_progress
        self._batch = manager.decode_batch()
        self._running: list[_Job] = []
        self._waiting: deque[_Job] = deque()
        self._reserved = [0] * len(self._layout.groups)
        #: The first waiting request did not fit, and nothing has left since.
        self._blocked = False
        self._result = ReplayResult()
        self._steps = 0
        self._iterations = None if record is None else record(lambda: self._steps)

    def run(self, requests: Iterable[TraceRequest]) -> ReplayResult:
        """Raises CapacityError when a request can never fit."""
        for request in requests:
            self._result.reused.append(-1)
            self._take(request)
        finished = self._result.refused
        while self._waiting or self._running:
            self._admit()
            # Requests without output leave before the step, the others after their last one.
            finished += self._finish()
            if self._running:
                self._decode()
            finished += self._finish()
            if self._on_progress is not None:
                self._on_progress(finished)
        self._result.stats = self._manager.stats()
        if self._iterations is not None:
            self._iterations.close()
        return self._result

    def _take(self, request: TraceRequest) -> None:
        limit = self._layout.spec.max_tokens
        output_length = request.output_length
        if limit is not None:
            if request.input_length > limit:
                self._result.refused += 1
                return
            output_length = min(output_length, limit - request.input_length)
            self._result.cut_tokens += request.output_length - output_length
        job = _Job(request, output_length, self._pages(request.input_length + output_length))
        if not self._fits(job.pages):
            raise self._never_fits(job)
        self._waiting.append(job)

    def _pages(self, length: int) -> list[int]:
        """Pages per group that a request of ``length`` tokens holds at its end."""
        block = self._layout.block_tokens
        return [sum(end - begin for begin, end in g.retention.live(length, block)) for g in self._layout.groups]

    def _fits(self, pages: list[int]) -> bool:
        """Would everything running and ``pages`` fit at their ends?"""
        layout = self._layout
        slabs = 0
        for group, reserved, wanted in zip(layout.groups, self._reserved, pages, strict=True):
            slabs += ceil_div(reserved + wanted, layout.slab_bytes // group.page_bytes)
        return slabs <= layout.slab_count - 1

    def _reserve(self, job: _Job, sign: int) -> None:
        self._reserved = [have + sign * pages for have, pages in zip(self._reserved, job.pages, strict=True)]

    def _never_fits(self, job: _Job, why: str = "") -> CapacityError:
        request = job.request
        layout = self._layout
        wanted = sum(pages * group.page_bytes for pages, group in zip(job.pages, layout.groups, strict=True))
        reason = why or f"they need {wanted} bytes, the cache has {(layout.slab_count - 1) * layout.slab_bytes}"
        return CapacityError(
            f"request {request.number} of the trace never fits: {request.input_length} prompt tokens and "
            f"{job.output_length} output tokens; {reason}",
            hint="give the cache more memory, or leave the request out of the trace",
        )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._concurrency:
            job = self._waiting[0]
            if self._iterations is not None and job.timer is None:
                job.timer = self._iterations.request(str(job.request.number))
            self._blocked = self._blocked or not self._fits(job.pages) or not self._start(job)
            if self._blocked:
                return
            self._waiting.popleft()
            self._running.append(job)
            self._result.peak_running = max(self._result.peak_running, len(self._running))

    def _start(self, job: _Job) -> bool:
        """Compute the prompt, and what was generated before a preemption. False when there is no room now."""
        manager, result, request = self._manager, self._result, job.request
        tokens = request.prompt()
        if job.done:
            tokens = np.concatenate([tokens, request.output()[: job.done]])
        begin = _now()
        sequence = manager.open(tokens, _SCOPE)
        while sequence.computed < len(tokens):
            count = min(len(tokens) - sequence.computed, self._chunk_tokens or len(tokens))
            end = sequence.next_end(sequence.computed + count)
            plan = manager.plan([Run(sequence, end - sequence.computed)])
            if not plan.fits:
                manager.close(sequence)
                result.prompt_ns += _now() - begin
                if not self._running:
                    raise self._never_fits(job, "; ".join(map(str, plan.shortages)))
                if job.timer is not None:
                    job.timer.enter("queue")
                return False
            if job.timer is not None:
                job.timer.enter("prefill")
            step = plan.commit()
            manager.complete(step)
            begin += self._note(step)
        if job.timer is not None:
            job.timer.enter("decode")
        self._batch.join(sequence)
        result.prompt_ns += _now() - begin
        job.sequence = sequence
        job.ends_at = result.decode_steps + job.output_length - job.done
        self._reserve(job, 1)
        if result.reused[request.number] < 0:
            result.reused[request.number] = sequence.reused
            result.prompt_tokens += len(tokens)
            result.reused_tokens += sequence.reused
        else:
            result.recomputed_tokens += len(tokens) - sequence.reused
        return True

    def _decode(self) -> None:
        """One token for every running request."""
        result = self._result
        begin = _now()
        plan = self._manager.plan((), decode=self._batch)
        while not plan.fits:
            if len(self._running) == 1:
                raise self._never_fits(self._running[0], "; ".join(map(str, plan.shortages)))
            self._preempt()
            plan = self._manager.plan((), decode=self._batch)
        step = plan.commit()
        self._manager.complete(step)
        result.decode_ns += _now() - begin
        self._note(step)
        result.decode_steps += 1
        result.output_tokens += len(self._running)

    def _note(self, step: Step) -> int:
        """Record a step. Returns the nanoseconds that this took."""
        self._steps += 1
        if self._iterations is None:
            return 0
        begin = _now()
        self._iterations.step(step, running=len(self._running), waiting=len(self._waiting))
        return _now() - begin

    def _preempt(self) -> None:
        """Take the youngest request out; it starts again when there is room."""
        job = self._running.pop()
        job.done = job.output_length - (job.ends_at - self._result.decode_steps)
        self._leave(job, self._generated(job, job.done))
        if job.timer is not None:
            job.timer.enter("queue")
        self._waiting.appendleft(job)
        self._result.preemptions += 1

    def _finish(self) -> int:
        steps = self._result.decode_steps
        ended = [job for job in self._running if job.ends_at <= steps]
        if not ended:
            return 0
        self._running = [job for job in self._running if job.ends_at > steps]
        for job in ended:
            generated = self._generated(job, job.output_length)
            begin = _now()
            self._leave(job, generated)
            self._result.prompt_ns += _now() - begin
            if job.timer is not None:
                job.timer.finish(
                    "length",
                    prompt_tokens=job.request.input_length,
                    reused_tokens=self._result.reused[job.request.number],
                    generated_tokens=job.output_length,
                )
        return len(ended)

    def _generated(self, job: _Job, done: int) -> IntArray:
        """The output tokens below ``done`` that the manager has not been told."""
        assert job.sequence is not None
        return job.request.output()[job.sequence.known - job.request.input_length : done]

    def _leave(self, job: _Job, generated: IntArray) -> None:
        sequence = job.sequence
        assert sequence is not None
        self._batch.leave(sequence)
        sequence.extend(generated)
        self._manager.close(sequence)
        self._reserve(job, -1)
        self._blocked = False
        job.sequence = None
