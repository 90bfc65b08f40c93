"""The cache's index as server-sent events: a snapshot, then every change, see :mod:`kvist.events`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvist.events import Event, Listener, Moved, Removed, Stored
from kvist_transformers.engine import Engine
from kvist_transformers.serving.streams import event
from kvist_transformers.serving.worker import EngineError, Worker

#: Blocks whose events are held for a reader who does not read; then it gets a snapshot again.
MOST_BLOCKS = 1 << 16
#: Silence after which a comment shows that the connection lives.
_ALIVE_S = 15.0


def as_json(change: Event) -> dict[str, Any]:
    """An event with keys and digests in hexadecimal."""
    body: dict[str, Any] = {
        "number": change.number,
        "scope": None if change.scope is None else change.scope.hex(),
        "start": change.start,
        "keys": [key.hex() for key in change.keys],
        "groups": list(change.groups),
    }
    if isinstance(change, Stored):
        body["parent"] = None if change.parent is None else change.parent.hex()
        body["tokens"] = None if change.tokens is None else change.tokens.tolist()
        body["tier"] = change.tier
    elif isinstance(change, Removed):
        body |= {"tier": change.tier, "reason": change.reason}
    else:
        body |= {"source": change.source, "target": change.target}
    return body


_NAMES: dict[type, str] = {Stored: "stored", Moved: "moved", Removed: "removed"}


class Feed:
    """One reader's events. Takes from the listener only what the reader asks for: so the listener's bound holds."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._listener: Listener | None = None
        self._first = True
        self._ended = False

    async def open(self) -> None:
        """Begin to listen. Raises EngineError when the engine is broken."""
        self._listener = await self._worker.ask(lambda engine: engine.manager.listen(MOST_BLOCKS))
        await self._worker.after_each_step(self._ring, True)

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                await self._worker.after_each_step(self._ring, False)
                await self._worker.ask(lambda _: listener.close())
            except EngineError:
                pass  # nobody computes keys for it any more

    def end(self) -> None:
        """Let the reader's stream end."""
        self._ended = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        while not self._ended:
            self._news.clear()
            events = await self._worker.ask(self._take)
            if events:
                yield b"".join(events)
                continue
            try:
                await asyncio.wait_for(self._news.wait(), _ALIVE_S)
            except TimeoutError:
                yield b": alive\n\n"

    def _ring(self) -> None:
        """In the engine's thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    def _take(self, _: Engine) -> list[bytes]:
        """In the engine's thread."""
        listener = self._listener
        if listener is None:
            return []
        found = []
        if self._first or listener.behind:
            self._first = False
            snapshot = listener.snapshot()
            stored = [as_json(record) for record in snapshot.stored]
            found.append(event({"number": snapshot.number, "stored": stored}, name="snapshot", number=snapshot.number))
        for change in listener.take():
            found.append(event(as_json(change), name=_NAMES[type(change)], number=change.number))
        return found
