"""Telling a peer that a connection has ended at our side."""

from __future__ import annotations

import attrs

from kvist_transceiver_ucx.connection import Connection
from kvist_transceiver_ucx.ucp import Endpoint, Request, UcxError, Worker
from kvist_transceiver_ucx.wire import FAREWELL, Farewell, encode, header

#: A socket that is closed with unread bytes in it may lose what was sent over it; so the endpoint stays this long.
LINGER_S = 2.0
#: A peer on another machine is given up after this; one on this machine takes as long as its process lives.
PATIENCE_S = 30.0


@attrs.define(eq=False)
class Leave:
    """A farewell under way, over an endpoint of its own. ``patient``: does it wait for a peer that does not run?
    ``refused``: the peer's worker takes none."""

    connection: Connection
    endpoint: Endpoint | None
    until_s: float
    patient: bool
    sent: bool = False
    refused: bool = False
    _requests: list[Request] = attrs.Factory(list)
    _closing: Request | None = None
    _shut: bool = False

    @classmethod
    def begin(cls, worker: Worker, connection: Connection, now_s: float) -> Leave:
        leave = cls(connection, None, now_s + PATIENCE_S, connection.process is not None)
        try:
            leave.endpoint = worker.connect(connection.hello.worker)
            data = encode(Farewell(connection.key, connection.reason if not connection.leaving else ""))
            requests = leave.endpoint.send(header(FAREWELL, connection.there), data), leave.endpoint.flush()
            leave._requests += [request for request in requests if request is not None]
        except UcxError:
            leave.refused = True
        return leave

    def advance(self, now_s: float) -> bool:
        """Returns whether it is over."""
        if self._shut:
            if self._closing is not None and self._closing.poll() is not None:
                self._closing = None
            self._requests = [request for request in self._requests if request.poll() is None]
            if self._closing is not None or self._requests:
                return False
            if self.endpoint is not None:
                self.endpoint.release()
            return True
        pending = []
        for request in self._requests:
            status = request.poll()
            if status is None:
                pending.append(request)
            elif status:
                self.refused = True
        self._requests = pending
        if self.endpoint is not None and self.endpoint.failure:
            self.refused = not self.sent or self.refused
        elif not pending and not self.refused and not self.sent:
            self.sent, self.until_s = True, now_s + LINGER_S
        limited = self.sent or not self.patient
        broken = self.endpoint is None or bool(self.endpoint.failure)
        if self.refused or broken or (limited and now_s >= self.until_s) or self.connection.dead:
            self.shut()
        return False

    def shut(self) -> None:
        """Begin to close the endpoint."""
        if not self._shut:
            self._shut = True
            try:
                self._closing = self.endpoint.close() if self.endpoint is not None else None
            except UcxError:
                self._closing = None
