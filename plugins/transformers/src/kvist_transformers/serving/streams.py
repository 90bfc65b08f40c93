"""Server-sent events, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

T = TypeVar("T")

#: Ends a stream of OpenAI's API.
DONE = b"data: [DONE]\n\n"


class DisconnectedError(Exception):
    """The client has gone; nobody reads an answer."""


def event(data: Any, *, name: str | None = None, number: int | None = None) -> bytes:
    """One event with JSON in it."""
    head = (f"event: {name}\n" if name else "") + (f"id: {number}\n" if number is not None else "")
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``. Cancels it and raises DisconnectedError when the client goes first.

    request: its body has been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Events while the client reads them. ``close`` is called once when it ends, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()
