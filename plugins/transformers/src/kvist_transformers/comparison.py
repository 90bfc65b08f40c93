"""Runs the workload on every engine, interleaved, and makes the record that the demo shows and writes."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers

from kvist_transformers import models
from kvist_transformers.engine import Engine
from kvist_transformers.ideal import unbounded_reuse
from kvist_transformers.peers import GenerateBatchPeer, GeneratePeer, KvistPeer, Limits, Peer, quiet, timed_answer
from kvist_transformers.workload import Prompts, Turn

KVIST, BATCH, GENERATE = "kvist", "generate_batch", "generate"
#: What runs several times in turns; older transformers have no generate_batch with settings.
INTERLEAVED = (KVIST, BATCH) if hasattr(transformers, "ContinuousBatchingConfig") else (KVIST,)

#: Told after each wave: a few words on what just ran, and how many waves are known to come in all.
Progress = Callable[[str, int], None]


@attrs.frozen
class Plan:
    """What to run.

    rounds: most interleaved runs of Kvist and ``generate_batch`` per dtype; figures are medians over them.
    budget_s: a round after the first is only begun when it should end within so many seconds from the start.
    sampled_prompts: prompts that ``generate`` answers where its tokens are not needed, for its speed alone.
    """

    waves: Sequence[Sequence[Turn]]
    dtypes: Sequence[str]
    max_new_tokens: int
    rounds: int = 3
    budget_s: float = 150
    memory: str = "512MiB"
    sampled_prompts: int = 2


@attrs.frozen
class RunRecord:
    """One engine over the whole workload. Counts that an engine does not tell are ``None``.

    answers: prompt and answer of each request, wave by wave.
    """

    engine: str
    dtype: str
    seconds: float
    answers: list[list[tuple[list[int], list[int]]]]
    reused_tokens: int | None = None
    computed_tokens: int | None = None
    peak_pages: int | None = None
    page_capacity: int | None = None
    host_us_per_step: float | None = None
    model_seconds: float | None = None
    steps: int | None = None

    @property
    def requests(self) -> int:
        """Requests answered."""
        return sum(len(wave) for wave in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts."""
        return sum(len(prompt) for wave in self.answers for prompt, _ in wave)

    @property
    def generated_tokens(self) -> int:
        """New tokens."""
        return sum(len(answer) for wave in self.answers for _, answer in wave)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of wall time, prompts included in the time."""
        return self.generated_tokens / self.seconds


def compare(folder: Any, plan: Plan, progress: Progress) -> tuple[list[RunRecord], dict[str, Any]]:
    """Run ``plan`` on the model in ``folder``. Returns every run, and the record to show and write."""
    begin = time.perf_counter()
    neighbours = _Neighbours()
    runner = _Runner(folder, plan, progress)
    with quiet():
        for dtype in plan.dtypes:
            runner.load(dtype)
            runner.warm_up()
            runner.interleaved()
            runner.generate()
        for _ in range(1, plan.rounds):
            for dtype in reversed(plan.dtypes):
                if time.perf_counter() - begin + runner.round_s(dtype) < plan.budget_s:
                    runner.load(dtype)
                    runner.interleaved()
    return runner.records, summarize(runner.records, plan) | {"others_busy_cores": neighbours.busy_cores()}


class _Neighbours:
    """How much of the machine other programs use, from now on. Linux only."""

    def __init__(self) -> None:
        self._begin = self._read()

    def busy_cores(self) -> float | None:
        """Cores that others kept busy, on average; ``None`` where the system does not tell."""
        end = self._read()
        if self._begin is None or end is None:
            return None
        (seconds, busy, own), (end_seconds, end_busy, end_own) = self._begin, end
        return max(0.0, ((end_busy - busy) - (end_own - own)) / (end_seconds - seconds))

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Time, seconds of all programs on all cores, seconds of this one."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
        except OSError:
            return None
        return time.perf_counter(), sum(map(int, fields)) / os.sysconf("SC_CLK_TCK"), time.process_time()


class _Runner:
    """Runs engines on the loaded model and keeps the records."""

    def __init__(self, folder: Any, plan: Plan, progress: Progress) -> None:
        self.records: list[RunRecord] = []
        self._folder = folder
        self._plan = plan
        self._progress = progress
        self._prompts = Prompts.build(models.load_tokenizer(folder))
        self._limits = Limits(plan.max_new_tokens, self._prompts.stop_token_id)
        self._dtype = ""
        self._model: Any = None
        self._ticks = sum(len(plan.waves) if dtype == "float32" else 1 for dtype in plan.dtypes)

    def load(self, dtype: str) -> None:
        """Use another dtype from now on."""
        if dtype != self._dtype:
            self._model = None
            self._model, self._dtype = models.load_model(self._folder, dtype), dtype

    def warm_up(self) -> None:
        """Compile and load what is compiled and loaded at first use, on each engine."""
        short = attrs.evolve(self._limits, max_new_tokens=2)
        for engine in (*INTERLEAVED, GENERATE):
            with _peer(engine, self._model, self._plan, short) as peer:
                peer.answer([[1, 2, 3, 4], [5, 6, 7]])

    def interleaved(self) -> None:
        """Kvist and its peer, one after the other."""
        self._ticks += len(INTERLEAVED) * len(self._plan.waves)
        for engine in INTERLEAVED:
            self._run(engine, self._plan.waves)

    def generate(self) -> None:
        """The reference: every request where tokens are compared, a few for the speed elsewhere."""
        first = self._plan.waves[0][: self._plan.sampled_prompts]
        self._run(GENERATE, self._plan.waves if self._dtype == "float32" else (first,))

    def round_s(self, dtype: str) -> float:
        """Seconds that one more round should take."""
        return sum(_find(self.records, engine, dtype)[-1].seconds for engine in INTERLEAVED)

    def _run(self, engine: str, waves: Sequence[Sequence[Turn]]) -> None:
        history: dict[str, tuple[list[int], list[int]]] = {}
        answers: list[list[tuple[list[int], list[int]]]] = []
        seconds = 0.0
        with _peer(engine, self._model, self._plan, self._limits) as peer:
            for number, wave in enumerate(waves):
                asked = [self._prompts.prompt(turn, history) for turn in wave]
                replies, taken = timed_answer(peer, asked)
                seconds += taken
                answers.append(list(zip(asked, replies, strict=True)))
                history |= {turn.name: pair for turn, pair in zip(wave, answers[-1], strict=True)}
                self._progress(f"{engine}, {self._dtype}, wave {number + 1}", self._ticks)
            extra = _kvist_counts(peer) if isinstance(peer, KvistPeer) else {}
        self.records.append(RunRecord(engine, self._dtype, seconds, answers, **extra))


@contextlib.contextmanager
def _peer(engine: str, model: Any, plan: Plan, limits: Limits) -> Iterator[Peer]:
    if engine == KVIST:
        with Engine(model, memory=plan.memory, max_batch_tokens=limits.max_batch_tokens) as kvist:
            yield KvistPeer(kvist, limits)
    elif engine == BATCH:
        peer = GenerateBatchPeer(model, limits)
        try:
            yield peer
        finally:
            peer.close()
    else:
        yield GeneratePeer(model, limits)


def _kvist_counts(peer: KvistPeer) -> dict[str, Any]:
    stats = peer.engine.stats
    groups = peer.engine.manager.stats().groups
    return {
        "reused_tokens": stats.reused_tokens,
        "computed_tokens": stats.computed_tokens,
        "peak_pages": sum(group.held_peak for group in groups),
        "page_capacity": sum(group.capacity for group in groups),
        "host_us_per_step": stats.host_us_per_step,
        "model_seconds": stats.model_ns / 1e9,
        "steps": stats.steps,
    }


def summarize(records: Sequence[RunRecord], plan: Plan) -> dict[str, Any]:
    """The record: headline figures first, then each engine's numbers. ``None`` where something did not run."""
    # Without the reference or without Kvist in float32 there is nothing to compare.
    reference = _find(records, GENERATE, "float32")
    float32 = _find(records, KVIST, "float32")
    identical = [run.answers == reference[0].answers for run in float32] if reference else []
    reuse = [_reuse(run) for dtype in plan.dtypes for run in _find(records, KVIST, dtype)]
    return {
        "identical": all(identical) if identical else None,
        "speedup_generate_batch": _speedup(records, "bfloat16", BATCH),
        "speedup_generate_batch_fp32": _speedup(records, "float32", BATCH),
        "speedup_generate_fp32": _speedup(records, "float32", GENERATE),
        "reuse_of_unbounded": min(reuse) if reuse else None,
        "missing": [] if BATCH in INTERLEAVED else [f"generate_batch: not in transformers {transformers.__version__}"],
        "runs": {dtype: len(_find(records, KVIST, dtype)) for dtype in plan.dtypes},
        "max_new_tokens": plan.max_new_tokens,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "engines": {
            dtype: {
                engine: _numbers(_find(records, engine, dtype))
                for engine in (KVIST, BATCH, GENERATE)
                if _find(records, engine, dtype)
            }
            for dtype in plan.dtypes
        },
    }


def _find(records: Sequence[RunRecord], engine: str, dtype: str) -> list[RunRecord]:
    return [record for record in records if record.engine == engine and record.dtype == dtype]


def _speedup(records: Sequence[RunRecord], dtype: str, peer: str) -> float | None:
    """Median over the runs of Kvist's tokens per second over the peer's in the same turn."""
    ours, theirs = _find(records, KVIST, dtype), _find(records, peer, dtype)
    if not ours or not theirs:
        return None
    # A peer that ran once is set against each of our runs.
    theirs = theirs if len(theirs) == len(ours) else theirs * len(ours)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True))


def _reuse(run: RunRecord) -> float:
    possible = sum(unbounded_reuse(run.answers))
    return (run.reused_tokens or 0) / possible if possible else 1.0


def _numbers(runs: Sequence[RunRecord]) -> dict[str, Any]:
    middle = sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]
    names: tuple[str, ...] = ("requests", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens")
    names += ("peak_pages", "page_capacity", "steps", "model_seconds", "host_us_per_step")
    return {
        **{name: getattr(middle, name) for name in names},
        "seconds": [run.seconds for run in runs],
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
    }
