"""Running the application: listen, serve, and stop within a deadline."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from kvist.errors import KvistError
from kvist_transformers.serving.app import make_app
from kvist_transformers.serving.service import Service

#: Seconds beside the deadline for clients to read what ended their requests.
_PARTING_S = 2.0


class ListenError(KvistError):
    """The address cannot be listened on."""


class Server(uvicorn.Server):
    """Serves until it is told to stop (SIGINT, SIGTERM or ``should_exit``). Then nothing new is taken, what runs may
    go on for ``drain_s`` seconds, and what is left is cancelled."""

    def __init__(self, service: Service, *, drain_s: float = 30.0, **settings: Any) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level="warning",
                timeout_graceful_shutdown=drain_s + _PARTING_S,  # type: ignore[arg-type]  # any number of seconds works
                **settings,
            )
        )
        self._service = service
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        end = asyncio.get_running_loop().call_later(self._drain_s, self._service.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ListenError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}",
            hint="choose another --host or --port; port 0 takes a free one",
        ) from error
    found.setblocking(False)
    return found
