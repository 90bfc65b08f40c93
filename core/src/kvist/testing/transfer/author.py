"""What the author of a transport says about it, and the ends that tests make of that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvist.errors import TransferError
from kvist.testing.outcomes import not_applicable
from kvist.testing.transfer.world import LONG_S, World, memory_of, new_transport
from kvist.transfer.faults import Fault
from kvist.transfer.outcome import Patience
from kvist.transfer.transport import (
    Connected,
    Done,
    Event,
    Failed,
    Fragments,
    Int64Array,
    Transport,
)

EventT = TypeVar("EventT", bound=Event)


class TransportAuthor:
    """Fill in ``factory``; the others have defaults.

    factory: ``"package.module:Name"`` of the transport class, as in its record.
    between_processes: can it reach another process? Then tests kill and stop some.
    quiet_s: within so many seconds, what one end sends has come to the other on this machine. Only tests of what must
        not happen wait so long.
    """

    factory: ClassVar[str]
    between_processes: ClassVar[bool] = True
    quiet_s: ClassVar[float] = 0.05

    def transport(self, name: str) -> Transport:
        """A new one, in this process."""
        return new_transport(self.factory, name)

    def kill(self, transport: Transport) -> None:
        """Let an end of this process be as if its process had died, for transports that are not between processes."""
        not_applicable("the transport connects processes, which tests kill themselves")

    # For the kit.

    def world(self, *faults: Fault, patience: Patience | None = None) -> World:
        """Processes with a transceiver each."""
        return World(self.transport, *faults, patience=patience, quiet_s=self.quiet_s)

    @contextlib.contextmanager
    def ends(self, size: int = 1 << 16) -> Iterator[Ends]:
        """Two transports that are connected."""
        ends = Ends(self, size)
        try:
            yield ends
        finally:
            ends.end()

    def require_processes(self) -> None:
        """Go on only if there can be other processes."""
        if not self.between_processes:
            not_applicable("the transport stays in one process")


class End:
    """A transport with memory. seen: all of its events."""

    def __init__(self, author: TransportAuthor, name: str, size: int) -> None:
        self.transport = author.transport(name)
        self.region, self.memory = memory_of(self.transport, size)
        self.seen: list[Event] = []

    def poll(self) -> None:
        self.seen += self.transport.poll(0.0)

    def all(self, kind: type[EventT]) -> list[EventT]:
        """Events of a kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]


class Ends:
    """``a`` has connected to ``b``, which lets it write everywhere under grant 7, where there are grants."""

    def __init__(self, author: TransportAuthor, size: int) -> None:
        self.author, self.size = author, size
        self.a, self.b = End(author, "a", size), End(author, "b", size)
        self.a.memory[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.to_b = self.a.transport.connect(self.b.transport.hello())
        self.to_a = self.first(self.b, Connected).peer
        self.first(self.a, Connected)
        self.grant(7, (0, size))

    def grant(self, number: int, *ranges: tuple[int, int]) -> None:
        """b lets a write there."""
        if self.b.transport.capabilities.grants:
            begins, ends = np.array(ranges, np.int64).T
            self.b.transport.grant(self.to_a, number, self.b.region, begins, ends)
            # A word from b means that it has taken effect before what a does then.
            self.b.transport.message(self.to_a, b"granted")
            count = sum(getattr(event, "data", b"") == b"granted" for event in self.a.seen)
            self.until(lambda: sum(getattr(event, "data", b"") == b"granted" for event in self.a.seen) > count)

    def write(self, token: int, *copies: tuple[int, int, int], grant: int = 7) -> Fragments:
        """From a to b: source, destination, bytes of each."""
        sources, destinations, sizes = np.array(copies, np.int64).reshape(-1, 3).T
        return self.write_all(token, sources, destinations, sizes, grant)

    def write_all(
        self, token: int, sources: Int64Array, destinations: Int64Array, sizes: Int64Array, grant: int = 7
    ) -> Fragments:
        """As ``write``, from arrays."""
        made = Fragments(sources, destinations, sizes, self.a.region.id, self.b.region.id)
        self.a.transport.write(self.to_b, made, grant, token)
        return made

    def answer(self, token: int) -> Done | Failed:
        """What became of a write."""

        def found() -> list[Any]:
            return [each for each in self.a.seen if isinstance(each, Done | Failed) and each.token == token]

        self.until(lambda: bool(found()))
        (answer,) = found()
        assert isinstance(answer, Done | Failed)
        return answer

    def first(self, end: End, kind: type[EventT]) -> EventT:
        """The first event of a kind, once it has come."""
        self.until(lambda: bool(end.all(kind)))
        return end.all(kind)[0]

    def poll(self) -> None:
        for end in (self.a, self.b):
            end.poll()

    def until(self, so: Callable[[], bool]) -> None:
        """Let things happen until something is so."""
        until_s = time.monotonic() + LONG_S
        while not so():
            assert time.monotonic() < until_s, f"it has not happened within {LONG_S:g} s"
            self.poll()
            time.sleep(0.0005)

    def quiet(self) -> None:
        """Let everything happen that is under way."""
        until_s = time.monotonic() + self.author.quiet_s
        self.poll()
        while time.monotonic() < until_s:
            self.poll()
            time.sleep(0.001)
        self.poll()

    def end(self) -> None:
        """Close both, whatever happened."""
        for end, peer in ((self.a, self.to_b), (self.b, self.to_a)):
            with contextlib.suppress(Exception):  # What went wrong is said by the test.
                end.transport.disconnect(peer)
        until_s = time.monotonic() + 5.0
        left = [self.a, self.b]
        while left and time.monotonic() < until_s:
            for end in list(left):
                try:
                    end.poll()
                    end.transport.close()
                    left.remove(end)
                except TransferError:
                    time.sleep(0.001)
                except Exception:
                    left.remove(end)


def expected(ends: Ends, *fragments: Fragments) -> bool:
    """Has b what a wrote, and zeros elsewhere?"""
    made = np.zeros_like(ends.b.memory)
    for each in fragments:
        for begin, to, size in zip(each.sources.tolist(), each.destinations.tolist(), each.byte_counts.tolist()):
            made[to : to + size] = ends.a.memory[begin : begin + size]
    return bool(np.array_equal(made, ends.b.memory))
