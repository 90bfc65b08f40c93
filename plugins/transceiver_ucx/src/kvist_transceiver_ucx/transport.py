"""The transport: what the core calls. Everything that takes time happens in the progress thread."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import TransferError
from kvist.transfer.mailbox import Mailbox
from kvist.transfer.transport import (
    WIRE_VERSION,
    Capabilities,
    Event,
    Failed,
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
from kvist_transceiver_ucx import wire
from kvist_transceiver_ucx.arrivals import Arrivals
from kvist_transceiver_ucx.book import Book
from kvist_transceiver_ucx.library import load
from kvist_transceiver_ucx.place import here
from kvist_transceiver_ucx.progress import Progress
from kvist_transceiver_ucx.sends import Sent
from kvist_transceiver_ucx.ucp import Context, Memory, prove
from kvist_transceiver_ucx.writes import Write

#: Of an end that may share memory; ``devices`` is what the library says. A peer that lives keeps what it has mapped,
#: and UCX can take nothing back: only its farewell or its death is a fence, and either comes before ``PeerDown``.
CAPABILITIES = Capabilities(
    devices=frozenset({"cpu"}),
    allocates=True,
    grants=False,
    close_is_fence=False,
    death_is_fence=True,
    detects_death=True,
    target_must_progress=True,
)

#: Of an end without shared memory: peers send their writes as messages, and it copies them itself.
ALONE = attrs.evolve(CAPABILITIES, grants=True, close_is_fence=True)

#: Lanes through memory that processes share. A list of lanes without any of these cannot reach our memory directly.
_SHARED = {"all", "shm", "sm", "mm", "posix", "sysv", "xpmem", "cma", "knem"}


class UcxTransport:
    """Implements :class:`~kvist.transfer.transport.Transport` over UCX.

    library: path of a ``libucp.so.0`` to use; by default the environment variable ``KVIST_UCX_LIBRARY``, the installed
        libucx wheel, or the system's, in this order.
    settings: of UCX, as environment variables without their prefix, e.g. ``{"TLS": "tcp"}``. They count more than
        ``UCX_...`` variables, and those more than :data:`~kvist_transceiver_ucx.ucp.DEFAULTS`.

    Raises TransferError when there is no UCX that works.
    """

    scheme = wire.SCHEME

    def __init__(
        self, context: TransportContext, *, library: str | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        if context.address not in ("", "ucx://"):
            raise TransferError(
                f"a UCX transport cannot listen at {context.address!r}",
                hint="leave the address empty; UCX_NET_DEVICES and UCX_TLS choose the network",
            )
        self.name = context.name
        self.identity = uuid.uuid4().hex
        self._context = Context(load(library), settings or {})
        prove(self._context)
        self._shares_memory = self._may_share_memory()
        declared = CAPABILITIES if self._shares_memory else ALONE
        self.capabilities = attrs.evolve(declared, devices=self._context.devices())
        self._memories: list[Memory] = []
        self._regions: list[Region] = []
        self._hello: bytes | None = None
        self._closed = False
        self._mailbox = Mailbox()
        self._book = Book(self.name)
        arrivals = Arrivals(lambda: self._regions, grants=self.capabilities.grants)
        self._progress = Progress(self._context, self._book, self._mailbox, arrivals)
        self._place = here()

    def allocate(self, byte_count: int, device: str = "cpu") -> Region:
        if device != "cpu":
            raise TransferError(
                f"a UCX transport allocates no memory on {device!r}", hint="register() memory of your own"
            )
        region = self._map(None, byte_count, device)
        host_bytes(region.address, byte_count)[:] = 0
        return region

    def register(self, address: int, byte_count: int, device: str = "cpu") -> Region:
        return self._map(address, byte_count, device)

    def _map(self, address: int | None, byte_count: int, device: str) -> Region:
        if device not in self.capabilities.devices:
            raise TransferError(
                f"this UCX cannot register memory on {device!r}",
                hint=f"it takes {', '.join(sorted(self.capabilities.devices))}",
            )
        with self._book.lock:
            self._require_open()
            if self._hello is not None:
                raise TransferError("memory was registered after hello()", hint="register everything before")
            memory = self._context.map(address, byte_count, device)
            region = Region(len(self._regions), memory.address, byte_count, device)
            self._memories.append(memory)
            self._regions.append(region)
            return region

    def hello(self) -> bytes:
        with self._book.lock:
            self._require_open()
            if self._hello is None:
                regions = [
                    wire.RemoteRegion(region.address, memory.allocated, region.byte_count, memory.key(), region.device)
                    for region, memory in zip(self._regions, self._memories)
                ]
                self._progress.hello = wire.Hello(
                    version=WIRE_VERSION,
                    scheme=self.scheme,
                    identity=self.identity,
                    name=self.name,
                    ucx=self._context.library.version,
                    place=self._place,
                    shares_memory=self._shares_memory,
                    worker=self._progress.address,
                    regions=tuple(regions),
                )
                self._hello = wire.encode(self._progress.hello)
            return self._hello

    def connect(self, hello: bytes) -> Peer:
        self.hello()  # The peer gets ours with the greeting.
        version = self._context.library.version
        told = wire.read_hello(hello, version, self._place, shares_memory=self._shares_memory)
        with self._book.lock:
            connection = self._book.live(told.identity)
            if connection is None:
                connection = self._book.enter(told)
                opened = connection
                self._progress.submit(lambda: self._progress.open(opened))
            return connection.peer

    def grant(self, peer: Peer, grant: int, region: Region, begins: Int64Array, ends: Int64Array) -> None:
        self._require_grants()
        order = np.argsort(begins)
        with self._book.lock:
            connection = self._book.of(peer)
            if connection is not None:
                granted = connection, grant, region.id, begins[order], ends[order]
                self._progress.submit(lambda: self._progress.give(*granted))

    def revoke(self, grant: int) -> None:
        self._require_grants()
        self._progress.submit(lambda: self._progress.revoke(grant))

    def write(self, peer: Peer, fragments: Fragments, grant: int, token: int) -> None:
        require_inside(fragments, self._regions[fragments.source_region])
        with self._book.lock:
            connection = self._book.of(peer)
            if connection is None or connection.ended or connection.leaving:
                self._mailbox.say(Failed(token, f"{peer} is gone", in_doubt=False))
                return
            refusal = _beyond(fragments, connection.hello) or self._unreachable(fragments, connection.hello)
            if refusal:
                self._mailbox.say(Failed(token, refusal, in_doubt=False))
                return
            self._mailbox.expect(token)
            memory = self._memories[fragments.source_region]
            write: Write | Sent = Sent(token, fragments, memory, grant)
            if self._puts(fragments, connection.hello):
                write = Write(token, fragments, memory)
            self._progress.submit(lambda: self._progress.push(connection, write))

    def message(self, peer: Peer, data: bytes) -> None:
        require_short(data, self.capabilities)
        with self._book.lock:
            connection = self._book.of(peer)
            if connection is not None and not connection.ended and not connection.leaving:
                self._progress.submit(lambda: self._progress.push(connection, data))

    def poll(self, timeout_s: float) -> list[Event]:
        return self._mailbox.poll(timeout_s)

    def wake(self) -> None:
        self._mailbox.wake()

    def disconnect(self, peer: Peer) -> None:
        with self._book.lock:
            connection = self._book.of(peer)
            if connection is not None and not connection.leaving:
                connection.leaving = True
                self._progress.submit(lambda: self._progress.leave(connection))

    def close(self) -> None:
        with self._book.lock:
            require_answered(self._mailbox.unanswered)
            if self._closed:
                return
            self._closed = True
        self._progress.stop()
        self._context.close()

    def _require_open(self) -> None:
        """What has been given back to UCX must not be used again."""
        if self._closed:
            raise TransferError(f"the ucx transport of {self.name!r} is closed")

    def _require_grants(self) -> None:
        if not self.capabilities.grants:
            raise TransferError("this end of UCX may share memory and checks no grants", hint="capabilities.grants")

    def _puts(self, fragments: Fragments, hello: wire.Hello) -> bool:
        """Does UCX write by itself, or does the peer copy what we send?

        UCX writes memory that both processes have mapped. All else it would send as messages of its own, over shared
        memory too, and the receiving process ends when the sender is killed meanwhile. Memory of other devices only UCX
        can reach.
        """
        near = hello.place.machine == self._place.machine and hello.shares_memory and self._shares_memory
        if not len(fragments):
            return near
        target, source = hello.regions[fragments.destination_region], self._regions[fragments.source_region]
        return (near and target.allocated) or "cpu" not in (target.device, source.device)

    def _unreachable(self, fragments: Fragments, hello: wire.Hello) -> str:
        """Why there is no way for a write; empty if there is one."""
        if not len(fragments) or self._puts(fragments, hello):
            return ""
        ours, theirs = self._regions[fragments.source_region], hello.regions[fragments.destination_region]
        if ours.device == theirs.device == "cpu":
            return ""
        return f"there is no way from {ours.device} memory to {theirs.device} memory of {hello.name!r}"

    def _may_share_memory(self) -> bool:
        lanes = self._context.lanes()
        return lanes.startswith("^") or bool(_SHARED & {lane.strip() for lane in lanes.split(",")})


def _beyond(fragments: Fragments, hello: wire.Hello) -> str:
    """Why a write would touch what the peer did not offer; empty if it does not. UCX does not check."""
    at = fragments.destination_region
    if not 0 <= at < len(hello.regions):
        return f"{hello.name!r} has no region {at}"
    ends: npt.NDArray[np.int64] = fragments.destinations + fragments.byte_counts
    if not len(fragments):
        return ""
    begin, end = int(fragments.destinations.min()), int(ends.max())
    if begin < 0 or end > hello.regions[at].byte_count:
        return f"it writes bytes {begin}..{end} of region {at}, which has {hello.regions[at].byte_count}"
    return ""
