"""The command ``kvist replay``."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from kvist.errors import KvistError, SpecError
from kvist.iterations.recorder import Iterations
from kvist.layout import Layout
from kvist.manager import CacheManager
from kvist.policies import ReuseRate
from kvist.records import CacheManagerInfo
from kvist.registry import Entry, default_registry
from kvist.replay.engine import Engine, ReplayResult
from kvist.replay.report import Report
from kvist.replay.sizes import MemorySize, layout_of_blocks
from kvist.replay.traces import DEFAULT_VOCAB_SIZE, TraceRequest, read_trace
from kvist.spec import CacheSpec, ceil_div


class Eviction(enum.StrEnum):
    """Names of eviction policies on the command line."""

    LEAST_RECENTLY_USED = "lru"
    REUSE_RATE = "reuse-rate"


def command(
    trace: Annotated[Path, typer.Argument(help="Request trace: JSON Lines with hash_ids or hash_runs.")],
    config: Annotated[Path, typer.Option(help="The model's config.json, or the folder it lies in.")],
    memory: Annotated[str, typer.Option(help="Size of the cache: 40GiB, 512MB, or in tokens: 1Mtok.")],
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay only the first so many requests.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at the same time, at most.")] = 16,
    dtype: Annotated[str | None, typer.Option(help="Element type of the cache; default: the config's.")] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens computed per step; default: the whole prompt.")
    ] = None,
    content_ids: Annotated[
        bool, typer.Option("--content-ids", help="Block ids stand for their block alone, not for the prefix up to it.")
    ] = False,
    ceiling: Annotated[
        bool, typer.Option("--ceiling", help="Also replay on a cache that never evicts, to see what could be hit.")
    ] = False,
    eviction: Annotated[
        Eviction, typer.Option(help="What goes first when the cache is full.")
    ] = Eviction.LEAST_RECENTLY_USED,
    record: Annotated[
        Path | None, typer.Option(help="Write what happened in each step to this file, for `kvist report` and `top`.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON to this file; - prints them instead.")
    ] = None,
) -> None:
    """Replay a request trace on the cache manager alone: hit rate, evictions, peak use and host time, no weights.

    Only lengths and equalities of tokens matter, so any model's cache can be sized on any machine.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    size = MemorySize.parse(memory)
    entry, spec = load_spec(config, block_tokens=block_tokens, dtype=dtype)
    layout = size.layout(spec)
    jobs = list(
        read_trace(trace, limit=requests, vocab_size=spec.vocab_size or DEFAULT_VOCAB_SIZE, prefix_ids=not content_ids)
    )
    factory: Callable[..., CacheManager] = entry.resolve(entry.info.manager_factory)
    quiet = str(json_file) == "-"
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:

        def run(what: str, on: Layout, records: BinaryIO | None = None) -> ReplayResult:
            task = progress.add_task(what, total=len(jobs))
            options = {} if eviction is Eviction.LEAST_RECENTLY_USED else {"eviction": ReuseRate()}
            manager = factory(on, **options)

            def recorder(clock: Callable[[], float]) -> Iterations:
                what = f"replay of {trace.name}"
                return Iterations(manager, source=what, clock=clock, time_unit="steps", file=records)

            engine = Engine(
                manager,
                concurrency=concurrency,
                chunk_tokens=chunk_tokens,
                on_progress=lambda finished: progress.update(task, completed=finished),
                record=None if records is None else recorder,
            )
            return engine.run(jobs)

        with nullcontext() if record is None else _opened(record) as records:
            result = run("replaying", layout, records)
        report = Report(
            trace=str(trace),
            model_type=str(_read_config(config)["model_type"]),
            memory=memory,
            concurrency=concurrency,
            chunk_tokens=chunk_tokens,
            layout=layout,
            result=result,
            ceiling=run("without eviction", _unbounded(spec, jobs)) if ceiling else None,
        )
    if quiet:
        typer.echo(json.dumps(report.as_json()))
        return
    console = Console()
    for table in report.tables():
        console.print(table)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise KvistError(f"cannot write {json_file}: {error.strerror or error}") from error
        console.print(f"written: {json_file}")
    if record is not None:
        console.print(f"recorded: {record}")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise KvistError(f"cannot write {path}: {error.strerror or error}") from error


def load_spec(path: Path, *, block_tokens: int, dtype: str | None) -> tuple[Entry[CacheManagerInfo], CacheSpec]:
    """What the installed plugins make of a model config, and the record that serves it.

    Raises SpecError for a file that is no model config, PluginError when nothing serves its model type.
    """
    config = _read_config(path)
    entry = default_registry().cache_manager(config["model_type"])
    factory: Callable[..., CacheSpec] = entry.resolve(entry.info.spec_factory)
    return entry, factory(config, block_tokens=block_tokens, dtype=dtype)


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    hint = "give the config.json of a Hugging Face model, or the folder it lies in"
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read model config {file}: {error.strerror or error}", hint=hint) from error
    except ValueError as error:
        raise SpecError(f"model config {file} is not JSON: {error}", hint=hint) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise SpecError(f"model config {file} has no model_type", hint=hint)
    return content


def _unbounded(spec: CacheSpec, jobs: list[TraceRequest]) -> Layout:
    """Room for every token of the trace."""
    blocks = sum(ceil_div(job.input_length + job.output_length, spec.block_tokens) + 1 for job in jobs)
    return layout_of_blocks(spec, blocks)
