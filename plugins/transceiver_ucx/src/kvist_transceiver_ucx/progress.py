"""The thread that owns the worker. It sleeps unless UCX, another thread or the end of a process wakes it."""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from kvist.transfer.mailbox import Mailbox
from kvist.transfer.transport import (
    Closed,
    Connected,
    Done,
    Event,
    Failed,
    IncompatibleError,
    Int64Array,
    Message,
    PeerDown,
    Revoked,
)
from kvist_transceiver_ucx import wire
from kvist_transceiver_ucx.arrivals import Arrivals
from kvist_transceiver_ucx.book import Book
from kvist_transceiver_ucx.connection import Connection
from kvist_transceiver_ucx.farewell import Leave
from kvist_transceiver_ucx.place import watch
from kvist_transceiver_ucx.sends import Sent
from kvist_transceiver_ucx.ucp import Context, UcxError, Worker, describe
from kvist_transceiver_ucx.writes import Write

#: How long ``close`` lets farewells take.
_CLOSE_S = 1.0
#: Without sleep, ends of processes are looked for this often.
_LOOK_S = 0.01
#: So long UCX may have its way when it wants to be called again and nothing happens; then with pauses.
_EAGER_S, _PAUSE_S = 0.002, 0.0005
#: So long what a process had sent may arrive after its end; it lies in this machine's memory.
_DEAD_S = 0.1
#: Calls of UCX's progress in one go.
_PROGRESS = 64
#: Farewells that came before the greeting of their connection are remembered, this many.
_REMEMBERED = 1024


class Progress:
    """Moves everything on. Other threads only :meth:`submit`.

    book: connections, shared with the transport. mailbox: for events, and for what ends the thread. arrivals: what
    peers write here by messages.
    """

    def __init__(self, context: Context, book: Book, mailbox: Mailbox, arrivals: Arrivals) -> None:
        self._context, self._book, self._mailbox, self._landing = context, book, mailbox, arrivals
        self._commands: deque[Callable[[], None]] = deque()
        self._arrivals: deque[tuple[bytes, bytes]] = deque()
        self._worker = Worker(context, lambda packed, data: self._arrivals.append((packed, data)))
        self.address = self._worker.address()
        #: Of this end; set before anybody can connect.
        self.hello: wire.Hello
        self._live: list[Connection] = []
        self._leaving: list[Leave] = []
        self._gone: deque[int] = deque(maxlen=_REMEMBERED)
        self._events: list[Event] = []
        self._stopping = False
        self._idle_s: float | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._poll.register(self._worker.event_descriptor(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"kvist-ucx-{book.name}", daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        """Have the thread do something."""
        self._commands.append(command)
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """End all connections and the thread; waits for it."""
        self.submit(self._stop)
        self._thread.join()
        self._poll.close()
        os.close(self._bell)

    # Commands.

    def open(self, connection: Connection) -> None:
        """Greet the peer of a new connection."""
        if connection.ended or not self._begin(connection):
            return
        greeting = wire.Greeting(connection.hello.identity, connection.key, self.hello)
        self._send(connection, wire.header(wire.GREETING), wire.encode(greeting))

    def push(self, connection: Connection, what: Write | Sent | bytes) -> None:
        """Send a write or a message in its turn."""
        if not connection.ended or connection.endpoint is not None:
            connection.push(what)
        elif isinstance(what, Write | Sent):
            self._events.append(Failed(what.token, connection.reason, in_doubt=False))

    def give(self, connection: Connection, grant: int, region: int, begins: Int64Array, ends: Int64Array) -> None:
        """Let the peer write there."""
        if not connection.ended and not connection.leaving:
            self._landing.give(connection, grant, region, begins, ends)

    def revoke(self, grant: int) -> None:
        """Let nobody write under it any more."""
        self._landing.revoke(grant)
        self._events.append(Revoked(grant))

    def leave(self, connection: Connection) -> None:
        """The connection has been given up."""
        if connection.reported:
            self._forget(connection)
        elif connection not in self._live:
            # Its endpoint has been closed, and we waited only for the peer's word.
            self._events.append(Closed(connection.peer))
            self._forget(connection, report=False)
        else:
            self._end(connection, "the connection was closed")

    def _stop(self) -> None:
        self._stopping = True
        for connection in list(self._live):
            self._end(connection, "it has disconnected")

    # The loop.

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # Kept for whoever polls: a thread has nobody to raise it to.
            self._mailbox.broke(error)

    def _loop(self) -> None:
        until_s, looked_s = float("inf"), 0.0
        while True:
            moved = self._progressed()
            while self._commands:
                self._commands.popleft()()
            while self._arrivals:
                self._take(*self._arrivals.popleft())
            now_s = time.monotonic()
            more = self._advance(now_s)
            if moved:
                self._idle_s = None
            if self._events:
                self._mailbox.say(*self._events)
                self._events.clear()
            if self._stopping:
                until_s = min(until_s, now_s + _CLOSE_S)
                quiet = all(leave.sent or leave.connection.dead for leave in self._leaving)
                if not self._live and ((quiet and now_s >= until_s - _CLOSE_S + 0.05) or now_s >= until_s):
                    break
            if not moved and not more and not self._commands:
                if self._worker.arm():
                    self._sleep(0.01 if self._stopping else self._due_s(now_s))
                else:
                    self._look(now_s)
            elif now_s >= looked_s + _LOOK_S:
                looked_s = now_s
                self._sleep(0.0)
        self._finish()

    def _progressed(self) -> bool:
        """Let UCX do what it can, so long that what we do between is small beside it."""
        for times in range(_PROGRESS):
            if not self._worker.progress():
                return times > 0
        return True

    def _sleep(self, limit_s: float | None) -> None:
        for descriptor, _ in self._poll.poll(limit_s):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                continue
            for connection in self._book.watching(descriptor):
                connection.dead = True
                if connection not in self._live:
                    self._released(connection, "its process has ended")
            if self._book.watching(descriptor):
                self._poll.unregister(descriptor)

    def _look(self, now_s: float) -> None:
        """UCX wants to be called again at once. It also says so as long as a peer that does not run leaves no room in
        shared memory; so that takes no processor, and ends of processes are seen meanwhile."""
        if self._idle_s is None:
            self._idle_s = now_s
        self._sleep(0.0)
        if now_s >= self._idle_s + _EAGER_S:
            time.sleep(_PAUSE_S)

    def _due_s(self, now_s: float) -> float | None:
        due = [leave.until_s for leave in self._leaving]
        due += [each.dead_s + _DEAD_S for each in self._live if each.dead and not each.ended]
        return max(0.0, min(due) - now_s) if due else None

    def _finish(self) -> None:
        for leave in self._leaving:
            leave.shut()
        until_s = time.monotonic() + _CLOSE_S
        while self._leaving and time.monotonic() < until_s:
            self._worker.progress()
            self._leaving = [leave for leave in self._leaving if not leave.advance(time.monotonic())]
        self._worker.close()
        for descriptor in self._book.clear():
            os.close(descriptor)

    # Connections.

    def _begin(self, connection: Connection) -> bool:
        """Give a connection its endpoint. Without one, it ends at once."""
        self._live.append(connection)
        here, there = self.hello.place, connection.hello.place
        if here.machine == there.machine and here.processes == there.processes:
            connection.process = watch(there)
            if connection.process is None:
                connection.dead = True
                self._end(connection, "its process has ended")
                return False
            self._poll.register(connection.process, select.EPOLLIN)
        try:
            connection.endpoint = self._worker.connect(connection.hello.worker)
        except UcxError as error:
            connection.released = True
            self._end(connection, error.message)
            return False
        return True

    def _send(self, connection: Connection, packed: bytes, data: bytes) -> None:
        try:
            connection.send(packed, data)
        except UcxError as error:
            self._end(connection, error.message)

    def _end(self, connection: Connection, reason: str) -> None:
        """Begin to end a connection. Idempotent; what the first call says, counts."""
        if connection in self._live and not self._book.end(connection, reason):
            connection.shut()

    def _advance(self, now_s: float) -> bool:
        more = False
        answers: list[Done | Failed] = []
        for connection in list(self._live):
            if not connection.ended and connection.endpoint is not None:
                if connection.dead and (connection.endpoint.failure or not connection.open):
                    self._released(connection, "its process has ended")
                elif connection.dead and not connection.endpoint.failure:
                    # What the dead had sent is taken in first, so that none of it comes later.
                    self._ripen(connection, now_s)
                elif connection.endpoint.failure:
                    why = describe(self._context.library, connection.endpoint.failure)
                    self._end(connection, f"the connection broke: {why}")
                else:
                    try:
                        more |= connection.advance(answers)
                    except UcxError as error:
                        self._end(connection, error.message)
            if connection.ended and connection.drained(answers):
                self._live.remove(connection)
                self._events += answers
                answers.clear()
                if not connection.dead and not connection.released:
                    self._leaving.append(Leave.begin(self._worker, connection, now_s))
                self._ended(connection)
        self._events += answers
        for leave in list(self._leaving):
            over = leave.advance(now_s)
            if leave.refused and not leave.connection.released:
                # A worker that takes no more messages is gone, and what it had mapped with it.
                self._released(leave.connection, leave.connection.reason)
            if over:
                self._leaving.remove(leave)
        return more

    def _ripen(self, connection: Connection, now_s: float) -> None:
        connection.dead_s = connection.dead_s or now_s
        if now_s >= connection.dead_s + _DEAD_S:
            self._released(connection, "its process has ended")

    def _ended(self, connection: Connection) -> None:
        """Its endpoint is closed, its writes have their answers."""
        if connection.leaving:
            self._events.append(Closed(connection.peer))
            connection.reported = True
            self._forget(connection, report=False)
        else:
            self._confirm(connection)

    def _confirm(self, connection: Connection) -> None:
        """Report a peer as down, once it can write to our memory no more."""
        safe = connection.dead or connection.released or connection.process is None
        if safe and connection not in self._live and not connection.reported and not connection.leaving:
            connection.reported = True
            self._events.append(PeerDown(connection.peer, connection.reason))

    def _released(self, connection: Connection, reason: str) -> None:
        """The peer, or its process, can access nothing of ours over this connection any more."""
        connection.released = True
        if not self._book.end(connection, reason):
            if connection in self._live:
                connection.shut()
        elif not connection.reported:
            connection.reason = reason  # It says more than that the connection broke.
        self._confirm(connection)

    def _forget(self, connection: Connection, *, report: bool = True) -> None:
        self._landing.forget(connection)
        if report:
            self._events.append(Closed(connection.peer))
        descriptor = self._book.forget(connection)
        if descriptor is not None:
            if not connection.dead:
                self._poll.unregister(descriptor)
            connection.process = None
            os.close(descriptor)

    # Messages.

    def _take(self, packed: bytes, data: bytes) -> None:
        try:
            kind, key, number = wire.parse(packed)
            if kind == wire.MESSAGE:
                connection = self._book.by_key(key)
                if connection is not None and not connection.ended:
                    self._deliver(connection, connection.arrived(number, data))
            elif kind == wire.WRITE:
                connection = self._book.by_key(key)
                if connection is not None and not connection.ended and not connection.leaving:
                    answer = self._landing.take(connection, number, *wire.read_frame(data))
                    if answer is not None:
                        self._send(connection, wire.header(wire.ANSWER, connection.there), wire.encode(answer))
            elif kind == wire.ANSWER:
                connection = self._book.by_key(key)
                if connection is not None and not connection.ended:
                    failed = connection.answered(msgspec.msgpack.decode(data, type=wire.Answer))
                    self._events += [] if failed is None else [failed]
            elif kind == wire.GREETING:
                self._greeted(msgspec.msgpack.decode(data, type=wire.Greeting))
            elif kind == wire.WELCOME:
                connection = self._book.by_key(key)
                if connection is not None and not connection.ended and not connection.there:
                    self._opened(connection, msgspec.msgpack.decode(data, type=wire.Welcome).key)
            elif kind == wire.FAREWELL:
                self._left(key, msgspec.msgpack.decode(data, type=wire.Farewell))
        except (struct.error, ValueError, msgspec.DecodeError):
            pass  # Whoever sent it is none of our peers: they have shown a hello of our version.

    def _deliver(self, connection: Connection, messages: list[bytes]) -> None:
        self._events += [Message(connection.peer, each) for each in messages]

    def _opened(self, connection: Connection, there: int) -> None:
        connection.there = there
        self._events.append(Connected(connection.peer))
        self._deliver(connection, connection.ready())

    def _greeted(self, greeting: wire.Greeting) -> None:
        if greeting.key in self._gone:
            return
        hello, mine = greeting.hello, self.hello
        live = self._book.live(hello.identity)
        if live is not None and live.there == 0 and greeting.meant == mine.identity:
            # Both connect at once: it is one connection, and their greeting is the answer to ours.
            self._opened(live, greeting.key)
            return
        for old in self._book.all(hello.identity):
            # It greets anew only when it has ended what was before.
            self._released(old, "it has disconnected")
        refusal = "it has disconnected" if self._stopping else ""
        try:
            if greeting.meant != mine.identity:
                refusal = f"{mine.name!r} is not the one that was meant: another process has its address"
            wire.require_compatible(hello, mine.ucx, mine.place, shares_memory=mine.shares_memory)
        except IncompatibleError as error:
            refusal = error.message
        connection = self._book.enter(hello, there=greeting.key)
        if refusal:
            # Nobody hears of it here; the other side does.
            self._book.end(connection, refusal)
            connection.reported = True
            self._leaving.append(Leave.begin(self._worker, connection, time.monotonic()))
            self._forget(connection, report=False)
        elif self._begin(connection):
            self._opened(connection, greeting.key)
            self._send(connection, wire.header(wire.WELCOME, greeting.key), wire.encode(wire.Welcome(connection.key)))

    def _left(self, key: int, farewell: wire.Farewell) -> None:
        self._gone.append(farewell.key)
        connection = self._book.by_key(key) or self._book.by_their_key(farewell.key)
        if connection is not None:
            self._released(connection, farewell.reason or "it has disconnected")
