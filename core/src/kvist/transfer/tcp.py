"""Transfers over TCP: from the pages of one process straight into another's, and nothing that was not granted."""

from __future__ import annotations

import os
import socket
import uuid
import weakref
from typing import ClassVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from kvist.errors import TransferError
from kvist.transfer import tcp_wire as wire
from kvist.transfer.mailbox import Mailbox
from kvist.transfer.tcp_io import Connections
from kvist.transfer.transport import (
    WIRE_VERSION,
    Capabilities,
    Event,
    Fragments,
    Int64Array,
    Peer,
    Region,
    TransportContext,
    host_bytes,
    require_answered,
    require_inside,
    require_short,
)

TCP = Capabilities(
    devices=frozenset({"cpu"}),
    allocates=False,
    grants=True,
    close_is_fence=True,
    death_is_fence=True,
    detects_death=True,
    target_must_progress=True,
)


class TcpTransport:
    """Implements :class:`~kvist.transfer.transport.Transport` over TCP.

    A thread of its own owns all connections; other threads only tell it what to do. Every write is checked against the
    grants of this end before its first byte is taken in, and what is revoked takes in no more, even in the midst.
    """

    scheme = "tcp"
    capabilities = TCP
    _connections: ClassVar[type[Connections]] = Connections

    def __init__(self, context: TransportContext) -> None:
        """Listens at ``context.address``, by default at a free port of 127.0.0.1. Raises TransferError when that is not
        possible."""
        self.name = context.name
        self.identity = uuid.uuid4().hex
        self._regions: list[Region] = []
        self._memory: list[memoryview] = []
        self._said_hello = self._closed = self._forked = False
        self._mailbox = Mailbox()
        listener = _listen(context.address, self.scheme)
        self._host, self._port = listener.getsockname()[:2]
        self._io = self._connections(
            self._hello, self._memory, self._mailbox, listener, self.capabilities.max_message_bytes
        )
        _living.add(self)

    def allocate(self, byte_count: int, device: str = "cpu") -> Region:
        raise TransferError(f"a {self.scheme} transport allocates no memory", hint="register() memory of your own")

    def register(self, address: int, byte_count: int, device: str = "cpu") -> Region:
        self._require_early(device)
        return self._add(address, byte_count, device)

    def hello(self) -> bytes:
        self._said_hello = True
        return msgspec.msgpack.encode(self._hello())

    def connect(self, hello: bytes) -> Peer:
        self._require_own()
        return self._io.peer_of(wire.read_hello(hello, self.scheme))

    def grant(self, peer: Peer, grant: int, region: Region, begins: Int64Array, ends: Int64Array) -> None:
        self._require_own()
        order = np.argsort(begins)
        begins, ends = begins[order], ends[order]
        self._io.tell(lambda: self._io.give(peer, grant, region, begins, ends))

    def revoke(self, grant: int) -> None:
        self._require_own()
        self._io.tell(lambda: self._io.revoke(grant))

    def write(self, peer: Peer, fragments: Fragments, grant: int, token: int) -> None:
        self._require_own()
        require_inside(fragments, self._regions[fragments.source_region])
        self._mailbox.expect(token)
        self._io.tell(lambda: self._io.write(peer, fragments, grant, token))

    def message(self, peer: Peer, data: bytes) -> None:
        self._require_own()
        require_short(data, self.capabilities)
        self._io.tell(lambda: self._io.message(peer, data))

    def poll(self, timeout_s: float) -> list[Event]:
        return self._mailbox.poll(timeout_s)

    def wake(self) -> None:
        self._mailbox.wake()

    def disconnect(self, peer: Peer) -> None:
        self._require_own()
        self._io.forget(peer)
        self._io.tell(lambda: self._io.disconnect(peer))

    def close(self) -> None:
        if self._closed:
            return
        require_answered(self._mailbox.unanswered)
        self._closed = True
        self._io.close()
        self._memory.clear()

    def _add(self, address: int, byte_count: int, device: str) -> Region:
        region = Region(len(self._regions), address, byte_count, device)
        self._regions.append(region)
        self._memory.append(memoryview(host_bytes(address, byte_count)))  # type: ignore[arg-type]
        return region

    def _hello(self) -> wire.Hello:
        regions = tuple(self._told(region) for region in self._regions)
        return wire.Hello(WIRE_VERSION, self.scheme, self.identity, self.name, self._host, self._port, regions)

    def _told(self, region: Region) -> wire.ToldRegion:
        return wire.ToldRegion(region.byte_count)

    def _require_early(self, device: str) -> None:
        if device not in self.capabilities.devices:
            raise TransferError(
                f"a {self.scheme} transport has no memory on {device!r}",
                hint=f"it takes {', '.join(sorted(self.capabilities.devices))}",
            )
        if self._said_hello:
            raise TransferError("memory was registered after hello()", hint="register everything before")

    def _require_own(self) -> None:
        if self._forked:
            raise TransferError(
                f"the {self.scheme} transport of {self.name!r} belongs to the process that made it",
                hint="make transports after forking, or start processes with the spawn method",
            )
        if self._closed:
            raise TransferError(f"the {self.scheme} transport of {self.name!r} is closed")

    def abandon(self) -> None:
        """For the child of a fork: none of it is the child's."""
        if not self._closed:
            self._forked = self._closed = True
            self._io.abandon()


def _listen(address: str, scheme: str) -> socket.socket:
    """A listening socket. Raises TransferError when there cannot be one."""
    parts = urlsplit(address or f"{scheme}://127.0.0.1:0")
    try:
        host, port = parts.hostname or "", parts.port or 0
    except ValueError as error:
        raise TransferError(f"{address!r} is no address of a {scheme} transport: {error}") from error
    if parts.scheme != scheme or host in ("", "0.0.0.0", "::"):
        raise TransferError(
            f"{address!r} is no address of a {scheme} transport",
            hint=f"give the one that peers reach, as in {scheme}://127.0.0.1:0; port 0 lets the system choose",
        )
    try:
        listener = socket.create_server((host, port), family=wire.family(host), backlog=128)
    except OSError as error:
        raise TransferError(
            f"cannot listen at {host}:{port}: {wire.reason_of(error)}", hint="port 0 lets the system choose a free one"
        ) from error
    listener.setblocking(False)
    return listener


_living: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


def _abandon() -> None:
    for transport in list(_living):
        transport.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon)
