"""One connection as this end sees it: what waits to be sent, what is under way, and how it ends.

A connection ends in steps, because a peer's memory may be used for something else afterwards: its endpoint is closed by
force, what was under way over it ends with that, and only then do we say farewell, over an endpoint made for it. So a
farewell means that nothing of ours can arrive any more, whatever went wrong before.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import attrs

from kvist.transfer.transport import Done, Failed, Peer
from kvist_transceiver_ucx.sends import Sent
from kvist_transceiver_ucx.ucp import Endpoint, Request, UcxError
from kvist_transceiver_ucx.wire import MESSAGE, Answer, Hello, header
from kvist_transceiver_ucx.writes import Write


@attrs.define(eq=False)
class Connection:
    """Changed by the progress thread alone, but for ``ended`` and ``leaving``, which the transport's lock guards.

    key: of this end; peers address it by that. there: the peer's, 0 until it is known. endpoint: ``None`` before the
    first step and after the last. process: a descriptor of the peer's process, or ``None`` if it is on another machine.
    ended: nothing goes over it any more, for this ``reason``. leaving: was it given up by this end? dead: has the
    peer's process ended? released: has the peer said that it ended too? reported: has the transport said so?
    """

    peer: Peer
    key: int
    hello: Hello
    there: int = 0
    endpoint: Endpoint | None = None
    process: int | None = None
    ended: bool = False
    leaving: bool = False
    reason: str = ""
    dead: bool = False
    dead_s: float = 0.0
    released: bool = False
    reported: bool = False
    _closing: Request | None = None
    _waiting: deque[Write | Sent | bytes] = attrs.Factory(deque)
    _writes: list[Write | Sent] = attrs.Factory(list)
    _sends: list[Request] = attrs.Factory(list)
    _keys: dict[int, Any] = attrs.Factory(dict)
    _numbers: Iterator[int] = attrs.Factory(itertools.count)
    _expected: int = 0
    _early: dict[int, bytes] = attrs.Factory(dict)

    @property
    def open(self) -> bool:
        """Can anything be sent?"""
        return not self.ended and self.there != 0

    def push(self, what: Write | Sent | bytes) -> None:
        """A write or a message, to be sent in its turn."""
        self._waiting.append(what)

    def send(self, packed: bytes, data: bytes) -> None:
        """Send at once, before all that waits. Raises UcxError."""
        assert self.endpoint is not None
        request = self.endpoint.send(packed, data)
        if request is not None:
            self._sends.append(request)

    def arrived(self, number: int, data: bytes) -> list[bytes]:
        """Messages whose turn it is, now that this one is here. Parts of a long one may come after a short one."""
        self._early[number] = data
        ready = []
        while self.open and self._expected in self._early:
            ready.append(self._early.pop(self._expected))
            self._expected += 1
        return ready

    def ready(self) -> list[bytes]:
        """Messages that arrived before the connection was open."""
        return self.arrived(self._expected, self._early[self._expected]) if self._expected in self._early else []

    def advance(self, answers: list[Done | Failed]) -> bool:
        """Send what can be sent, and answer what has ended. Returns whether more could be sent at once. Raises UcxError
        when the connection has to end."""
        assert self.endpoint is not None
        more = False
        for write in self._writes:
            write.reap(self.endpoint)
            if not write.posted:
                more |= self._post(write)
        if self._writes:
            answers += [Done(write.token) for write in self._writes if write.done]
            self._writes = [write for write in self._writes if not write.done]
        if self._sends:
            self._sends = [request for request in self._sends if request.poll() is None]
        while self.open and self._waiting and all(write.posted for write in self._writes):
            first = self._waiting[0]
            if isinstance(first, Write | Sent):
                self._writes.append(first)
                self._waiting.popleft()
                more |= self._post(first)
                if first.done:
                    self._writes.remove(first)
                    answers.append(Done(first.token))
            elif self._writes:
                break  # A message is evidence of the writes before it.
            else:
                self._waiting.popleft()
                self.send(header(MESSAGE, self.there, next(self._numbers)), first)
        return more

    def _post(self, write: Write | Sent) -> bool:
        assert self.endpoint is not None
        if isinstance(write, Sent):
            return write.post(self.endpoint, self.there)
        region = write.fragments.destination_region
        if region not in self._keys:
            self._keys[region] = self.endpoint.key(self.hello.regions[region].key)
        return write.post(self.endpoint, self._keys[region], self.hello.regions[region].address)

    def answered(self, answer: Answer) -> Done | Failed | None:
        """The peer has copied a write, or not. ``None`` if it knows of one that we do not."""
        write = next((each for each in self._writes if isinstance(each, Sent) and each.token == answer.token), None)
        if write is None or not write.posted:
            return None
        if not answer.refused:
            write.copied = True
            return None
        self._writes.remove(write)
        self._sends += write.left()
        return Failed(write.token, answer.refused, in_doubt=answer.in_doubt)

    def shut(self) -> None:
        """Begin to close the endpoint, for good."""
        if self.endpoint is not None and (not self.dead or self.endpoint.failure):
            # UCX crashes when an endpoint is closed over which it answers writes of a process that has ended, unless it
            # has seen that itself. Such an endpoint stays until the worker goes.
            try:
                self._closing = self.endpoint.close()
            except UcxError:
                self._closing = None  # It was broken already, and UCX has let go of it.

    def drained(self, answers: list[Done | Failed]) -> bool:
        """After :meth:`shut`: has everything under way ended? Then every write gets its answer."""
        if self._closing is not None:
            if self._closing.poll() is None:
                return False
            self._closing = None
        self._sends = [request for request in self._sends if request.poll() is None]
        if (self._sends or not all(write.drained() for write in self._writes)) and not self.dead:
            # What waits for room in the memory of a peer that does not run ends when it runs again. Of one that has
            # ended it never does, and never reads our memory either.
            return False
        for write in self._writes:
            answers.append(Done(write.token) if write.done else Failed(write.token, self.reason, write.begun))
        writes = [each for each in self._waiting if isinstance(each, Write | Sent)]
        answers += [Failed(write.token, self.reason, in_doubt=False) for write in writes]
        self._writes.clear()
        self._waiting.clear()
        if self.endpoint is not None:
            self.endpoint.release()
            self.endpoint = None
        return True
