"""Any transport, with faults on the way: what is sent waits, is lost, comes twice or in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvist.transfer.faults import Fault, FaultPlan, Kind
from kvist.transfer.transport import Done, Event, Failed, Fragments, Peer, Transport


@attrs.define(eq=False)
class _Waiting:
    """Something that is held, or comes late. token: of a write."""

    peer: Peer
    go: Callable[[], None]
    token: int | None
    due_s: float


@attrs.frozen
class Sent:
    """A write that was given to the transport below."""

    receiver: str
    fragments: Fragments
    token: int


class Faulty:
    """Implements :class:`~kvist.transfer.transport.Transport` by another one, ``inner``.

    Of the faults it knows ``hold``, ``late``, ``drop``, ``duplicate``, ``overtake``, ``delay`` and ``fail``. What was
    dropped or is held when its peer is disconnected has failed. sent: writes so far. seen: events so far.
    """

    def __init__(self, inner: Transport, name: str, faults: FaultPlan, now_s: Callable[[], float]) -> None:
        self.inner, self.name = inner, name
        self.sent: list[Sent] = []
        self.seen = 0
        self._faults, self._now_s = faults, now_s
        self._way: list[_Waiting] = []
        self._late: list[_Waiting] = []
        self._lost: dict[int, Peer] = {}
        self._names: dict[int, str] = {}
        self._answers: list[Event] = []
        self._events: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        """What has no faults."""
        return getattr(self.inner, name)

    def write(self, peer: Peer, fragments: Fragments, grant: int, token: int) -> None:
        self._names[token] = peer.name

        def go() -> None:
            self.sent.append(Sent(peer.name, fragments, token))
            self.inner.write(peer, fragments, grant, token)

        self._send(peer, "write", go, token)

    def message(self, peer: Peer, data: bytes) -> None:
        self._send(peer, "message", lambda: self.inner.message(peer, data), None, data)

    def disconnect(self, peer: Peer) -> None:
        for waiting in [each for each in [*self._way, *self._late] if each.peer == peer]:
            if waiting.token is not None:
                self._lost[waiting.token] = peer
        for token in [token for token, lost in self._lost.items() if lost == peer]:
            del self._lost[token]
            self._events.append(Failed(token, "the connection was closed", in_doubt=True))
        self._way = [each for each in self._way if each.peer != peer]
        self._late = [each for each in self._late if each.peer != peer]
        self.inner.disconnect(peer)

    def poll(self, timeout_s: float) -> list[Event]:
        self._go_on()
        own, self._events = self._events, []
        events = self.inner.poll(0.0 if own else timeout_s)
        self.seen += len(own) + len(events)
        return own + [event for event in events if not self._kept(event)]

    def release(self) -> None:
        """Let go of what is held or late."""
        late, self._late = self._late, []
        for waiting in self._way:
            waiting.due_s = 0.0
        self._go_on()
        for waiting in late:
            waiting.go()
        self._events += self._answers
        self._answers = []

    def _send(self, peer: Peer, kind: Kind, go: Callable[[], None], token: int | None, data: bytes = b"") -> None:
        fault = self._faults.due(kind, self.name, peer.name, data) or Fault("delay", kind)
        if fault.action == "drop":
            if token is not None:
                self._lost[token] = peer
        elif fault.action == "fail":
            assert token is not None
            self._events.append(Failed(token, "the transport refused to send it", in_doubt=False))
        elif fault.action == "late":
            self._late.append(_Waiting(peer, go, token, 0.0))
        elif fault.action == "overtake":
            go()
        else:
            due_s = float("inf") if fault.action == "hold" else self._now_s() + fault.delay_s
            for _ in range(2 if fault.action == "duplicate" else 1):
                self._way.append(_Waiting(peer, go, token, due_s))
            self._go_on()

    def _go_on(self) -> None:
        """Whatever is due and has nothing before it on its way."""
        held: set[int] = set()
        way, self._way = self._way, []
        for waiting in way:
            if waiting.peer.id in held or waiting.due_s > self._now_s():
                held.add(waiting.peer.id)
                self._way.append(waiting)
            else:
                waiting.go()

    def _kept(self, event: Event) -> bool:
        """Answers may be kept."""
        if not isinstance(event, Done | Failed):
            return False
        fault = self._faults.due("answer", self._names.get(event.token, ""), self.name)
        if fault is None:
            return False
        if fault.action in ("hold", "late"):
            self._answers.append(event)
        return True
