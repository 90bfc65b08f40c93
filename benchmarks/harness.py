"""What every measuring script has in common: its options, its table, its JSON file.

A script declares ``FIGURES``, a tuple of the ids it measures, and calls ``run``. ``run_all.py`` finds it by that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import records
from records import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

_HEADINGS = ("figure", "value", "peer", "peer's", "ratio", "target", "runs")


def run(
    script: str,
    about: str | None,
    declared: Sequence[str],
    measure: Callable[[argparse.Namespace], list[Figure]],
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    parts: Sequence[str] = (),
) -> int:
    """The main function of a script. Returns the exit code: 0 also when a target is missed, for that is a result.

    parts: what ``--only`` may name; ``measure`` finds the ones asked for in ``options.only``.
    """
    parser = argparse.ArgumentParser(description=(about or "").strip().splitlines()[0])
    add_common_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one record per figure to this file")
    if parts:
        parser.add_argument("--only", action="append", choices=parts, help="measure this part only; may be repeated")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    begin = time.monotonic()
    figures = measure(options)
    measured = {figure.figure for figure in figures}
    wrong = sorted(measured - set(declared) if parts and options.only else measured ^ set(declared))
    if wrong:
        raise AssertionError(f"{script} declares other figures than it measures: {', '.join(wrong)}")
    console = Console()
    console.print(table(figures, f"{Path(script).name}, {time.monotonic() - begin:.0f} s"))
    for figure in figures:
        if figure.note:
            console.print(Text(f"{figure.figure}: {figure.note}", style="yellow"))
    if options.json is not None:
        records.write(options.json, Path(script).name, options.quick, figures)
    return 0


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Options that every script takes, so that run_all.py can pass them on."""
    parser.add_argument("--quick", action="store_true", help="fewer runs, under a minute; for a look, not for a record")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        default=Path(os.environ["KVIST_TRACES"]) if os.environ.get("KVIST_TRACES") else None,
        help="folder with request traces such as conversation_trace.jsonl; default: the variable KVIST_TRACES",
    )


def table(figures: Sequence[Figure], title: str) -> Table:
    """For a person at a terminal."""
    peers = sorted({figure.peer for figure in figures if figure.peer})
    made = Table(title=title, caption=f"peer: {', '.join(peers)}" if peers else None, caption_justify="left")
    for heading in _HEADINGS:
        if heading != "peer":
            made.add_column(heading, justify="left" if heading == "figure" else "right", no_wrap=heading != "figure")
    for figure in figures:
        texts = [text for heading, text in zip(_HEADINGS, cells(figure)) if heading != "peer"]
        made.add_row(*texts, style="red" if figure.met is False else "")
    return made


def cells(figure: Figure) -> tuple[str, ...]:
    """The texts of one row, in the order of the headings."""
    return (
        figure.figure,
        shown(figure.value, figure.unit),
        figure.peer or "",
        shown(figure.peer_value, figure.unit) if figure.peer is not None else "",
        "" if figure.ratio is None else f"{figure.ratio:.2f}x",
        aimed(figure),
        str(figure.runs),
    )


def aimed(figure: Figure) -> str:
    """The target of a figure."""
    if figure.at_most is not None:
        return f"<= {figure.at_most:g}"
    return "" if figure.target is None else f"{figure.target:g}{'x' if figure.peer else ''}"


def shown(value: float | None, unit: str) -> str:
    """A value with three or more significant digits and its unit."""
    if value is None:
        return "missing"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f} {unit}".strip()


def progress(text: str) -> None:
    """Say on the terminal what is going on."""
    print(text, file=sys.stderr, flush=True)
