"""What two ends of this transport tell each other, beside the bytes of caches."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs
import msgspec
import numpy as np

from kvist.transfer.transport import WIRE_VERSION, IncompatibleError, Int64Array
from kvist_transceiver_ucx.library import Version, dotted
from kvist_transceiver_ucx.place import Place

SCHEME = "ucx"

#: kind, key of the connection at the receiver, number of the message in its connection
_HEADER = struct.Struct("<BQQ")

#: grant, region, number in the write, is it the last one, fragments
_FRAME = struct.Struct("<qII?I")

GREETING, WELCOME, MESSAGE, FAREWELL, WRITE, ANSWER = 1, 2, 3, 4, 5, 6


class RemoteRegion(msgspec.Struct, frozen=True):
    """Memory that a peer may write to, on a ``device``. ``allocated``: by the transport, so that it can be shared."""

    address: int
    allocated: bool
    byte_count: int
    key: bytes
    device: str


class Hello(msgspec.Struct, frozen=True):
    """One end. ``worker``: the address of its worker; ``shares_memory``: may it use lanes through shared memory?"""

    version: int
    scheme: str
    identity: str
    name: str
    ucx: tuple[int, int, int]
    place: Place
    shares_memory: bool
    worker: bytes
    regions: tuple[RemoteRegion, ...]


class Greeting(msgspec.Struct, frozen=True):
    """The first message of a connection. ``meant``: the identity that it is for; ``key``: of the connection, at the
    sender."""

    meant: str
    key: int
    hello: Hello


class Welcome(msgspec.Struct, frozen=True):
    """The answer. ``key``: of the connection, at the sender."""

    key: int


class Farewell(msgspec.Struct, frozen=True):
    """The sender accesses nothing of the receiver's over this connection any more. ``key``: of it, at the sender."""

    key: int
    reason: str


class Answer(msgspec.Struct, frozen=True):
    """To a write that the receiver copies. ``refused``: why not; empty if it has. ``in_doubt``: of one that was
    refused, is some of it there?"""

    token: int
    refused: str
    in_doubt: bool


@attrs.frozen(eq=False)
class Frame:
    """One message of a write, before its bytes. index: its number in the write; last: is it the last one? destinations,
    byte_counts: int64 ``[n]``."""

    grant: int
    region: int
    index: int
    last: bool
    destinations: Int64Array
    byte_counts: Int64Array

    def packed(self, content: Sequence[memoryview]) -> bytes:
        """With its bytes."""
        head = _FRAME.pack(self.grant, self.region, self.index, self.last, len(self.destinations))
        return b"".join((head, self.destinations.tobytes(), self.byte_counts.tobytes(), *content))


def read_frame(packed: bytes) -> tuple[Frame, memoryview]:
    """A message of a write, and its bytes. Raises struct.error and ValueError."""
    grant, region, index, last, count = _FRAME.unpack_from(packed)
    body = memoryview(packed)[_FRAME.size :]
    destinations = np.frombuffer(body, np.int64, count)
    byte_counts = np.frombuffer(body, np.int64, count, 8 * count)
    return Frame(grant, region, index, last, destinations, byte_counts), body[16 * count :]


encode = msgspec.msgpack.encode


def header(kind: int, key: int = 0, number: int = 0) -> bytes:
    """Of a message."""
    return _HEADER.pack(kind, key, number)


def parse(packed: bytes) -> tuple[int, int, int]:
    """``(kind, key, number)``; raises struct.error."""
    return _HEADER.unpack(packed)


def read_hello(packed: bytes, version: Version, place: Place, *, shares_memory: bool) -> Hello:
    """The other end's hello. Raises IncompatibleError when we could not talk to it."""
    try:
        hello = msgspec.msgpack.decode(packed, type=Hello)
    except msgspec.DecodeError as error:
        raise IncompatibleError(f"this is no hello of a UCX transport: {error}") from error
    require_compatible(hello, version, place, shares_memory=shares_memory)
    return hello


def require_compatible(hello: Hello, version: Version, place: Place, *, shares_memory: bool) -> None:
    """Raise IncompatibleError unless both ends speak the same."""
    if (hello.version, hello.scheme) != (WIRE_VERSION, SCHEME):
        raise IncompatibleError(
            f"{hello.name!r} speaks version {hello.version} of {hello.scheme!r}, we speak version {WIRE_VERSION} of "
            f"{SCHEME!r}",
            hint="run the same version of kvist on both sides",
        )
    if hello.ucx[:2] != version[:2]:
        # Addresses and memory keys of other minor versions were seen to be refused, in both directions.
        raise IncompatibleError(
            f"{hello.name!r} uses UCX {dotted(hello.ucx)}, we use UCX {dotted(version)}",
            hint="install the same minor version of UCX on both sides, or use tcp",
        )
    if hello.place.machine != place.machine or hello.place.processes == place.processes:
        return
    if hello.shares_memory and shares_memory:
        raise IncompatibleError(
            f"{hello.name!r} may share memory with us, but its processes cannot be seen from here: nobody could tell "
            "when its writes have ended",
            hint="run both in one namespace of processes, or set UCX_TLS=tcp on one side",
        )
