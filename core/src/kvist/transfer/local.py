"""The reference transport: all ends in one process. What it does is what the contract means."""

from __future__ import annotations

import itertools
import uuid

import attrs
import msgspec
import numpy as np

from kvist.errors import TransferError
from kvist.transfer.network import Link, LocalNetwork, Operation
from kvist.transfer.transport import (
    WIRE_VERSION,
    Capabilities,
    Connected,
    Event,
    Failed,
    Fragments,
    IncompatibleError,
    Int64Array,
    Peer,
    Region,
    Revoked,
    TransportContext,
    covers,
    host_bytes,
    require_answered,
    require_inside,
    require_short,
)

#: Everything a transport can promise. Tests also run it with less.
LOCAL = Capabilities(
    devices=frozenset({"cpu"}),
    allocates=False,
    grants=True,
    close_is_fence=True,
    death_is_fence=True,
    detects_death=True,
    target_must_progress=False,
)


class _Hello(msgspec.Struct, frozen=True):
    version: int
    scheme: str
    identity: str
    name: str


@attrs.frozen
class _Grant:
    link: Link
    region: Region
    begins: Int64Array
    ends: Int64Array

    def covers(self, fragments: Fragments) -> bool:
        """Does every fragment lie in one of the ranges?"""
        return covers(self.begins, self.ends, fragments.destinations, fragments.byte_counts)


#: Connects the local transports of a process that were given no other network.
_shared = LocalNetwork()


class LocalTransport:
    """Implements :class:`~kvist.transfer.transport.Transport` inside one process.

    network: what it is connected to; by default the one of the process, in real time and without faults.
    capabilities: what it promises. With less than :data:`LOCAL` it also does less: without ``grants``, writes are not
        checked, without ``close_is_fence`` they arrive after a connection was closed, and so on.
    """

    scheme = "local"

    def __init__(
        self, context: TransportContext, network: LocalNetwork | None = None, capabilities: Capabilities = LOCAL
    ) -> None:
        self.name = context.name
        self.capabilities = capabilities
        self.identity = uuid.uuid4().hex
        self.network = _shared if network is None else network
        self.links: dict[int, Link] = {}
        self.events: list[Event] = []
        #: Registered memory, by region.
        self.memory: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self.stalled = False
        self._regions: list[Region] = []
        self._grants: dict[int, _Grant] = {}
        self._peer_ids = itertools.count()
        self._said_hello = self._woken = self._closed = False
        self.network.join(self)

    def allocate(self, byte_count: int, device: str = "cpu") -> Region:
        raise TransferError("a local transport allocates no memory", hint="register() memory of your own")

    def register(self, address: int, byte_count: int, device: str = "cpu") -> Region:
        if device not in self.capabilities.devices:
            raise TransferError(
                f"a local transport cannot register memory on {device!r}",
                hint=f"it takes {', '.join(sorted(self.capabilities.devices))}",
            )
        if self._said_hello:
            raise TransferError("memory was registered after hello()", hint="register everything before")
        region = Region(len(self._regions), address, byte_count, device)
        self._regions.append(region)
        self.memory.append(host_bytes(address, byte_count))
        return region

    def hello(self) -> bytes:
        self._said_hello = True
        return msgspec.msgpack.encode(_Hello(WIRE_VERSION, self.scheme, self.identity, self.name))

    def connect(self, hello: bytes) -> Peer:
        try:
            told = msgspec.msgpack.decode(hello, type=_Hello)
        except msgspec.DecodeError as error:
            raise IncompatibleError(f"this is no hello of a local transport: {error}") from error
        ours = (WIRE_VERSION, self.scheme)
        if (told.version, told.scheme) != ours:
            raise IncompatibleError(
                f"{told.name!r} speaks version {told.version} of {told.scheme!r}, we speak version {ours[0]} of "
                f"{ours[1]!r}",
                hint="run the same version of kvist on both sides",
            )
        with self.network.changed:
            for link in self.links.values():
                if link.peer.identity == told.identity and not link.down:
                    return link.peer
            peer = Peer(self.next_peer(), told.identity, told.name)
            other = self.network.find(told.identity)
            if other is None:
                # It has its events like any other, and a link that leads nowhere.
                link = self.links[peer.id] = Link(peer, self, self)
                link.back = attrs.evolve(link, closed=True)
                self.network.down(link, "nobody is there: it has ended, or another one has its address")
            else:
                self.links[peer.id] = self.network.link(peer, self, other)
                self.events.append(Connected(peer))
            self.network.changed.notify_all()
            return peer

    def grant(self, peer: Peer, grant: int, region: Region, begins: Int64Array, ends: Int64Array) -> None:
        order = np.argsort(begins)
        with self.network.changed:
            if peer.id in self.links:
                self._grants[grant] = _Grant(self.links[peer.id], region, begins[order], ends[order])

    def revoke(self, grant: int) -> None:
        with self.network.changed:
            self._grants.pop(grant, None)
            self.events.append(Revoked(grant))
            self.network.changed.notify_all()

    def write(self, peer: Peer, fragments: Fragments, grant: int, token: int) -> None:
        require_inside(fragments, self._regions[fragments.source_region])
        with self.network.changed:
            link = self.links.get(peer.id)
            if link is None or link.down:
                self.events.append(Failed(token, f"{peer} is gone", in_doubt=False))
                return
            link.unanswered[token] = None
            self.network.send(link, Operation("write", fragments=fragments, grant=grant, token=token))

    def message(self, peer: Peer, data: bytes) -> None:
        require_short(data, self.capabilities)
        with self.network.changed:
            link = self.links.get(peer.id)
            if link is not None and not link.down:
                self.network.send(link, Operation("message", data))

    def poll(self, timeout_s: float) -> list[Event]:
        with self.network.changed:
            self.network.run()
            if not self.network.virtual:
                self.network.changed.wait_for(lambda: self.events or self._woken, timeout_s)
            self._woken = False
            if self.stalled:
                return []
            events, self.events = self.events, []
            return events

    def wake(self) -> None:
        with self.network.changed:
            self._woken = True
            self.network.changed.notify_all()

    def disconnect(self, peer: Peer) -> None:
        with self.network.changed:
            if peer.id in self.links:
                self.network.close(self.links[peer.id])

    def close(self) -> None:
        with self.network.changed:
            require_answered(sum(len(link.unanswered) for link in self.links.values()))
            if not self._closed:
                self._closed = True
                for link in list(self.links.values()):
                    self.network.close(link)
                self.network.leave(self)
                self.memory.clear()

    def next_peer(self) -> int:
        """For the network: the id of one more connection."""
        return next(self._peer_ids)

    def refusal(self, link: Link, fragments: Fragments, grant: int) -> str:
        """For the network: why a write that arrives over ``link`` must not touch memory; empty if it may."""
        if link.closed and self.capabilities.close_is_fence:
            return "the connection was closed"
        if not self.capabilities.grants:
            return ""
        given = self._grants.get(grant)
        if given is None or given.link is not link:
            return f"there is no grant {grant}"
        if given.region.id != fragments.destination_region or not given.covers(fragments):
            return f"the write goes beyond grant {grant}"
        return ""
