"""A process with a UCX transport, told by a test what to do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvist.transfer.transport import Connected, Event, Fragments, Peer, Region, TransportContext, host_bytes
from kvist_transceiver_ucx.transport import UcxTransport

ANSWER_S = 15.0


class End:
    """A transport with two regions: 0 is its own memory, 1 is of the caller's. Where there are grants, whoever connects
    gets one for each region, with its number. seen: all events."""

    def __init__(self, name: str, settings: Mapping[str, str], byte_count: int) -> None:
        self.transport = UcxTransport(TransportContext(name), settings=settings)
        self.regions: list[Region] = [self.transport.allocate(byte_count)]
        self._own = np.zeros(byte_count, np.uint8)
        self.regions.append(self.transport.register(self._own.ctypes.data, byte_count))
        self.memory = [host_bytes(each.address, byte_count) for each in self.regions]
        self.seen: list[Event] = []

    def until(self, so: Callable[[], Any], limit_s: float = ANSWER_S) -> Any:
        """Poll until something is so; fails the test otherwise."""
        until_s = time.monotonic() + limit_s
        while not (found := so()):
            assert time.monotonic() < until_s, (
                f"not within {limit_s:g} s; seen: {[type(e).__name__ for e in self.seen]}"
            )
            self.poll(0.02)
        return found

    def poll(self, timeout_s: float = 0.0) -> None:
        events = self.transport.poll(timeout_s)
        for event in events:
            if isinstance(event, Connected) and self.transport.capabilities.grants:
                for region in self.regions:
                    everything = np.zeros(1, np.int64), np.array([region.byte_count])
                    self.transport.grant(event.peer, region.id, region, *everything)
        self.seen += events

    def meet(self, other: OtherProcess) -> Peer:
        """Connect, so that both can write."""
        peer = self.transport.connect(other.hello)
        self.first(Connected, peer)
        self.until(lambda: other.call("knows", self.transport.identity))
        return peer

    def first(self, kind: type, peer: Peer | None = None, limit_s: float = ANSWER_S) -> Any:
        """The first event of a kind (of a peer)."""
        return self.until(lambda: self.all(kind, peer), limit_s)[0]

    def all(self, kind: type, peer: Peer | None = None) -> list[Any]:
        return [e for e in self.seen if isinstance(e, kind) and (peer is None or e.peer == peer)]

    def answer(self, token: int, limit_s: float = ANSWER_S) -> Any:
        return self.until(lambda: [e for e in self.seen if getattr(e, "token", None) == token], limit_s)[0]


def fragments(copies: list[tuple[int, int, int]], source: int = 0, destination: int = 0) -> Fragments:
    """From ``(source, destination, bytes)``."""
    columns = np.array(copies, np.int64).reshape(-1, 3).T
    return Fragments(*(each.copy() for each in columns), source, destination)


class OtherProcess:
    """Use it as a context manager, which ends the process in any case."""

    def __init__(self, settings: Mapping[str, str], byte_count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(dict(settings), byte_count, theirs), daemon=True)
        self.process.start()
        self.hello: bytes = self._receive()

    def call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._receive()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def _receive(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the other process does not answer"
        return self._pipe.recv()

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.signal(signal.SIGKILL) if self.process.is_alive() else None
        self.process.join(10)
        self._pipe.close()


def _main(settings: dict[str, str], byte_count: int, pipe: Connection) -> None:
    end = End("other", settings, byte_count)
    pipe.send(end.transport.hello())
    while True:
        end.poll(0.005)
        while pipe.poll(0):
            name, arguments = pipe.recv()
            pipe.send(_do(end, name, *arguments))


def _do(end: End, name: str, *arguments: Any) -> Any:
    if name == "bytes":
        region, begin, count = arguments
        return end.memory[region][begin : begin + count].tobytes()
    if name == "seen":
        end.poll()
        return end.seen
    if name == "knows":
        end.poll()
        return any(isinstance(each, Connected) and each.peer.identity == arguments[0] for each in end.seen)
    if name == "connect":
        return end.transport.connect(*arguments)
    if name == "write":
        peer, made, token = arguments
        return end.transport.write(peer, made, made.destination_region, token)
    if name == "disconnect":
        return end.transport.disconnect(*arguments)
    raise AssertionError(name)
