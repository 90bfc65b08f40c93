"""The contract of a transport: it moves bytes between registered memory of two processes, and small messages.

It knows nothing about caches, requests or pages. What a write means, who owns its two ends and until when, is
:mod:`kvist.transfer`'s business; a transport answers with events.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, TypeAlias, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import TransferError

Int64Array: TypeAlias = npt.NDArray[np.int64]

#: Of everything that a transport puts on the wire; peers of another version are refused.
WIRE_VERSION = 1


class IncompatibleError(TransferError):
    """A peer that cannot be talked to: another version, another scheme, or not the one that was meant."""


@attrs.frozen
class Capabilities:
    """What a transport can do and promises, declared and never inferred.

    devices: kinds of memory that it can register, as torch names them: ``"cpu"``, ``"cuda"``.
    allocates: does :meth:`Transport.allocate` give memory that peers reach faster, or can reach at all?
    grants: are writes checked against grants on the side that is written to? Then revoking one is a fence.
    close_is_fence: once ``Closed`` came for a peer, can none of *its* writes reach our memory?
    death_is_fence: once ``PeerDown`` came for a peer, can none of *its* writes reach our memory?
    detects_death: does ``PeerDown`` come by itself when the peer's process dies?
    target_must_progress: does a write need the target's transport to run? False for one that is truly one-sided.
    max_message_bytes: longest message.
    """

    devices: frozenset[str]
    allocates: bool
    grants: bool
    close_is_fence: bool
    death_is_fence: bool
    detects_death: bool
    target_must_progress: bool
    max_message_bytes: int = 1 << 20


@attrs.frozen
class TransportContext:
    """What a transport is built from. May gain attributes in later versions; never loses one within a major.

    name: of this end, for messages and logs.
    address: where to listen, e.g. ``"tcp://127.0.0.1:0"``; empty for the transport's own choice. Port 0 lets the
        system choose one, and the hello says which.
    """

    name: str
    address: str = ""


@attrs.frozen
class Region:
    """Memory of this process that a transport may read and write. Ids count up from 0 in each transport, and mean the
    same to peers: they get them with the hello."""

    id: int
    address: int
    byte_count: int
    device: str = "cpu"


@attrs.frozen
class Peer:
    """One connection to one incarnation of another process.

    id: unique in this transport, never used again. identity: of that incarnation, unique everywhere. name: the
    other's, for messages.
    """

    id: int
    identity: str
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} ({self.identity[:8]})"


@attrs.frozen(eq=False)
class Fragments:
    """Runs of bytes to copy: ``byte_counts[i]`` bytes from ``sources[i]`` to ``destinations[i]``.

    Arrays are int64 ``[n]`` and never change. Offsets are from the beginning of a region: ``source_region`` is ours,
    ``destination_region`` the peer's. Destinations do not overlap.
    """

    sources: Int64Array
    destinations: Int64Array
    byte_counts: Int64Array
    source_region: int = 0
    destination_region: int = 0

    def __len__(self) -> int:
        return len(self.byte_counts)

    @property
    def byte_count(self) -> int:
        """Of all fragments together."""
        return int(self.byte_counts.sum())


@attrs.frozen
class Connected:
    """A peer can be used: ours, or one that connected to us. Comes before anything else about the peer."""

    peer: Peer


@attrs.frozen
class Message:
    """Something that the peer sent with :meth:`Transport.message`."""

    peer: Peer
    data: bytes


@attrs.frozen
class Done:
    """All bytes of a write are in the peer's memory, and nobody reads ours for it any more."""

    token: int


@attrs.frozen
class Failed:
    """A write did not happen as a whole, and nobody reads our memory for it any more.

    in_doubt: may some of its bytes have reached the peer, or still reach it? False only if nothing was ever sent, or if
    the peer said that it took nothing.
    """

    token: int
    reason: str
    in_doubt: bool


@attrs.frozen
class Revoked:
    """No write under this grant can reach our memory any more."""

    grant: int


@attrs.frozen
class PeerDown:
    """The peer is gone, or was never there. Once per peer, after which nothing about it comes but ``Failed`` of its
    writes and ``Closed``. It still has to be disconnected."""

    peer: Peer
    reason: str


@attrs.frozen
class Closed:
    """After ``disconnect``: we access nothing of the peer's any more, and every write to it has had its answer. The
    last event of a peer."""

    peer: Peer


Event: TypeAlias = Connected | Message | Done | Failed | Revoked | PeerDown | Closed


@runtime_checkable
class Transport(Protocol):
    """One end. Built from a :class:`TransportContext`; every instance is an incarnation of its own.

    Any thread may call any method, also while another one is in ``poll``; ``poll`` itself is for one at a time. No call
    but ``poll`` and ``close`` waits for anything. What goes wrong with a peer is an event, not an exception: only a
    caller's mistake raises.
    """

    #: The scheme, e.g. ``"tcp"``.
    scheme: str
    capabilities: Capabilities
    #: Of this incarnation, unique everywhere; what peers know us by.
    identity: str

    def allocate(self, byte_count: int, device: str = "cpu") -> Region:
        """Memory that lives until ``close``, zeroed and registered. Raises TransferError unless
        ``capabilities.allocates``, or when there is no such memory."""

    def register(self, address: int, byte_count: int, device: str = "cpu") -> Region:
        """Let the transport use the caller's memory, which must stay until ``close``. Peers may need
        ``allocate`` instead for memory that they write to. Raises TransferError for devices that are not declared, and
        after the first ``hello``."""

    def hello(self) -> bytes:
        """What others need to ``connect``: versions, identity, address, regions. Opaque, and may travel any way."""

    def connect(self, hello: bytes) -> Peer:
        """Begin to connect. ``Connected`` or ``PeerDown`` follows; writes and messages may be given before. To connect
        again to an incarnation whose connection lives gives the same peer.

        Raises IncompatibleError, with both values, when the hello shows that it cannot work.
        """

    def grant(self, peer: Peer, grant: int, region: Region, begins: Int64Array, ends: Int64Array) -> None:
        """Let ``peer`` write to these byte ranges of ``region`` until the grant is revoked. ``grant`` is the caller's
        number, never used twice. Called only where ``capabilities.grants``; others write unchecked."""

    def revoke(self, grant: int) -> None:
        """Take a grant back: ``Revoked`` follows, also for one that is not there. Called only as ``grant`` is."""

    def write(self, peer: Peer, fragments: Fragments, grant: int, token: int) -> None:
        """Copy ``fragments`` to the peer under a ``grant`` that it gave. ``Done`` or ``Failed`` follows, once.

        token: the caller's number, never used twice. Our memory is read until then. Without fragments, ``Done``
        follows all the same. Raises TransferError for ranges outside of our region.
        """

    def message(self, peer: Peer, data: bytes) -> None:
        """Send ``data``, which arrives after every earlier message and write to this peer, or not at all, when the peer
        goes down. Raises TransferError when it is longer than ``capabilities.max_message_bytes``."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call, in order. Waits, without spinning, up to ``timeout_s`` for the first one."""

    def wake(self) -> None:
        """Make the ``poll`` in progress, or the next one, return at once."""

    def disconnect(self, peer: Peer) -> None:
        """End a connection. Writes that have no answer yet fail, what has not been sent never is, then ``Closed``
        follows. Idempotent."""

    def close(self) -> None:
        """Give everything back: threads, descriptors, memory. Idempotent.

        Raises TransferError while writes have no answer; ``disconnect`` their peers first.
        """


def host_bytes(address: int, byte_count: int) -> npt.NDArray[np.uint8]:
    """Memory of this process as a uint8 array. The caller vouches for the address, and keeps the memory."""
    kind = ctypes.c_uint8 * byte_count
    return np.ctypeslib.as_array(kind.from_address(address))


def require_inside(fragments: Fragments, region: Region) -> None:
    """Raise TransferError unless all that is read lies in ``region``."""
    if not len(fragments):
        return
    begin = int(fragments.sources.min())
    end = int((fragments.sources + fragments.byte_counts).max())
    if begin < 0 or end > region.byte_count or int(fragments.byte_counts.min()) < 0:
        raise TransferError(
            f"a write reads bytes {begin}..{end} of region {region.id}, which has {region.byte_count}",
            hint="compute fragments from the page table of the memory that was registered",
        )


def require_short(data: bytes, capabilities: Capabilities) -> None:
    """Raise TransferError unless a message may be so long."""
    if len(data) > capabilities.max_message_bytes:
        raise TransferError(
            f"a message of {len(data)} bytes; {capabilities.max_message_bytes} are the most", hint="split it"
        )


def require_answered(count: int) -> None:
    """For ``close``: raise TransferError while ``count`` writes have no answer."""
    if count:
        raise TransferError(f"close() while {count} write(s) have no answer", hint="disconnect() their peers first")


def covers(begins: Int64Array, ends: Int64Array, destinations: Int64Array, byte_counts: Int64Array) -> bool:
    """Does every run of bytes lie in one of these ranges, which ascend and are disjoint? Takes any numbers, as they
    come from a peer."""
    if not len(destinations):
        return True
    if not len(begins):
        return False
    at = np.searchsorted(begins, destinations, side="right") - 1
    inside = (at >= 0) & (byte_counts >= 0) & (byte_counts <= ends[at] - destinations)
    return bool(inside.all())
