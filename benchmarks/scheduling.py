"""The scheduler alone: requests against memories that are too small for them, with and without a host tier.

No model: the real scheduler and the real manager, a clock, 5 ms for each step and 20 us for each of its tokens. Copies
between tiers cost nothing. The requests are those of the chat trace or synthetic conversations, and come when the trace
says so. Their need is what all their tokens take; the memory is a tenth, a third or all of it, the host tier as large
again. Everything is deterministic: neighbours on the machine do not matter.

`sched.recomputed_over_best`: prompt tokens computed more than once, over those of the best order found offline, for the
worst memory without a host tier. The offline orders know all requests, and may rank those that have come as they like:
by prefix, by conversation, and a local search from the better one. `sched.max_wait_over_mean`: the longest time from
submission to the first step over the mean, for the worst memory. `sched.reserving_over_watermark`: time until all
requests of a second load have ended, which declare eight times the output that they have, with `ReserveToEnd` over that
with `Watermark`, for a memory of a third of what 128 of them need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import harness
import numpy as np
import numpy.typing as npt
import synthetic
from records import Figure

from kvist.manager import PagedCacheManager, Tiers
from kvist.memory.copier import ManualCopier
from kvist.memory.mover import Copy
from kvist.replay.sizes import layout_of_blocks
from kvist.replay.traces import TraceRequest
from kvist.scheduling import AdmissionPolicy, Job, ReserveToEnd, Scheduler, State, Watermark
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream

FIGURES = ("sched.recomputed_over_best", "sched.max_wait_over_mean", "sched.reserving_over_watermark")

_BLOCK = 16
_STEP_S, _TOKEN_S = 0.005, 20e-6
_PARTS = (10, 3, 1)

Ranks = npt.NDArray[np.float64]


@attrs.frozen(eq=False)
class Asked:
    """One request: when it comes, its prompt, what it will generate, and the most that it says it will."""

    arrival_s: float
    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    limit: int


@attrs.define(eq=False, kw_only=True)
class Simulated(Job):
    """joined_step: the decode steps there were when it began to decode."""

    output: npt.NDArray[np.int32]
    joined_step: int = 0


class NoBytes:
    """Moves nothing, at once."""

    def mark(self) -> None:
        return None

    def move(self, copy: Copy, mark: object) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass


class Simulation:
    """One run of a load. ``jobs`` are in the order of the load."""

    def __init__(
        self,
        load: Sequence[Asked],
        blocks: int,
        *,
        host: bool = False,
        admission: AdmissionPolicy | None = None,
        ranks: Ranks | None = None,
        rows: int = 64,
    ) -> None:
        row = Stream("kv", RowFormat((1,), "int8"), History())
        layout = layout_of_blocks(CacheSpec((Layer(0, (row,)),), _BLOCK, "bench"), blocks)
        self.copier = ManualCopier(NoBytes()) if host else None
        tiers: dict[str, Any] = {} if self.copier is None else {"tiers": Tiers(self.copier, layout)}
        self.now_s = 0.0
        self.decode_steps = 0
        self.jobs: list[Simulated] = []
        self.scheduler: Scheduler[Simulated] = Scheduler(
            PagedCacheManager(layout, **tiers),
            max_batch_tokens=2048,
            max_sequences=rows,
            generated=self.generated,
            admission=admission,
            clock=lambda: self.now_s,
        )
        self._ends: dict[int, list[Simulated]] = {}
        self._run(load, ranks)

    def generated(self, job: Simulated) -> npt.NDArray[np.int32]:
        count = len(job.tokens) - len(job.prompt)
        if job.state is State.DECODE:
            count += 1 + self.decode_steps - job.joined_step
        return job.output[:count]

    @property
    def computed_tokens(self) -> int:
        """Of prompts, and of outputs a second time."""
        return sum(job.computed_tokens for job in self.jobs)

    @property
    def waits_s(self) -> npt.NDArray[np.float64]:
        return np.array([job.admitted_s - job.arrival_s for job in self.jobs])

    def _run(self, load: Sequence[Asked], ranks: Ranks | None) -> None:
        scheduler = self.scheduler
        while len(self.jobs) < len(load) or not scheduler.idle:
            while len(self.jobs) < len(load) and load[len(self.jobs)].arrival_s <= self.now_s:
                self._submit(load[len(self.jobs)], None if ranks is None else float(ranks[len(self.jobs)]))
            turn = scheduler.turn()
            if scheduler.take_refused():
                raise AssertionError("a request was refused")
            if turn is None:
                self.now_s += 0.001
                if scheduler.idle and len(self.jobs) < len(load):
                    self.now_s = max(self.now_s, load[len(self.jobs)].arrival_s)
            else:
                self.now_s += _STEP_S + _TOKEN_S * turn.step.token_count
                ready = scheduler.complete(turn)
                self.decode_steps += turn.decode_rows > 0
                for job in ready:
                    job.joined_step = self.decode_steps
                    left = len(job.output) - len(self.generated(job))
                    self._ends.setdefault(self.decode_steps + left, []).append(job)
                for job in self._ends.pop(self.decode_steps, ()):
                    # Unless it was preempted meanwhile.
                    if job.state is State.DECODE and len(self.generated(job)) == len(job.output):
                        scheduler.finish(job)
            if self.copier is not None:
                self.copier.run()
        if any(job.state is not State.DONE or job.error for job in self.jobs):
            raise AssertionError("a request has not finished")

    def _submit(self, asked: Asked, rank: float | None) -> None:
        job = Simulated(prompt=asked.prompt, max_new_tokens=asked.limit, output=asked.output)
        now = self.now_s
        if rank is not None:
            # The order is that of submission: pretend that it was then.
            self.now_s = rank
        self.scheduler.submit(job)
        self.now_s = job.arrival_s = now
        self.jobs.append(job)


def of_trace(requests: Sequence[TraceRequest]) -> list[Asked]:
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    made = []
    for request in ordered:
        prompt, output = request.prompt(), request.output()
        prompt.flags.writeable = False
        # Something is generated by every request.
        output = output if len(output) else np.zeros(1, np.int32)
        made.append(Asked(request.arrival_s - ordered[0].arrival_s, prompt, output, len(output)))
    return made


def of_limits(count: int) -> list[Asked]:
    """Prompts of 300 to 1,100 tokens that share nothing, outputs of 240 on average, all said to be up to 2,048 long;
    60 a second, more than can be served."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1 / 60, count))
    made = []
    for arrival in arrivals.tolist():
        length = int(np.clip(rng.lognormal(5.2, 0.9), 8, 2000))
        prompt = rng.integers(0, 30_000, int(rng.integers(300, 1101))).astype(np.int32)
        prompt.flags.writeable = False
        made.append(Asked(arrival, prompt, np.arange(length, dtype=np.int32), 2048))
    return made


def best_offline(load: Sequence[Asked], blocks: int, tries: int) -> int:
    """Computed prompt tokens of the best order that was found."""
    by_prefix = np.empty(len(load))
    by_prefix[sorted(range(len(load)), key=lambda number: load[number].prompt[: 64 * 512].tolist())] = np.arange(
        len(load)
    )
    first: dict[bytes, float] = {}
    # What a prompt has behind the system prompt, a conversation keeps.
    by_conversation = np.array([first.setdefault(a.prompt[512:1024].tobytes(), a.arrival_s) for a in load])
    arrivals = np.array([asked.arrival_s for asked in load])
    found = [
        (Simulation(load, blocks, ranks=ranks).computed_tokens, ranks)
        for ranks in (arrivals, by_prefix, by_conversation)
    ]
    best, ranks = min(found, key=lambda pair: pair[0])
    rng = np.random.default_rng(0)
    spread = float(np.std(ranks)) / 20
    for _ in range(tries):
        changed = ranks + np.where(rng.random(len(load)) < 0.1, rng.normal(0, spread, len(load)), 0)
        computed = Simulation(load, blocks, ranks=changed).computed_tokens
        if computed < best:
            best, ranks = computed, changed
    return best


def measure(options: argparse.Namespace) -> list[Figure]:
    count = 150 if options.quick else 1000
    traced = synthetic.trace_requests(options.traces, "conversation_trace.jsonl", count)
    load = of_trace(traced or synthetic.conversations(count))
    source = "chat trace" if traced else "synthetic conversations"
    unlimited = Simulation(load, 2 * sum(len(a.prompt) + len(a.output) for a in load) // _BLOCK).computed_tokens
    need = (unlimited + sum(len(asked.output) for asked in load)) // _BLOCK + 1
    over_best, over_mean, notes = 1.0, 0.0, []
    for part in _PARTS:
        for host in (False, True):
            run = Simulation(load, need // part, host=host)
            waits, stats = run.waits_s, run.scheduler.stats
            over_mean = max(over_mean, float(waits.max() / waits.mean()))
            again = run.computed_tokens - unlimited
            memory = f"1/{part} with host" if host else f"1/{part}"
            text = (
                f"{memory}: {again:,} of {unlimited:,} tokens computed again, {stats.pauses} paused, "
                f"{stats.suspensions} suspended, waited {waits.mean():.1f} s, at most {waits.max():.1f} s"
            )
            if not host and again:
                best = best_offline(load, need // part, 1 if options.quick else 12) - unlimited
                over_best = max(over_best, again / best) if best > 0 else float("inf")
                text += f"; best order {best:,}"
            harness.progress(text)
            notes.append(text)
    at_once = [attrs.evolve(asked, arrival_s=0.0) for asked in load]
    together = Simulation(at_once, need // 10).computed_tokens
    notes.append(f"all at once, 1/10: {together / unlimited:.2f} of what an order by prefix computes")
    limits = of_limits(150 if options.quick else 600)
    blocks = 128 * 1000 // _BLOCK // 3
    reserving, optimistic = (Simulation(limits, blocks, admission=a, rows=128) for a in (ReserveToEnd(), Watermark()))
    return [
        Figure(
            figure="sched.recomputed_over_best",
            value=over_best,
            unit="x",
            at_most=1.1,
            note=f"{len(load)} requests, {source}; " + "; ".join(notes),
        ),
        Figure(figure="sched.max_wait_over_mean", value=over_mean, unit="x"),
        Figure(
            figure="sched.reserving_over_watermark",
            value=reserving.now_s / optimistic.now_s,
            unit="x",
            note=f"{reserving.now_s:.0f} s and {optimistic.now_s:.0f} s; with Watermark "
            f"{optimistic.scheduler.stats.recomputed_tokens} tokens were computed again",
        ),
    ]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
