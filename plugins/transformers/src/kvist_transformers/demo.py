"""``kvist demo``: a real language model answers multi-turn requests on Kvist, beside transformers' own engines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvist.errors import KvistError
from kvist.registry import default_registry
from kvist_transformers.workload import WAVES

if TYPE_CHECKING:
    from kvist_transformers.comparison import RunRecord

_NAMES = {"kvist": "Kvist\n", "generate_batch": "generate\n_batch", "generate": "generate\n"}
_DTYPES = ("float32", "bfloat16")
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests, one run: under a minute.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or both.")] = "both",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads, by default torch's.")] = None,
    disaggregated: Annotated[
        bool,
        typer.Option("--disaggregated", help="Compute prompts in one process and answers in another instead."),
    ] = False,
    transport: Annotated[
        str, typer.Option("--transport", help="How caches travel between the two: shm, tcp or ucx.")
    ] = "shm",
) -> None:
    """Answer multi-turn requests with real weights on Kvist, beside transformers' own engines."""
    if disaggregated:
        return _two_processes(json_file, quick, dtype, threads, transport)
    if dtype not in (*_DTYPES, "both"):
        raise typer.BadParameter(f"{dtype!r} is not one of float32, bfloat16, both", param_hint="--dtype")
    console = Console()
    try:
        record, runs, folder = _measure(console, quick, _DTYPES if dtype == "both" else (dtype,), threads)
    except KvistError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error
    _show_conversation(console, runs, folder)
    console.print(table(record))
    for line in findings(record):
        console.print(line, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if record["identical"] is False:
        raise typer.Exit(1)


def _two_processes(json_file: Path | None, quick: bool, dtype: str, threads: int | None, transport: str) -> None:
    if dtype not in (*_DTYPES, "both"):
        raise typer.BadParameter(f"{dtype!r} is not one of float32, bfloat16, both", param_hint="--dtype")
    console = Console()
    try:
        # Before anything that takes time.
        default_registry().transceiver(transport)
        with console.status("loading torch and transformers") as status:
            from kvist_transformers import models
            from kvist_transformers.disaggregation import demo as disaggregated
            from kvist_transformers.peers import quiet

            with quiet():
                folder = models.prepare(status.update)
            waves = tuple(wave[:3] for wave in WAVES[:2]) if quick else WAVES
            plan = disaggregated.Plan(
                waves,
                transport,
                max_new_tokens=16 if quick else 28,
                dtype="float32" if dtype == "both" else dtype,
                threads=threads,
            )
            status.update("starting two processes")
            record = disaggregated.run(folder, plan, status.update)
    except KvistError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error
    console.print(disaggregated.table(record))
    for line in disaggregated.findings(record):
        console.print(line, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if not record["identical"] or record["leaks"]:
        raise typer.Exit(1)


def _measure(
    console: Console, quick: bool, dtypes: tuple[str, ...], threads: int | None
) -> tuple[dict[str, Any], list[RunRecord], Path]:
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for each other spin for milliseconds by default; beside one busy neighbour that makes every
        # engine many times slower. With this bound an idle machine is as fast as before. Read when torch is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    with console.status("loading torch and transformers") as status:
        import torch

        from kvist_transformers import models
        from kvist_transformers.comparison import Plan, compare
        from kvist_transformers.peers import quiet

        if threads is not None:
            torch.set_num_threads(threads)
        with quiet():
            folder = models.prepare(status.update)
    waves = tuple(wave[:3] for wave in WAVES[:2]) if quick else WAVES
    plan = Plan(waves, dtypes, max_new_tokens=16, rounds=1) if quick else Plan(waves, dtypes, max_new_tokens=28)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn())
    # Off a terminal the bar would be printed line by line.
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("loading the model", total=None)
        runs, record = compare(
            folder, plan, lambda what, total: bar.update(task, advance=1, total=total, description=what)
        )
    return record, runs, folder


def _show_conversation(console: Console, runs: list[RunRecord], folder: Path) -> None:
    """The first request's question and answer, and one that follows it."""
    from kvist_transformers.models import load_tokenizer

    tokenizer = load_tokenizer(folder)
    answers = runs[0].answers
    for turns, pairs in zip(WAVES, answers, strict=False):
        text = tokenizer.decode(pairs[0][1], skip_special_tokens=True).strip()
        console.print(f"[bold]>[/bold] {turns[0].text}\n[dim]  {text} ...[/dim]", highlight=False)
    console.print()


#: Rows of the table: what is shown, from which of an engine's numbers, and how.
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("requests", "requests", "d"),
    ("prompt tokens", "prompt_tokens", "d"),
    ("  reused", "reused_tokens", "d"),
    ("computed", "computed_tokens", "d"),
    ("generated", "generated_tokens", "d"),
    ("tokens/s", "tokens_per_s", ".1f"),
    ("peak pages", "peak_pages", "d"),
    ("host us/step", "host_us_per_step", ".0f"),
)


def table(record: dict[str, Any]) -> Table:
    """Every engine's numbers side by side, a column each."""
    grid = Table(title="The same turns, in the same order, on each engine", title_justify="left", box=SIMPLE_HEAD)
    grid.add_column(no_wrap=True)
    columns = [(name, dtype, numbers) for dtype, each in record["engines"].items() for name, numbers in each.items()]
    for name, dtype, _ in columns:
        grid.add_column(f"{_NAMES[name]}\n{_SHORT[dtype]}", justify="right", no_wrap=True)
    for label, key, form in _ROWS:
        grid.add_row(label, *("-" if numbers[key] is None else format(numbers[key], form) for *_, numbers in columns))
    return grid


def findings(record: dict[str, Any]) -> list[str]:
    """The headline figures in words, for those that were measured."""
    lines = []
    if record["identical"] is not None:
        verdict = "identical to" if record["identical"] else "[red]DIFFERENT from[/red]"
        lines.append(f"Greedy float32 tokens are {verdict} transformers' generate, for every request.")
    for dtype, key in (("bfloat16", "speedup_generate_batch"), ("float32", "speedup_generate_batch_fp32")):
        if record[key] is not None:
            lines.append(f"{dtype}: {record[key]:.2f} times the tokens per second of generate_batch.")
    if record["reuse_of_unbounded"] is not None:
        share = record["reuse_of_unbounded"]
        lines.append(f"Reused {share:.1%} of the prompt tokens that an unbounded cache could have reused.")
    runs = " and ".join(f"{count} {_SHORT[dtype]}" for dtype, count in record["runs"].items())
    lines += [f"Missing: {what}." for what in record["missing"]]
    lines.append(
        f"{record['threads']} thread(s), medians of {runs} interleaved runs. "
        "generate and generate_batch are transformers' own."
    )
    busy = record["others_busy_cores"]
    if busy is not None and busy >= 0.2:
        lines.append(f"[yellow]Other programs used {busy:.1f} cores meanwhile: the speeds say little.[/yellow]")
    return lines
