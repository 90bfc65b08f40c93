"""``kvist demo --disaggregated``: the demo's turns through two processes, and through one, for comparison."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvist_transformers import models
from kvist_transformers.disaggregation.pair import Answered, Pair
from kvist_transformers.disaggregation.worker import Settings
from kvist_transformers.engine import Engine
from kvist_transformers.peers import quiet
from kvist_transformers.request import Request
from kvist_transformers.workload import Prompts, Turn

#: Told what just ran.
Progress = Callable[[str], None]


@attrs.frozen
class Plan:
    """What to run. transport: its scheme. threads: of each of the two processes, half of the processors by default."""

    waves: Sequence[Sequence[Turn]]
    transport: str
    max_new_tokens: int
    dtype: str = "float32"
    memory: str = "512MiB"
    threads: int | None = None


@attrs.frozen
class Wave:
    """The same requests, answered by two processes and by one."""

    prompts: dict[str, list[int]]
    two: dict[str, Answered]
    one: dict[str, list[int]]
    two_s: float
    one_s: float

    @property
    def identical(self) -> int:
        """Requests with the same tokens both times."""
        return sum(self.two[name].tokens == tokens for name, tokens in self.one.items())


def run(folder: Path, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Everything; returns the record to show and write. Raises WorkerError and what an engine raises."""
    threads = plan.threads or max(1, (os.cpu_count() or 1) // 2)
    prompts = Prompts.build(models.load_tokenizer(folder))
    common = {"folder": folder, "scheme": plan.transport, "dtype": plan.dtype, "memory": plan.memory}
    ends = [Settings(name=name, threads=threads, **common) for name in ("prefill", "decode")]
    asked: list[dict[str, Request]] = []
    two: list[tuple[dict[str, Answered], float]] = []
    history: dict[str, tuple[list[int], list[int]]] = {}
    with Pair(*ends) as pair:
        for number, wave in enumerate(plan.waves):
            requests = {turn.name: _request(prompts, prompts.prompt(turn, history), plan) for turn in wave}
            begin = time.perf_counter()
            answered = pair.answer(requests)
            two.append((answered, time.perf_counter() - begin))
            asked.append(requests)
            history |= {name: (requests[name].tokens.tolist(), each.tokens) for name, each in answered.items()}
            progress(f"two processes, wave {number + 1}")
        leaks = pair.stop()
    one = _one_process(folder, asked, plan, progress)
    waves = []
    for requests, (moved, two_s), (alone, one_s) in zip(asked, two, one, strict=True):
        tokens = {name: each.tokens.tolist() for name, each in requests.items()}
        waves.append(Wave(tokens, moved, alone, two_s, one_s))
    return record(waves, plan, threads, leaks)


def _request(prompts: Prompts, tokens: list[int], plan: Plan) -> Request:
    return Request(tokens, max_new_tokens=plan.max_new_tokens, stop_token_ids=frozenset({prompts.stop_token_id}))


def _one_process(
    folder: Path, asked: Sequence[Mapping[str, Request]], plan: Plan, progress: Progress
) -> list[tuple[dict[str, list[int]], float]]:
    """The same requests in one engine in this process."""
    with quiet():
        model = models.load_model(folder, plan.dtype)
    found = []
    with Engine(model, memory=plan.memory) as engine:
        for number, requests in enumerate(asked):
            begin = time.perf_counter()
            completions = engine.generate(requests.values())
            seconds = time.perf_counter() - begin
            for completion in completions:
                if completion.error is not None:
                    raise completion.error
            tokens = {name: each.tokens.tolist() for name, each in zip(requests, completions, strict=True)}
            found.append((tokens, seconds))
            progress(f"one process, wave {number + 1}")
    return found


def record(waves: Sequence[Wave], plan: Plan, threads: int, leaks: Mapping[str, str]) -> dict[str, Any]:
    """All figures of a run, as plain data."""
    rows = [_row(wave) for wave in waves]
    identical = sum(wave.identical for wave in waves)
    return {
        "transport": plan.transport,
        "dtype": plan.dtype,
        "threads": threads,
        "waves": rows,
        "requests": sum(row["requests"] for row in rows),
        "identical_requests": identical,
        "identical": identical == sum(row["requests"] for row in rows),
        "leaks": {name: what for name, what in leaks.items() if what},
    }


def _row(wave: Wave) -> dict[str, Any]:
    arrivals = [each.arrival for each in wave.two.values() if each.arrival is not None]
    moved = [arrival for arrival in arrivals if arrival.byte_count]
    byte_count, seconds = sum(each.byte_count for each in moved), sum(each.seconds for each in moved)
    tokens, reused = sum(each.tokens for each in arrivals), sum(each.reused for each in arrivals)
    return {
        "requests": len(wave.two),
        "identical": wave.identical,
        "prompt_tokens": sum(len(prompt) for prompt in wave.prompts.values()),
        "prefill_reused_tokens": sum(each.prefill_reused for each in wave.two.values()),
        "moved_requests": len(arrivals),
        "failed_transfers": sum(not each.outcome.ok for each in arrivals),
        "skipped_tokens": reused,
        "skipped_share": reused / tokens if tokens else 0.0,
        "moved_bytes": byte_count,
        "transfer_ms": 1e3 * statistics.median(each.seconds for each in moved) if moved else 0.0,
        "gb_per_s": byte_count / seconds / 1e9 if seconds else 0.0,
        "first_token_ms": 1e3 * statistics.median(each.first_token_s for each in wave.two.values()),
        "two_seconds": wave.two_s,
        "one_seconds": wave.one_s,
    }


#: Rows of the table: what is shown, from which of a wave's numbers, and how.
_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("requests", lambda row: str(row["requests"])),
    ("prompt tokens", lambda row: str(row["prompt_tokens"])),
    ("  cached at the prefill side", lambda row: str(row["prefill_reused_tokens"])),
    ("  cached at the decode side, not sent", lambda row: f"{row['skipped_tokens']} ({row['skipped_share']:.0%})"),
    ("MB sent", lambda row: f"{row['moved_bytes'] / 1e6:.1f}"),
    ("ms per transfer", lambda row: f"{row['transfer_ms']:.1f}"),
    ("GB/s in a transfer", lambda row: f"{row['gb_per_s']:.2f}"),
    ("ms to the first token", lambda row: f"{row['first_token_ms']:.0f}"),
    ("seconds, two processes", lambda row: f"{row['two_seconds']:.1f}"),
    ("seconds, one process", lambda row: f"{row['one_seconds']:.1f}"),
    ("same tokens as in one process", lambda row: f"{row['identical']} of {row['requests']}"),
)


def table(found: Mapping[str, Any]) -> Table:
    """A column for each wave of turns."""
    title = f"Prompts computed in one process, answers in another, over {found['transport']}"
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    grid.add_column(no_wrap=True)
    for number in range(1, len(found["waves"]) + 1):
        grid.add_column(f"turn {number}", justify="right", no_wrap=True)
    for label, shown in _ROWS:
        grid.add_row(label, *(shown(row) for row in found["waves"]))
    return grid


def findings(found: Mapping[str, Any]) -> list[str]:
    """The outcome in words."""
    count, same = found["requests"], found["identical_requests"]
    if found["identical"]:
        verdict = f"identical to those of one process, for all {count} requests"
    else:
        verdict = f"[red]DIFFERENT[/red] from those of one process, for {count - same} of {count} requests"
    lines = [f"Greedy {found['dtype']} tokens are {verdict}."]
    lines += [f"[red]Left in the {name} process: {what}.[/red]" for name, what in found["leaks"].items()]
    lines.append(
        f"{found['threads']} thread(s) in each of the two processes. Transfers of a wave share the processors."
    )
    return lines
