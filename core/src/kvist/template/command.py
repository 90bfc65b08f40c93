"""The command ``kvist new-plugin``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvist.template import create


def command(
    name: Annotated[str, typer.Argument(help="Name of the plugin, for example that of a model family.")],
    folder: Annotated[Path | None, typer.Option(help="Where to put it; default: ./kvist-NAME.")] = None,
) -> None:
    """Write a new plugin that works: its pyproject.toml, its module and its tests, to be changed from there."""
    where = folder or Path(f"kvist-{name.replace('_', '-')}")
    for path in create(name, where):
        typer.echo(f"written: {path}")
    typer.echo(f"\ntry it:\n  pip install -e {where} 'kvist[testing]'\n  kvist plugins --load\n  pytest {where}")
