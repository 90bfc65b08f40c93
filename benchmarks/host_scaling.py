"""How the host cost of cache management grows: with the length of a prompt, and with the number of running requests.

The loop and the peer are those of host_cost.py, with one group of full attention, blocks of 16 tokens and a pool of
four million tokens, so that nothing is evicted. A cold prompt shares nothing with earlier ones; a cached one was there
before as a whole. A prompt's cost is its whole path: request, hashes, lookup, pages, publishing, freeing. A step
gives one token to every running request; requests cross into new blocks at different steps. The curves are written to
an SVG file (--chart) and beside it as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import chart
import harness
import managers
import numpy as np
import records
from chart import Line, Panel
from engine_loop import Slice
from managers import BLOCK_TOKENS, Contest, Workload
from records import Figure, paired, without_peer

FIGURES = (
    "host.scaling.cold_prompt_1m",
    "host.scaling.cached_prompt_1m",
    "host.scaling.step_1024_running",
)

LENGTHS = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
RUNNING = (1, 4, 16, 64, 256, 1024)
STEPS = 8 * BLOCK_TOKENS
POOL = "4Mtok"
VOCAB_SIZE = 128_256
CHART = Path(__file__).resolve().parent.parent / "results" / "host_scaling.svg"

#: Per x, one value per run.
Curve = dict[int, list[float]]


def prompts(length: int) -> tuple[Slice, int]:
    """Prompts of one length, each twice, and how many different ones there are."""
    count = 20 if length <= 16_000 else 6 if length <= 64_000 else 3
    rng = np.random.default_rng(length)
    fresh = [rng.integers(0, VOCAB_SIZE, length, np.int32) for _ in range(count)]
    outputs = [np.array([number], np.int32) for number in range(2 * count)]
    return Slice(fresh + fresh, outputs), count


def batch(running: int) -> Slice:
    """Short prompts that all run at the same time, spread over the positions in a block."""
    rng = np.random.default_rng(running)
    lengths = [256 + number % BLOCK_TOKENS for number in range(running)]
    return Slice(
        [rng.integers(0, VOCAB_SIZE, length, np.int32) for length in lengths],
        [rng.integers(0, VOCAB_SIZE, STEPS, np.int32) for _ in lengths],
    )


def measure_curves(contest: Contest, runs: int) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Kvist's curves and the peer's: "cold" and "cached" in us per prompt, "step" in us per decode step."""
    sides: tuple[dict[str, Curve], dict[str, Curve]] = ({}, {})

    def note(name: str, x: int, side: int, values: list[float]) -> None:
        if values:
            sides[side].setdefault(name, {})[x] = values

    for length in LENGTHS:
        harness.progress(f"prompts of {length:,} tokens")
        requests, count = prompts(length)
        for side, results in enumerate(contest.runs(Workload(requests, POOL, 1), runs)):
            note("cold", length, side, [statistics.median(each["requests_us"][:count]) for each in results])
            note("cached", length, side, [statistics.median(each["requests_us"][count:]) for each in results])
    for running in RUNNING:
        harness.progress(f"{running} running")
        for side, results in enumerate(contest.runs(Workload(batch(running), POOL, running), runs)):
            note("step", running, side, [each["decode_step_us"] for each in results])
    return sides


def draw(path: Path, mine: dict[str, Curve], theirs: dict[str, Curve]) -> None:
    """The chart, and the numbers in it as JSON."""

    def medians(curve: Curve) -> list[tuple[float, float]]:
        return [(x, statistics.median(values)) for x, values in curve.items()]

    named = [("Kvist", 0, mine)] + ([("vLLM", 1, theirs)] if theirs else [])
    panels = [
        Panel(
            "One prompt",
            "tokens in the prompt",
            "microseconds per prompt",
            [
                Line(f"{name}, {kind}", medians(curves[kind]), colour, dashed=kind == "cached")
                for name, colour, curves in reversed(named)
                for kind in ("cold", "cached")
            ],
        ),
        Panel(
            "One decode step",
            "running requests",
            "microseconds per step",
            [Line(name, medians(curves["step"]), colour) for name, colour, curves in reversed(named)],
        ),
    ]
    chart.write(path, panels)
    content = {"machine": records.machine(), **{name: curves for name, _, curves in named}}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    harness.progress(f"written: {path}")


def measure(options: argparse.Namespace) -> list[Figure]:
    with Contest() as contest:
        mine, theirs = measure_curves(contest, 1 if options.quick else 3)
    draw(options.chart, mine, theirs)
    figures = []
    for figure, (name, x) in zip(FIGURES, (("cold", LENGTHS[-1]), ("cached", LENGTHS[-1]), ("step", RUNNING[-1]))):
        values, unit = mine[name][x], "us/step" if name == "step" else "us/request"
        points = ", ".join(f"{at:,}: {statistics.median(y):,.1f}" for at, y in mine[name].items())
        if theirs:
            figures.append(paired(figure, unit, values, contest.peer, theirs[name][x], note=f"us at {points}"))
        else:
            figures.append(without_peer(figure, unit, values, contest.peer, managers.NO_PEER))
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chart", type=Path, metavar="FILE", default=CHART, help="default: results/host_scaling.svg")


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure, add_options))
