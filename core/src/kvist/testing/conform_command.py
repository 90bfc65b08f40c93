"""Run the conformance kit against a plugin, and show what became of every clause of the contract."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.errors import PluginError

if TYPE_CHECKING:
    from kvist.testing.conform import Conformance


def command(
    name: Annotated[str, typer.Argument(help="The plugin's name, as `kvist plugins` shows it.")],
    path: Annotated[
        Path | None,
        typer.Option("--path", help="Run the tests in this checkout instead of what the installed plugin names."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    badge: Annotated[bool, typer.Option("--badge", help="Print only the line for a README.")] = False,
) -> None:
    """Run the conformance kit against a plugin. The exit code is 1 when a clause has failed."""
    try:
        from kvist.testing.conform import conform
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pytest", "hypothesis", "torch"):
            raise
        raise PluginError(f"the kit needs {error.name}", hint="pip install 'kvist[testing]'") from error
    from rich.console import Console

    with Console(stderr=True).status("collecting tests") as status:
        result = conform(name, path, status.update)
    if badge:
        typer.echo(result.badge)
    elif as_json:
        typer.echo(json.dumps(_as_json(result), indent=2))
    else:
        _print_table(result)
    if not result.conforms:
        raise typer.Exit(1)


def _as_json(result: Conformance) -> dict[str, Any]:
    return {
        "plugin": result.plugin,
        "origin": result.origin,
        "kvist": result.core_version,
        "conforms": result.conforms,
        "badge": result.badge,
        "clauses": [
            {
                "number": outcome.clause.number,
                "title": outcome.clause.title,
                "status": outcome.status,
                "notes": list(outcome.notes),
                "change": outcome.clause.change if outcome.status == "failed" else None,
                "tests": [{"name": test.name, "outcome": test.outcome, "text": test.text} for test in outcome.tests],
            }
            for outcome in result.outcomes
        ],
    }


def _print_table(result: Conformance) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"passed": "green", "failed": "red", "not applicable": "dim", "not run here": "yellow"}
    table = Table(title=f"{result.plugin} of {result.origin}, contract of kvist {result.core_version}")
    for heading in ("clause", "title", "outcome", "tests", "remarks"):
        table.add_column(heading, overflow="fold")
    # Neighbours that were not tried, for one reason, share a row.
    for _, group in groupby(
        result.outcomes, lambda each: each.clause if each.tests else (each.clause.part, each.notes)
    ):
        same = list(group)
        first, last = same[0], same[-1]
        alone = len(same) == 1
        table.add_row(
            first.clause.number if alone else f"{first.clause.number} to {last.clause.number}",
            Text(first.clause.title if alone else f"{len(same)} clauses"),
            Text(first.status, style=colours[first.status]),
            str(len(first.tests)),
            Text("\n".join(first.notes)),
        )
    console = Console()
    console.print(table)
    for outcome in result.outcomes:
        if outcome.status == "failed":
            for test in outcome.tests:
                if test.outcome == "failed":
                    console.print(Text(f"\n{outcome.clause}: {test.name}", style="red"))
                    console.print(Text(test.text))
            console.print(Text(f"change: {outcome.clause.change}"))
    counts = [f"{result.count(status)} {status}" for status in colours]  # type: ignore[arg-type]
    console.print(Text("\n" + ", ".join(counts)))
    if result.conforms:
        # In one line, whatever the terminal's width.
        typer.echo(f"For a README: {result.badge}")
