"""Frames on a TCP connection, and bytes that pass through a socket without a copy of their own."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs
import msgspec
import numpy as np

from kvist.errors import TransferError
from kvist.transfer.transport import WIRE_VERSION, IncompatibleError, Int64Array, Peer

# Kinds of frames. A write has ranges, the others none; what follows is its bytes, a reason, or data.
HELLO, WRITE, ANSWER, MESSAGE = range(1, 5)
# Codes of an answer.
DONE, REFUSED, DOUBTFUL = range(3)

#: kind, code, region, count of ranges, token, grant, bytes that follow the ranges.
_HEADER = struct.Struct("<BBHIqqQ")
HEADER_BYTES = _HEADER.size
#: Of a range: its begin and its length, int64.
RANGE_BYTES = 16
MOST_RANGES = 1 << 24

#: One call moves about this many bytes, in at most this many parts (IOV_MAX of Linux).
_STEP_BYTES = 4 << 20
_STEP_PARTS = 1024
_SCRATCH = memoryview(bytearray(1 << 20))


class ToldRegion(msgspec.Struct, frozen=True):
    """What peers need to know of a region. name: how another process attaches to it; empty if it cannot.
    inode: of what has that name."""

    byte_count: int
    name: str = ""
    inode: int = 0


class Hello(msgspec.Struct, frozen=True):
    """What one end says of itself, before it is connected and again when it is."""

    version: int
    scheme: str
    identity: str
    name: str
    host: str
    port: int
    regions: tuple[ToldRegion, ...]


class Greeting(msgspec.Struct, frozen=True):
    """The first frame in each direction. meant: the identity that it is for."""

    hello: Hello
    meant: str


def read_hello(data: bytes, scheme: str) -> Hello:
    """Raises IncompatibleError unless it is one that ``scheme`` of this version can talk to."""
    try:
        hello = msgspec.msgpack.decode(data, type=Hello)
    except msgspec.DecodeError as error:
        raise IncompatibleError(f"this is no hello of a {scheme} transport: {error}") from error
    require_same(hello, scheme)
    return hello


def require_same(hello: Hello, scheme: str) -> None:
    """Raise IncompatibleError unless ``hello`` is of this version and scheme."""
    if (hello.version, hello.scheme) != (WIRE_VERSION, scheme):
        raise IncompatibleError(
            f"{hello.name!r} speaks version {hello.version} of {hello.scheme!r}, we speak version {WIRE_VERSION} of "
            f"{scheme!r}",
            hint="run the same version of kvist on both sides",
        )


def read_greeting(data: bytearray, scheme: str) -> Greeting:
    """Raises TransferError for what is none, or of another version."""
    try:
        greeting = msgspec.msgpack.decode(data, type=Greeting)
    except msgspec.DecodeError as error:
        raise TransferError(f"it sent a hello that cannot be read: {error}") from error
    require_same(greeting.hello, scheme)
    return greeting


class Header(msgspec.Struct, frozen=True):
    """Of a frame, as in the struct above."""

    kind: int
    code: int = 0
    region: int = 0
    count: int = 0
    token: int = 0
    grant: int = 0
    byte_count: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(self.kind, self.code, self.region, self.count, self.token, self.grant, self.byte_count)

    @classmethod
    def unpack(cls, data: bytearray, longest: int) -> Header:
        """Raises TransferError for what is no frame of this version; ``longest``: of what is no write."""
        header = cls(*_HEADER.unpack(data))
        if not HELLO <= header.kind <= MESSAGE or header.count > MOST_RANGES:
            raise TransferError(f"it sent a frame that cannot be read: kind {header.kind}, {header.count} ranges")
        if header.kind != WRITE and (header.byte_count > longest or header.count):
            raise TransferError(f"it sent a frame of {header.byte_count} bytes; {longest} are the most")
        return header


class Run:
    """Bytes that are to pass through a socket, in parts that lie anywhere. left: how many have not yet."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._replace(parts)

    def _replace(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._at = 0
        self.left = sum(map(len, self._parts))
        mean = self.left // max(1, len(self._parts)) + 1
        self._step = min(_STEP_PARTS, _STEP_BYTES // mean + 8)

    def send(self, connection: socket.socket) -> int:
        """One call's worth. Raises BlockingIOError when nothing can be sent now."""
        count = connection.sendmsg(self._parts[self._at : self._at + self._step])
        self._passed(count)
        return count

    def receive(self, connection: socket.socket) -> int:
        """One call's worth; 0 at the end of the connection. Raises BlockingIOError when nothing is there."""
        count = connection.recvmsg_into(self._parts[self._at : self._at + self._step])[0]
        self._passed(count)
        return count

    def discard(self) -> None:
        """Let what is still to come touch no memory."""
        whole, rest = divmod(self.left, len(_SCRATCH))
        self._replace([_SCRATCH] * whole + [_SCRATCH[:rest]])

    def _passed(self, count: int) -> None:
        self.left -= count
        while count:
            part = self._parts[self._at]
            if count < len(part):
                self._parts[self._at] = part[count:]
                return
            count -= len(part)
            self._at += 1


def discarded(byte_count: int) -> Run:
    """To take in bytes that nobody wants."""
    run = Run([])
    run.left = byte_count
    run.discard()
    return run


def parts_of(memory: memoryview, begins: Int64Array, byte_counts: Int64Array) -> list[memoryview]:
    """Ranges of a region's memory."""
    ends = begins + byte_counts
    return [memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]


def packed_ranges(begins: Int64Array, byte_counts: Int64Array) -> bytes:
    """Ranges for the wire."""
    return np.stack((begins, byte_counts), axis=1).astype("<i8", copy=False).tobytes()


def unpacked_ranges(data: bytearray) -> tuple[Int64Array, Int64Array]:
    """``(begins, byte_counts)`` from the wire."""
    pairs = np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


class Item(Protocol):
    """One thing that a connection has to send, in order. token: of a write, else ``None``. begun: has any byte of it
    gone? answered: will the other end say what became of the write? Then it counts as unanswered until it does."""

    token: int | None
    begun: bool
    answered: bool

    def step(self, connection: socket.socket) -> bool:
        """Go on a little; is that all? Raises BlockingIOError when nothing can be sent now."""


class FrameItem:
    """A frame."""

    answered = True

    def __init__(self, header: Header, *parts: memoryview, token: int | None = None) -> None:
        self.token = token
        self.begun = False
        self._run = Run([memoryview(header.pack()), *parts])

    def step(self, connection: socket.socket) -> bool:
        self.begun = self._run.send(connection) > 0 or self.begun
        return not self._run.left


def data_item(kind: int, data: bytes) -> FrameItem:
    """A frame that is nothing but data."""
    return FrameItem(Header(kind, byte_count=len(data)), memoryview(data))


@attrs.define(eq=False)
class Link:
    """One connection. peer: ``None`` until the one who connected has said who it is. told: its hello, once it came.

    out: what is to be sent, in order; waiting: until it has been told. writes: those without an answer. run: what is
    coming in, one of frames. landing: the grant under which it goes to memory; refused: why it does not, doubt: but has
    in part. failed: why nothing is sent any more. down: nothing comes in either. mapped: regions of the peer's.
    """

    socket: socket.socket
    peer: Peer | None = None
    dialling: bool = False
    told: Hello | None = None
    out: deque[Item] = attrs.Factory(deque)
    waiting: deque[Item] = attrs.Factory(deque)
    writes: dict[int, Item] = attrs.Factory(dict)
    frames: Iterator[Run] = attrs.field(init=False)
    run: Run = attrs.field(init=False)
    landing: int | None = None
    refused: str = ""
    doubt: bool = False
    down: bool = False
    failed: str = ""
    watched: int = 0
    mapped: dict[int, mmap.mmap] = attrs.Factory(dict)


def family(host: str) -> socket.AddressFamily:
    """Of an address that is a number."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def reason_of(error: OSError) -> str:
    """In words, without what libraries add to them."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
