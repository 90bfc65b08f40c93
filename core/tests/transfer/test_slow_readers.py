"""Large writes are cut, so that a peer which takes its time is not taken for dead."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream
from kvist.testing.transfer.values import Model, Rank
from kvist.testing.transfer.world import memory_of, new_transport
from kvist.transfer import outgoing
from kvist.transfer import tcp_wire as wire
from kvist.transfer.background import Background
from kvist.transfer.cutting import cut
from kvist.transfer.outcome import DONE, Patience
from kvist.transfer.transceiver import Transceiver
from kvist.transfer.transport import Fragments

LENGTH = 640
#: Bytes per second that the network lets through towards the receiver.
SPEED = 2 << 20


def copies(parts: list[Fragments]) -> list[tuple[int, int]]:
    """Source and destination of every byte, in order."""
    return [
        (source + at, destination + at)
        for part in parts
        for source, destination, size in zip(
            part.sources.tolist(), part.destinations.tolist(), part.byte_counts.tolist()
        )
        for at in range(size)
    ]


@pytest.mark.parametrize("most_fragments", [None, 1, 3])
@pytest.mark.parametrize("most_bytes", [1, 7, 64, 1000])
def test_parts_are_the_same_copies(most_bytes: int, most_fragments: int | None) -> None:
    rng = np.random.default_rng(most_bytes)
    for count in (0, 1, 2, 20):
        sizes = rng.integers(0, 40, count)
        whole = Fragments(rng.integers(0, 9999, count), rng.integers(0, 9999, count), sizes, 1, 2)
        parts = list(cut(whole, most_bytes, most_fragments))
        assert parts and copies(parts) == copies([whole])
        assert all(part.byte_count <= most_bytes for part in parts)
        assert most_fragments is None or all(len(part) <= most_fragments for part in parts)
        assert all((part.source_region, part.destination_region) == (1, 2) for part in parts)


class SlowNetwork:
    """Passes one connection on to a port of this host; what goes back to the one who connected takes its time."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._there = port
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.socket()
        # Without a small buffer the kernel would take in a large part of it at once.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        far.connect(("127.0.0.1", self._there))
        self._sockets += [near, far]
        back = threading.Thread(target=self._pass, args=(far, near, SPEED), daemon=True)
        self._threads.append(back)
        back.start()
        self._pass(near, far, 0)

    def _pass(self, source: socket.socket, target: socket.socket, speed: int) -> None:
        try:
            while data := source.recv(32 << 10):
                if speed:
                    time.sleep(len(data) / speed)
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            shut(each)
        for thread in self._threads:
            thread.join(5)


def shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


class Side:
    def __init__(self, name: str, patience: Patience) -> None:
        transport = new_transport("kvist.transfer.tcp:TcpTransport", name)
        row = RowFormat((4, 512), "int16")
        layer = Layer(0, [Stream(each, row, History(), sharding=Heads(4)) for each in ("k", "v")])
        regions = []

        def memory(byte_count: int) -> np.ndarray:
            region, made = memory_of(transport, byte_count)
            regions.append(region)
            return made

        self.rank = Rank(Model(CacheSpec((layer,), 16, "slow"), length=LENGTH), memory=memory, pages=64)
        self.transceiver = Transceiver(transport, regions[0], self.rank.table, patience=patience)


def test_a_reader_that_takes_longer_than_the_patience_with_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB at 2 MB/s, where a second of silence is death."""
    monkeypatch.setattr(outgoing, "PART_BYTES", 256 << 10)
    patience = Patience(request_s=30.0, alive_s=0.1, silent_s=1.0, settle_s=2.0)
    sender, receiver = Side("sender", patience), Side("receiver", patience)
    sender.rank.fill()
    hello = msgspec.msgpack.decode(sender.transceiver.hello(), type=wire.Hello)
    network = SlowNetwork(hello.port)
    through = msgspec.msgpack.encode(msgspec.structs.replace(hello, port=network.port))
    began_s = time.monotonic()
    with Background(sender.transceiver), Background(receiver.transceiver):
        sending = sender.transceiver.send("r")
        sender.transceiver.add(sending, sender.rank.pages, 0, LENGTH, last=True)
        incoming = receiver.transceiver.receive("r", receiver.rank.pages, LENGTH, [through])
        while not (incoming.quiescent and sending.quiescent) and time.monotonic() < began_s + 20:
            time.sleep(0.01)
    assert (incoming.outcome, sending.outcome) == (DONE, DONE)
    assert sending.byte_count == incoming.byte_count == LENGTH * 2 * 4 * 512 * 2
    assert time.monotonic() - began_s > 2.0, "the network was not slow"
    for begin, content in receiver.rank.parts():
        assert np.array_equal(receiver.rank.memory[begin : begin + len(content)], content)
    for side in (receiver, sender):
        side.transceiver.close()
    network.close()
