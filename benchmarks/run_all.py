"""Run every measuring script and write docs/reference/measurements.md: make bench

A script is measured when it declares FIGURES. What a script could not measure is in the page by name, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import subprocess
import sys
from pathlib import Path

import harness
import records
from records import Figure

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "reference" / "measurements.md"
RESULTS = HERE.parent / "results"


def scripts() -> dict[Path, tuple[str, ...]]:
    """Scripts that declare figures, with the ids. Nothing is imported for it."""
    found: dict[Path, tuple[str, ...]] = {}
    for path in sorted(HERE.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["FIGURES"]:
                found[path] = tuple(ast.literal_eval(node.value))
    owners: dict[str, Path] = {}
    for path, figures in found.items():
        for figure in figures:
            if figure in owners:
                raise SystemExit(f"error: {owners[figure].name} and {path.name} both declare {figure!r}")
            owners[figure] = path
    return found


def run(script: Path, declared: tuple[str, ...], options: argparse.Namespace) -> list[Figure]:
    """One script as a process of its own. One that fails costs its figures only."""
    result = RESULTS / f"{script.stem}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(script), "--json", str(result)]
    command += ["--quick"] if options.quick else []
    command += ["--traces", str(options.traces)] if options.traces is not None else []
    harness.progress(f"== {script.name}")
    code = subprocess.run(command).returncode
    if code or not result.exists():
        why = f"{script.name} ended with exit code {code}"
        return [Figure(figure=name, value=None, unit="", note=why) for name in declared]
    return records.read(result)


def page(measured: dict[Path, list[Figure]], options: argparse.Namespace) -> str:
    """The page in Markdown."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = "; ".join(f"{name} {value}" for name, value in records.machine().items())
    traces = " --traces FOLDER" if options.traces is not None else ""
    lines = [
        "# Measurements",
        "",
        "Made by `make bench`; do not edit. Kvist and its peers are measured in one run and take turns; values are",
        "medians, ratios the medians of the ratios run by run. A ratio says how many times better Kvist is than the",
        "peer: less time, or more bytes or tokens per second. Ratios hold on other machines, values do not.",
        "",
        f"Date: {today}{' (a quick run: fewer repetitions)' if options.quick else ''}",
        "",
        f"Machine: {facts}",
    ]
    for script, figures in measured.items():
        about = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").strip()
        lines += ["", f"## {script.stem}", "", about, ""]
        lines += [f"```\npython benchmarks/{script.name}{' --quick' if options.quick else ''}{traces}\n```", ""]
        lines += ["| figure | Kvist | peer | peer's value | ratio | target | runs |", "|---|--:|---|--:|--:|--:|--:|"]
        lines += ["| " + " | ".join((f"`{cell[0]}`", *cell[1:])) + " |" for cell in map(harness.cells, figures)]
        notes = [f"* `{figure.figure}`: {figure.note}" for figure in figures if figure.note]
        lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    harness.add_common_options(parser)
    parser.add_argument("--only", action="append", metavar="SCRIPT", help="run this script only, e.g. host_cost.py")
    parser.add_argument("--output", type=Path, help=f"the page; default: {PAGE.name}, for a quick or partial run none")
    parser.add_argument("--list", action="store_true", help="list scripts and figures as JSON and stop")
    options = parser.parse_args()
    found = scripts()
    if options.list:
        print(json.dumps({path.name: figures for path, figures in found.items()}, indent=1))
        return 0
    if options.only:
        unknown = sorted(set(options.only) - {path.name for path in found})
        if unknown:
            parser.error(f"no such script: {', '.join(unknown)}; there are {', '.join(path.name for path in found)}")
        found = {path: figures for path, figures in found.items() if path.name in options.only}
    measured = {path: run(path, figures, options) for path, figures in found.items()}
    output = options.output or (None if options.quick or options.only else PAGE)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(measured, options), encoding="utf-8")
        print(f"written: {output}")
    figures = [figure for each in measured.values() for figure in each]
    missing = [figure.figure for figure in figures if figure.value is None]
    missed = [figure.figure for figure in figures if figure.met is False]
    print(
        f"{len(figures)} figures; missing: {', '.join(missing) or 'none'}; below target: {', '.join(missed) or 'none'}"
    )
    return 1 if any("ended with exit code" in figure.note for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
