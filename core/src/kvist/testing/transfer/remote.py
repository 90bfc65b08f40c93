"""A process of its own that sends or receives, told by a test what to do, and killed or stopped by it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy as np

from kvist.spec import CacheSpec, Heads, History, Layer, Retention, RowFormat, Stream, Window, ceil_div
from kvist.step import IntArray
from kvist.testing.transfer.values import Bytes, Model, Rank
from kvist.testing.transfer.world import LENGTH, memory_of, new_transport
from kvist.transfer.incoming import Incoming
from kvist.transfer.outcome import Patience
from kvist.transfer.outgoing import Outgoing
from kvist.transfer.switchboard import Session
from kvist.transfer.transceiver import Transceiver

#: Short, so that tests are.
PATIENCE = Patience(request_s=20.0, alive_s=0.25, silent_s=2.0, settle_s=2.0, remember_s=2.0)
#: Requests that a receiver has open at once, each with pages of its own.
PLACES = 6
#: What is in pages that belong to no request.
POISON = 0xEE
_CALL_S = 20.0


def big_model() -> Model:
    """Of 0.7 MB per request, so that there is something to be interrupted."""
    row = RowFormat((4, 512), "int16")
    retentions: list[Retention] = [History(), Window(12)]
    layers = [
        Layer(number, [Stream(name, row, retention, sharding=Heads(4)) for name in ("k", "v")])
        for number, retention in enumerate(retentions)
    ]
    return Model(CacheSpec(layers, 8, "big"), length=LENGTH)


class Remote:
    """The parent's end. Use it as a context manager, which ends the process in any case.

    factory: of the transport. fill: does it have the request's bytes, to send them?
    """

    def __init__(self, factory: str, name: str, *, fill: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(factory, name, fill, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any, timeout_s: float = _CALL_S) -> Any:
        """Let it do something. Raises AssertionError with what went wrong there."""
        self._connection.send((name, arguments))
        assert self._connection.poll(timeout_s), f"the process did not answer {name!r} within {timeout_s:g} s"
        ok, result = self._connection.recv()
        assert ok, f"in the process: {result}"
        return result

    def until(self, name: str, *arguments: Any, timeout_s: float) -> None:
        """Wait until this is so there."""
        until_s = time.monotonic() + timeout_s
        while not self.call(name, *arguments):
            assert time.monotonic() < until_s, f"{name} was not so within {timeout_s:g} s: {self.call('state')}"
            time.sleep(0.01)

    def kill(self) -> None:
        """At once, wherever it is."""
        self.process.kill()
        self.process.join(10)

    def stop(self) -> None:
        """It does nothing until it may go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
        self._connection.close()
        self.process.close()


@attrs.define
class _Place:
    """Pages for one request at a time. session: that is to write, or is writing to them."""

    pages: list[IntArray]
    session: Incoming | None = None


class _Child:
    def __init__(self, factory: str, name: str, fill: bool) -> None:
        transport = new_transport(factory, name)
        found: list[Any] = []

        def memory(byte_count: int) -> Bytes:
            region, made = memory_of(transport, byte_count)
            found.append(region)
            return made

        self.rank = Rank(big_model(), memory=memory, pages=16 * PLACES)
        self.transceiver = Transceiver(transport, found[0], self.rank.table, patience=PATIENCE)
        self.places = self._places()
        self.fill = fill
        self.problems: list[str] = []
        self.ended: dict[str, str] = {}
        self.outgoing: list[Outgoing] = []
        self.wanted: list[tuple[str, list[bytes], float]] = []
        self.offers: list[str] = []
        if fill:
            self.rank.fill()
        else:
            self.rank.memory[:] = POISON

    def _places(self) -> list[_Place]:
        layout, slab = self.rank.layout, 1
        made = []
        for _ in range(PLACES):
            pages = []
            for group in layout.groups:
                per_slab = layout.slab_bytes // group.page_bytes
                blocks = ceil_div(LENGTH, layout.block_tokens)
                first = slab * per_slab
                pages.append(np.arange(first, first + blocks, dtype=np.int32)[::-1].copy())
                slab += ceil_div(blocks, per_slab)
            made.append(_Place(pages))
        assert slab <= layout.slab_count
        return made

    # One turn.

    def turn(self) -> None:
        self.transceiver.poll(0.002)
        for place in self.places:
            if place.session is not None and place.session.quiescent:
                self._check(place, place.session)
                place.session = None
            if place.session is None and self.wanted:
                request, hellos, deadline_s = self.wanted.pop(0)
                if not self._all(place.pages, POISON):
                    self.problems.append(f"{request}: pages were written after they could be used again")
                place.session = self.transceiver.receive(request, place.pages, LENGTH, hellos, deadline_s=deadline_s)
        for outgoing in [each for each in self.outgoing if each.quiescent]:
            self.outgoing.remove(outgoing)
            assert outgoing.outcome is not None
            self.ended[outgoing.request] = outgoing.outcome.status.value
        while self.offers and len(self.outgoing) < 2 * PLACES:
            self.offer(self.offers.pop(0))

    def _check(self, place: _Place, session: Incoming) -> None:
        assert session.outcome is not None
        self.ended[session.request] = session.outcome.status.value
        if session.outcome.ok:
            self.rank.pages = place.pages
            for begin, content in self.rank.parts():
                if not np.array_equal(self.rank.memory[begin : begin + len(content)], content):
                    self.problems.append(f"{session.request}: it is done, and other bytes are there")
                    break
        self._fill(place.pages, POISON)

    def _ranges(self, pages: list[IntArray]) -> list[slice]:
        sizes = [group.page_bytes for group in self.rank.layout.groups]
        return [slice(page * size, (page + 1) * size) for ids, size in zip(pages, sizes) for page in ids.tolist()]

    def _all(self, pages: list[IntArray], value: int) -> bool:
        return all(bool((self.rank.memory[each] == value).all()) for each in self._ranges(pages))

    def _fill(self, pages: list[IntArray], value: int) -> None:
        for each in self._ranges(pages):
            self.rank.memory[each] = value

    # What the parent may ask for.

    def hello(self) -> bytes:
        return self.transceiver.hello()

    def offer(self, request: str) -> None:
        session = self.transceiver.send(request)
        self.transceiver.add(session, self.rank.pages, 0, LENGTH, last=True, payload=request.encode())
        self.outgoing.append(session)

    def offer_many(self, prefix: str, count: int) -> None:
        self.offers += [f"{prefix}{number}" for number in range(count)]

    def ask(self, request: str, hello: bytes, deadline_s: float) -> None:
        self.wanted.append((request, [hello], deadline_s))

    def ask_many(self, prefix: str, hellos: list[bytes], count: int, deadline_s: float) -> None:
        self.wanted += [(f"{prefix}{number}", hellos, deadline_s) for number in range(count)]

    def some_done(self, prefix: str) -> bool:
        return any(status == "done" for request, status in self.ended.items() if request.startswith(prefix))

    def alone(self) -> bool:
        """Is nobody connected, and so nobody to wait for?"""
        return self.transceiver.stats().peers == 0

    def all_decided(self) -> bool:
        """Has all that was begun its outcome?"""
        sessions: list[Session] = [*self.outgoing, *(each.session for each in self.places if each.session)]
        return all(each.outcome is not None for each in sessions)

    def all_ended(self) -> bool:
        """Is nothing open, and has the transport confirmed that every grant is taken back? A request that is done does
        not wait for that."""
        open_ = self.wanted or self.offers or self.outgoing or any(place.session for place in self.places)
        return not open_ and not self.transceiver._grants

    def start_no_more(self) -> None:
        """What is open goes on."""
        self.wanted.clear()
        self.offers.clear()

    def give_up(self) -> None:
        """Begin nothing more, and end what is open."""
        self.start_no_more()
        sessions: list[Session] = [*self.outgoing, *(each.session for each in self.places if each.session)]
        for session in sessions:
            self.transceiver.cancel(session)

    def leaks(self) -> list[str]:
        stats, found = self.transceiver.stats(), list(self.problems)
        if stats.open_sessions or stats.quarantined_pages:
            found.append(f"open sessions or quarantined pages: {stats}")
        if self.transceiver._tokens or self.transceiver._grants or self.transceiver._attempts:
            found.append("tokens, grants or attempts are left")
        return found

    def outcome(self, request: str) -> str:
        return self.ended[request]

    def count(self, status: str) -> int:
        return sum(each == status for each in self.ended.values())

    def verify(self) -> bool:
        """Is what was received right, and what no request has untouched? The first is looked at when it ends."""
        if self.fill:
            return not self.problems
        free = [place.pages for place in self.places if place.session is None]
        return not self.problems and all(self._all(pages, POISON) for pages in free)

    def held(self) -> tuple[int, int, int]:
        """Descriptors, threads, and shared memory with a name."""
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/dev/shm"))

    def state(self) -> str:
        places = sum(place.session is not None for place in self.places)
        left = (len(self.wanted), len(self.offers), len(self.outgoing), places, len(self.transceiver._grants))
        return f"{self.transceiver.stats()}, wanted, to offer, sending, receiving, granted: {left}, {self.problems}"

    def close(self) -> None:
        self.transceiver.close()


def _main(factory: str, name: str, fill: bool, connection: Connection) -> None:
    child = _Child(factory, name, fill)
    with contextlib.suppress(EOFError, BrokenPipeError):  # The parent has gone, and so do we.
        while True:
            child.turn()
            while connection.poll(0):
                wanted, arguments = connection.recv()
                try:
                    answer = True, getattr(child, wanted)(*arguments)
                except Exception:
                    answer = False, traceback.format_exc()
                connection.send(answer)
