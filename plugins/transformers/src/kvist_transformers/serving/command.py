"""``kvist serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

import importlib.util
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from kvist.errors import KvistError

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_DTYPES = ("float32", "bfloat16", "float16")


class ServeError(KvistError):
    """The server cannot start as it is asked to."""


def command(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or smollm2 for the demo's.")],
    host: Annotated[str, typer.Option(help="Address to listen on. There is no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str, typer.Option("--name", help="What clients call the model; by default MODEL.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    memory: Annotated[str, typer.Option(help="Bytes of the cache.")] = "1GiB",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    max_sequences: Annotated[int, typer.Option(min=1, help="Most requests that run at a time.")] = 64,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one step.")] = 512,
    max_waiting: Annotated[int, typer.Option(min=0, help="Most requests that wait; more are sent away.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads, by default torch's.")] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write what /v1/iteration_stats shows to this file as well.")
    ] = None,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Compute prompts in a process of their own.")
    ] = False,
    transport: Annotated[
        str, typer.Option(help="With --disaggregated: how caches travel between the two: shm, tcp or ucx.")
    ] = "shm",
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds that requests may go on at a shutdown.")] = 30.0,
) -> None:
    """Serve a model over OpenAI's HTTP API, with metrics and the cache's events."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="--dtype")
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ServeError(
            f"the server needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'kvist-transformers[serve]'",
        )
    # Threads that wait for each other must not spin; read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    import torch

    from kvist_transformers.disaggregation.worker import Settings
    from kvist_transformers.engine import Engine
    from kvist_transformers.models import load_tokenizer
    from kvist_transformers.serving.server import Server, listen
    from kvist_transformers.serving.service import Service
    from kvist_transformers.serving.split import SplitWorker, make_port
    from kvist_transformers.serving.worker import Worker

    if threads is not None:
        torch.set_num_threads(threads)
    elif disaggregated:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    # First what is quick to fail.
    with ExitStack() as stack:
        socket = stack.enter_context(listen(host, port))
        lines = None if record is None else stack.enter_context(_opened(record))
        folder = _folder(model)
        typer.echo(f"loading {model}")
        loaded = _load(folder, dtype, device)
        port = make_port(transport) if disaggregated else None
        engine = Engine(
            loaded,
            port=port,
            memory=memory,
            block_tokens=block_tokens,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            pack_weights=(dtype, device) == ("bfloat16", "cpu"),
        )
        engine.record(source=name or model, file=lines)
        if port is None:
            worker = Worker(engine)
        else:
            prefill = Settings("prefill", folder, transport, dtype, memory, torch.get_num_threads())
            worker = SplitWorker(engine, port, prefill)
        service = Service(
            worker,
            loaded,
            load_tokenizer(folder),
            name=name or model,
            max_in_flight=max_sequences + max_waiting,
        )
        at = socket.getsockname()
        typer.echo(f"serving {service.name} at http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}")
        # Being told to stop is no failure; uvicorn raises the signal again when it has stopped.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        Server(service, drain_s=drain_s).run(sockets=[socket])


def _opened(record: Path) -> BinaryIO:
    try:
        # Unbuffered: what has happened is there to read, whatever comes next.
        return record.open("wb", buffering=0)
    except OSError as error:
        raise ServeError(f"cannot write {record}: {error.strerror or error}", hint="choose another --record") from error


def _folder(model: str) -> Path:
    from kvist_transformers import models

    if model == "smollm2":
        return models.prepare(typer.echo)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ServeError(
            f"{model} is not a folder with a config.json",
            hint="give the folder of a Hugging Face model (`hf download NAME` prints it), or smollm2",
        )
    return folder


def _load(folder: Path, dtype: str, device: str) -> Any:
    from kvist_transformers.models import load_model
    from kvist_transformers.peers import quiet

    try:
        with quiet():
            return load_model(folder, dtype).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ServeError(f"cannot load {folder}: {error}", hint="is it a causal language model?") from error
