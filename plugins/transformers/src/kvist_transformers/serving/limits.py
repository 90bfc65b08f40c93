"""What is done to every HTTP request: bodies have a largest size, answers are counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException

from kvist_transformers.serving.metrics import ServerMetrics

#: Larger bodies are refused unread.
MOST_BODY_BYTES = 32 << 20

_App = Callable[[Any, Any, Any], Awaitable[None]]


class BodyLimit:
    """Stops reading a body that is too large. Such a request is answered with 413."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = int(dict(scope["headers"]).get(b"content-length", b"0") or 0)
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if max(seen, length) > MOST_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")
            return message

        await self._app(scope, counted, send)


class Counted:
    """Counts answers by path and status."""

    def __init__(self, app: _App, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                # Whatever else is asked for must not become a label each.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, noted)
