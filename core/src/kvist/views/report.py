"""The command ``kvist report``: a recorded run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvist.errors import KvistError
from kvist.iterations.records import read_run
from kvist.views.page import page
from kvist.views.slices import Run


def command(
    file: Annotated[Path, typer.Argument(help="What `kvist replay --record` or a server has recorded.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    slices: Annotated[int, typer.Option(min=1, max=500, help="Pieces that time is cut into, at most.")] = 60,
) -> None:
    """Turn a recorded run into one HTML page: hit rate, occupancy, misses, branches, request times.

    The page needs no network and no other file. Of a file with several runs it shows the last one.
    """
    begin, records = read_run(file)
    text = page(Run.of(begin, records, slices))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvistError(f"cannot write {output}: {error.strerror or error}") from error
    typer.echo(f"written: {output}")
