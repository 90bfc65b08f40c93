"""One write to a peer that shares memory with us: puts in a window, then a flush that covers them."""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs

from kvist.transfer.transport import Fragments
from kvist_transceiver_ucx import declarations as d
from kvist_transceiver_ucx.declarations import ffi
from kvist_transceiver_ucx.ucp import Endpoint, Memory, Request, UcxError

#: Puts under way at once, and puts started in one go.
WINDOW = 512


@attrs.define(eq=False)
class Write:
    """A write that has been accepted. Only the progress thread touches it."""

    token: int
    fragments: Fragments
    memory: Memory
    _next: int = 0
    _puts: deque[Request] = attrs.Factory(deque)
    _flush: Request | None = None
    _flushed: bool = False
    _runs: tuple[list[int], list[int], list[int]] | None = None

    @property
    def begun(self) -> bool:
        """May any of its bytes have left?"""
        return self._next > 0

    @property
    def posted(self) -> bool:
        """Have all its puts and its flush been started?"""
        return self._flush is not None or self._flushed

    @property
    def done(self) -> bool:
        """Are all its bytes there?"""
        return self._flushed and not self._puts

    def post(self, endpoint: Endpoint, key: Any, destination: int) -> bool:
        """Start as many puts as may be, the flush after the last. ``destination``: where the peer's region begins.
        Returns whether more could be started at once. Raises UcxError."""
        if self._runs is None:
            f = self.fragments
            begins = f.sources + self.memory.address
            self._runs = begins.tolist(), (f.destinations + destination).tolist(), f.byte_counts.tolist()
        sources, destinations, sizes = self._runs
        context, parameters, handle = endpoint.worker.context, self.memory.parameters, endpoint.handle
        put, cast, none, first = context.lib.ucp_put_nbx, ffi.cast, ffi.NULL, self._next
        last = min(len(sizes), first + WINDOW)
        for at in range(first, last):
            if len(self._puts) >= WINDOW:
                return False
            self._next = at + 1
            if sizes[at]:
                pointer = put(handle, cast("void *", sources[at]), sizes[at], destinations[at], key, parameters)
                if pointer != none and (request := context.request(pointer, "write")) is not None:
                    self._puts.append(request)
        if last < len(sizes):
            return True
        self._flush = endpoint.flush()
        self._flushed = self._flush is None
        return False

    def reap(self, endpoint: Endpoint) -> None:
        """Look what has ended. Raises UcxError for what has failed."""
        while self._puts:
            status = self._puts[0].poll()
            if status is None:
                break
            self._puts.popleft()
            self._check(endpoint, status)
        if self._flush is not None and (status := self._flush.poll()) is not None:
            self._flush, self._flushed = None, status == d.OK
            self._check(endpoint, status)

    def drained(self) -> bool:
        """After the endpoint was closed: does nobody read our memory any more?"""
        self._puts = deque(request for request in self._puts if request.poll() is None)
        if self._flush is not None and self._flush.poll() is not None:
            self._flush = None
        return not self._puts and self._flush is None

    def _check(self, endpoint: Endpoint, status: int) -> None:
        if status != d.OK:
            raise UcxError(endpoint.worker.context.library, status, "write")
