"""The tcp and shm transports beyond their contract: frames that make no sense, addresses, revoking within a frame."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

import msgspec
import numpy as np
import pytest
import torch

from kvist.errors import SpecError, TransferError
from kvist.memory.device import DeviceMemory
from kvist.plugins import load, plan
from kvist.registry import Registry
from kvist.spec import History
from kvist.testing.transfer.author import Ends, TransportAuthor
from kvist.testing.values import make_layout, make_spec
from kvist.transfer import tcp_wire as wire
from kvist.transfer.shm import ShmTransport
from kvist.transfer.tcp import TcpTransport
from kvist.transfer.transport import (
    Connected,
    Done,
    Failed,
    Fragments,
    IncompatibleError,
    PeerDown,
    Revoked,
    TransportContext,
    covers,
    host_bytes,
)


class Tcp(TransportAuthor):
    factory = "kvist.transfer.tcp:TcpTransport"


class Shm(TransportAuthor):
    factory = "kvist.transfer.shm:ShmTransport"


@pytest.mark.parametrize(("name", "kind"), [("tcp", TcpTransport), ("shm", ShmTransport)])
def test_records(name, kind):
    entry = Registry(load(plan({}))).transceiver(name)
    assert entry.resolve(entry.info.factory) is kind and entry.info.schemes == (name,)


class Raw:
    """A peer that says what it likes."""

    def __init__(self, hello, **changes):
        told = msgspec.msgpack.decode(hello, type=wire.Hello)
        self.told = told
        self.socket = socket.create_connection((told.host, told.port))
        self.socket.settimeout(5)
        ours = msgspec.structs.replace(told, identity="raw", name="raw", **changes)
        self.greeting = msgspec.msgpack.encode(wire.Greeting(ours, told.identity))

    def greet(self):
        self.send(wire.Header(wire.HELLO, byte_count=len(self.greeting)), self.greeting)

    def send(self, header, *data):
        self.socket.sendall(header.pack() + b"".join(data))

    def closed(self):
        with self.socket, contextlib.suppress(ConnectionResetError):
            while self.socket.recv(1 << 16):
                pass
        return True


@pytest.fixture
def end():
    memory = np.zeros(1 << 20, np.uint8)
    transport = TcpTransport(TransportContext("end"))
    region = transport.register(memory.ctypes.data, len(memory))
    yield transport, region, memory
    transport.close()


def met(end):
    raw = Raw(end[0].hello())
    raw.greet()
    (connected,) = end[0].poll(5)
    return raw, connected.peer


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (wire.Header(9), b"", "it sent a frame that cannot be read: kind 9, 0 ranges"),
        (wire.Header(wire.WRITE, count=1 << 30), b"", f"it sent a frame that cannot be read: kind 2, {1 << 30} ranges"),
        (
            wire.Header(wire.MESSAGE, byte_count=1 << 30),
            b"",
            f"it sent a frame of {1 << 30} bytes; 1048576 are the most",
        ),
        (wire.Header(wire.HELLO), b"", "it sent a hello in the midst, or something else before it"),
        (
            wire.Header(wire.WRITE, grant=1, count=1, byte_count=9),
            struct.pack("<qq", 0, 8),
            "it sent a write whose ranges do not add up",
        ),
    ],
)
def test_a_peer_that_cannot_be_understood(end, header, data, reason):
    transport, region, memory = end
    raw, peer = met(end)
    transport.grant(peer, 1, region, np.array([0]), np.array([len(memory)]))
    time.sleep(0.02)
    raw.send(header, data)
    assert raw.closed()
    assert transport.poll(5) == [PeerDown(peer, reason)]
    assert not memory.any()
    transport.disconnect(peer)


@pytest.mark.parametrize("begin", [-1, -(1 << 63), (1 << 63) - 1, 1 << 20])
@pytest.mark.parametrize("size", [8, -8, (1 << 63) - 1])
def test_ranges_of_a_peer_are_never_trusted(end, begin, size):
    transport, region, memory = end
    raw, peer = met(end)
    transport.grant(peer, 1, region, np.array([0]), np.array([len(memory)]))
    time.sleep(0.02)
    raw.send(
        wire.Header(wire.WRITE, token=5, grant=1, count=1, byte_count=8), struct.pack("<qq", begin, size), b"x" * 8
    )
    while raw.socket.recv(1, socket.MSG_PEEK) and not memory.any():
        header = wire.Header.unpack(bytearray(raw.socket.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)), 1 << 20)
        body = raw.socket.recv(header.byte_count, socket.MSG_WAITALL)
        if header.kind == wire.ANSWER:
            assert (header.code, header.token, body) == (wire.REFUSED, 5, b"the write goes beyond grant 1")
            break
    assert not memory.any()
    raw.socket.close()
    transport.disconnect(peer)


def test_strangers_are_turned_away(end):
    transport, _, _ = end
    nobody = Raw(transport.hello())
    nobody.socket.sendall(b"GET / HTTP/1.1\r\nHost: kvist\r\nAccept: everything\r\n\r\n")
    assert nobody.closed()
    other = Raw(transport.hello(), version=99)
    other.greet()
    assert other.closed()
    wrong = Raw(transport.hello())
    wrong.greeting = msgspec.msgpack.encode(wire.Greeting(wrong.told, "somebody else"))
    wrong.greet()
    assert wrong.closed()
    assert transport.poll(0.05) == []


def test_a_grant_is_revoked_in_the_midst_of_a_frame(end):
    transport, region, memory = end
    raw, peer = met(end)
    transport.grant(peer, 1, region, np.array([0]), np.array([len(memory)]))
    time.sleep(0.02)
    half = len(memory) // 2
    raw.send(
        wire.Header(wire.WRITE, token=5, grant=1, count=1, byte_count=len(memory)),
        struct.pack("<qq", 0, len(memory)),
        b"x" * half,
    )
    until_s = time.monotonic() + 5
    while memory[half - 1] == 0 and time.monotonic() < until_s:
        time.sleep(0.001)
    transport.revoke(1)
    assert transport.poll(5) == [Revoked(1)]
    memory[:] = 7
    raw.socket.sendall(b"y" * half)
    # The frame is taken in to its end, what follows is understood, and memory is left alone.
    raw.send(wire.Header(wire.MESSAGE, byte_count=5), b"hello")
    (message,) = transport.poll(5)
    assert message.data == b"hello" and (memory == 7).all()
    transport.disconnect(peer)
    raw.socket.close()


@pytest.mark.parametrize("kind", [TcpTransport, ShmTransport])
def test_addresses(kind):
    scheme = kind.scheme
    one = kind(TransportContext("one", f"{scheme}://127.0.0.1:0"))
    with pytest.raises(TransferError) as error:
        kind(TransportContext("two", f"{scheme}://127.0.0.1:{one._port}"))
    assert str(error.value) == (
        f"cannot listen at 127.0.0.1:{one._port}: Address already in use\n"
        "hint: port 0 lets the system choose a free one"
    )
    for address in ("udp://127.0.0.1:0", f"{scheme}://0.0.0.0:0", "127.0.0.1:0"):
        with pytest.raises(TransferError, match="is no address of a"):
            kind(TransportContext("two", address))
    other = {"tcp": ShmTransport, "shm": TcpTransport}[scheme](TransportContext("other"))
    with pytest.raises(IncompatibleError) as error:
        one.connect(other.hello())
    assert str(error.value) == (
        f"'other' speaks version 1 of '{other.scheme}', we speak version 1 of '{scheme}'\n"
        "hint: run the same version of kvist on both sides"
    )
    one.close(), other.close()
    with pytest.raises(TransferError, match="is closed"):
        one.connect(b"")


def test_memory():
    tcp = TcpTransport(TransportContext("t"))
    with pytest.raises(TransferError, match="allocates no memory"):
        tcp.allocate(10)
    with pytest.raises(TransferError, match="has no memory on 'cuda'"):
        tcp.register(0, 10, "cuda")
    tcp.hello()
    with pytest.raises(TransferError, match="after hello"):
        tcp.register(0, 10)
    tcp.close()
    shm = ShmTransport(TransportContext("s"))
    with pytest.raises(TransferError, match="0 bytes cannot be allocated"):
        shm.allocate(0)
    with pytest.raises(TransferError, match="of shared memory cannot be had"):
        shm.allocate(1 << 60)
    shm.close()


def test_memory_that_is_not_shared():
    ends = Ends(Shm(), 4096)
    own = np.zeros(64, np.uint8)
    other = ShmTransport(TransportContext("other"))
    other.register(own.ctypes.data, 64)
    peer = ends.a.transport.connect(other.hello())
    ends.a.transport.write(peer, Fragments(*(np.array([each]) for each in (0, 0, 8))), 0, 1)
    ends.a.transport.write(ends.to_b, Fragments(*(np.array([each]) for each in (0, 4090, 8))), 0, 2)
    ends.a.transport.write(ends.to_b, Fragments(*(np.array([each]) for each in (0, 0, 8)), 0, 3), 0, 3)
    assert ends.answer(1) == Failed(1, "that memory is not shared", in_doubt=False)
    assert ends.answer(2) == Failed(2, "a write goes to bytes 4090..4098 of a region of 4096", in_doubt=False)
    assert ends.answer(3) == Failed(3, f"{ends.to_b} has no region 3", in_doubt=False)
    ends.a.transport.disconnect(peer)
    other.close()
    ends.end()


def named_memory() -> list[str]:
    """Of anybody but UCX, whose tests may run at the same time."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("ucx_"))


def test_shared_memory_has_no_name_and_goes_with_its_users():
    before = named_memory()
    ends = Ends(Shm(), 4096)
    ends.write(1, (0, 0, 8))
    assert ends.answer(1) == Done(1)
    assert named_memory() == before
    ends.end()
    with open("/proc/self/maps") as maps:
        assert "memfd:kvist" not in maps.read()


def test_a_cache_in_shared_memory():
    layout = make_layout(make_spec(4, History()), 8)
    transport = ShmTransport(TransportContext("cache"))
    region = transport.allocate(layout.arena_bytes)
    shared = host_bytes(region.address, region.byte_count)
    memory = DeviceMemory(layout, storage=torch.from_numpy(shared))
    memory.pages(0)[3] = 9
    size = layout.groups[0].page_bytes
    assert (shared[3 * size : 4 * size] == 9).all() and not shared[: 3 * size].any()
    for storage, reason in (
        (torch.zeros(8, dtype=torch.uint8), f"the storage has 8 bytes, the arena needs {layout.arena_bytes}"),
        (
            torch.zeros(8),
            "the storage is torch.float32 [8] on cpu\nhint: pass a one-dimensional tensor of uint8 on cpu",
        ),
    ):
        with pytest.raises(SpecError) as error:
            DeviceMemory(layout, storage=storage)
        assert str(error.value) == reason
    del memory, shared
    transport.close()


def test_covers():
    begins, ends = np.array([10, 30]), np.array([20, 40])
    for begin, size, so in (
        (10, 10, True),
        (30, 1, True),
        (9, 2, False),
        (19, 2, False),
        (20, 1, False),
        (35, 6, False),
    ):
        assert covers(begins, ends, np.array([begin]), np.array([size])) is so
    assert covers(begins[:0], ends[:0], begins[:0], begins[:0]) and not covers(begins[:0], ends[:0], begins, ends)


def test_a_defect_is_raised_where_somebody_polls(end):
    transport, _, _ = end
    transport._io.tell(lambda: 1 / 0)
    with pytest.raises(TransferError) as error:
        transport.poll(5)
    assert str(error.value) == (
        "the transport has stopped: ZeroDivisionError: division by zero\n"
        "hint: this is a defect of the transport; close it and make a new one"
    )


def test_nobody_listens(end):
    gone = TcpTransport(TransportContext("gone"))
    hello = gone.hello()
    gone.close()
    peer = end[0].connect(hello)
    assert end[0].poll(5) == [PeerDown(peer, "it cannot be reached: Connection refused")]
    assert end[0].connect(hello) != peer
    (down,) = end[0].poll(5)
    for each in (peer, down.peer):
        end[0].disconnect(each)
    assert Connected not in {type(event) for event in end[0].poll(1)}
