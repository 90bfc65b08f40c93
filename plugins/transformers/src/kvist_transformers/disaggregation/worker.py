"""One process of a disaggregated run: an engine with a port, told what to do over a pipe."""

from __future__ import annotations

import os
import queue
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np

from kvist_transformers.disaggregation.port import Arrival, Port
from kvist_transformers.engine import Engine
from kvist_transformers.handle import Handle
from kvist_transformers.job import Source
from kvist_transformers.request import FinishReason, Request


@attrs.frozen
class Settings:
    """What a process is made from. folder: the model's. scheme: the transport's."""

    name: str
    folder: Path
    scheme: str
    dtype: str
    memory: str
    threads: int


@attrs.frozen
class Prefill:
    """Compute the prompt of a request, and offer it under its name."""

    name: str
    request: Request


@attrs.frozen
class Decode:
    """Get a request from another process, and go on with it."""

    name: str
    request: Request
    given: list[int]
    hello: bytes


@attrs.frozen
class Cancel:
    """Nobody wants this request any more, wherever it is. Not answered; unknown names are ignored."""

    name: str


@attrs.frozen
class Stop:
    """Close everything and end."""


@attrs.frozen
class Ready:
    """The engine is there."""

    hello: bytes


@attrs.frozen
class Ended:
    """A request has ended here. computed: prompt tokens computed here; arrival: of one that came from elsewhere."""

    name: str
    tokens: list[int]
    reason: FinishReason
    reused: int
    computed: int
    error: str = ""
    arrival: Arrival | None = None


@attrs.frozen
class Stopped:
    """Everything is closed. leaks: what was left, in words; empty if nothing."""

    leaks: str


@attrs.frozen
class Broken:
    """The process cannot go on."""

    text: str


Command: TypeAlias = Prefill | Decode | Cancel | Stop
Answer: TypeAlias = Ready | Ended | Stopped | Broken


def main(settings: Settings, connection: Connection) -> None:
    """Of the process. Ends with the parent, and with :class:`Stop`."""
    try:
        _Worker(settings, connection).run()
    except (EOFError, BrokenPipeError):
        pass  # The parent has gone, and so do we.
    except BaseException:
        connection.send(Broken(traceback.format_exc()))


class _Worker:
    def __init__(self, settings: Settings, connection: Connection) -> None:
        # Two processes share the processors; threads that wait for each other must not spin there.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        import torch

        from kvist.registry import default_registry
        from kvist.transfer.transport import TransportContext
        from kvist_transformers import models
        from kvist_transformers.peers import quiet

        torch.set_num_threads(settings.threads)
        self._connection = connection
        #: Commands, and ``None`` when a transfer has moved on or the parent has gone.
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._gone = False
        self._arrivals: dict[int, Arrival] = {}
        self._running: dict[str, Handle] = {}
        entry = default_registry().transceiver(settings.scheme)
        transport = entry.resolve(entry.info.factory)(TransportContext(settings.name))
        self._port = Port(transport, notify=lambda: self._inbox.put(None), on_arrival=self._arrived)
        with quiet():
            model: Any = models.load_model(settings.folder, settings.dtype)
        self._engine = Engine(model, memory=settings.memory, port=self._port)
        threading.Thread(target=self._listen, daemon=True).start()
        connection.send(Ready(self._port.hello()))

    def run(self) -> None:
        while not self._gone:
            ran = self._engine.step()
            self._report()
            # With nothing to compute, it sleeps until somebody says something.
            while not ran or not self._inbox.empty():
                command = self._inbox.get()
                if isinstance(command, Stop):
                    return self._connection.send(Stopped(self._close()))
                if isinstance(command, Cancel):
                    if command.name in self._running:
                        self._running[command.name].cancel()
                    else:
                        self._port.withdraw(command.name)
                elif command is not None:
                    self._running[command.name] = self._begin(command)
                ran = True

    def _begin(self, command: Prefill | Decode) -> Handle:
        if isinstance(command, Prefill):
            return self._engine.prefill(command.request, command.name)
        source = Source(command.name, (command.hello,))
        return self._engine.adopt(command.request, source, np.array(command.given, np.int32))

    def _report(self) -> None:
        for name, handle in list(self._running.items()):
            if handle.done:
                del self._running[name]
                end = handle.completion()
                arrival = self._arrivals.pop(end.request_id, None)
                error = "" if end.error is None else str(end.error)
                tokens, computed = end.tokens.tolist(), end.computed_tokens
                self._connection.send(
                    Ended(name, tokens, end.finish_reason, end.reused_tokens, computed, error, arrival)
                )

    def _arrived(self, arrival: Arrival) -> None:
        self._arrivals[arrival.request] = arrival

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):
            self._gone = True
            self._inbox.put(None)

    def _close(self) -> str:
        """Returns what is left of requests that have ended."""
        self._engine.close()
        stats, caches = self._port.stats(), self._engine.manager.stats()
        self._engine.manager.check()
        found = {
            "open sessions": stats.open_sessions,
            "quarantined pages": stats.quarantined_pages,
            "connections": stats.peers,
            "open sequences": caches.open_sequences,
            "held pages": sum(group.held for group in caches.groups),
        }
        return ", ".join(f"{count} {what}" for what, count in found.items() if count)
