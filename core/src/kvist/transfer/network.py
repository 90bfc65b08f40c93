"""What connects local transports: time and faults as a test wants them, every write on record."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from kvist.transfer.faults import Fault, FaultPlan, Kind
from kvist.transfer.transport import Closed, Connected, Done, Failed, Fragments, Message, Peer, PeerDown

if TYPE_CHECKING:
    from kvist.transfer.local import LocalTransport


@attrs.frozen
class WriteRecord:
    """One fragment that reached memory. ``begin``, ``end``: bytes of the receiver's region ``region``; ``token``: the
    sender's."""

    sender: str
    receiver: str
    region: int
    begin: int
    end: int
    token: int
    grant: int


@attrs.define(eq=False)
class Link:
    """One connection as one of its ends sees it. ``way``: what that end has sent and has not arrived, oldest first."""

    peer: Peer
    owner: LocalTransport
    other: LocalTransport
    back: Link = attrs.field(init=False)
    way: deque[Operation] = attrs.Factory(deque)
    down: bool = False
    closed: bool = False
    #: Writes without an answer, oldest first.
    unanswered: dict[int, None] = attrs.Factory(dict)


@attrs.define(eq=False)
class Operation:
    """Something on its way. ``answer``: to a write of the other end. ``breaks``: who dies or stalls as it arrives."""

    kind: Kind
    data: bytes = b""
    fragments: Fragments | None = None
    grant: int = 0
    token: int = 0
    answer: Done | Failed | None = None
    due_s: float = 0.0
    held: bool = False
    breaks: str = ""


class LocalNetwork:
    """What connects local transports. One lock guards all of them.

    virtual: time stands still but for :meth:`advance`, and ``poll`` never waits. Otherwise time is real, and transports
        may be driven by threads.
    faults: what goes wrong.
    """

    def __init__(self, *, virtual: bool = False, faults: Iterable[Fault] = ()) -> None:
        self.virtual = virtual
        self.faults = FaultPlan(faults)
        #: Every fragment that reached memory, in order.
        self.writes: list[WriteRecord] = []
        #: Seconds until the death of a process is noticed.
        self.detect_s = 0.0
        self.changed = threading.Condition(threading.RLock())
        self._now_s = 0.0
        self._ends: dict[str, LocalTransport] = {}
        self._links: list[Link] = []
        self._late: list[tuple[Link, Operation]] = []
        self._deaths: list[tuple[float, Link]] = []

    def now_s(self) -> float:
        """Seconds on this network's clock."""
        return self._now_s if self.virtual else time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        assert self.virtual
        with self.changed:
            self._now_s += seconds
            self.run()

    def release(self) -> None:
        """Let go of what faults held or kept late until now."""
        with self.changed:
            late, self._late = self._late, []
            for link, operation in late:
                self._arrive(link, operation)
            for link in self._links:
                for operation in link.way:
                    operation.held = False
            self.run()

    def kill(self, end: LocalTransport) -> None:
        """The process of ``end`` is gone at once: nothing of it runs any more. Its memory stays for a test to see."""
        with self.changed:
            if self._ends.pop(end.identity, None) is None:
                return
            for link in [link for link in self._links if link.owner is end]:
                if not end.capabilities.death_is_fence:
                    self._late += [(link, each) for each in link.way if each.kind == "write"]
                link.way.clear()
                if end.capabilities.detects_death:
                    self._deaths.append((self.now_s() + self.detect_s, link.back))
            if end.capabilities.death_is_fence:
                self._late = [(link, each) for link, each in self._late if link.owner is not end]
            self.run()

    def stall(self, end: LocalTransport) -> None:
        """The process of ``end`` stops: it sends nothing, and takes nothing in."""
        end.stalled = True

    def resume(self, end: LocalTransport) -> None:
        """A stalled process goes on."""
        with self.changed:
            end.stalled = False
            self.run()

    def join(self, end: LocalTransport) -> None:
        """For transports: one more end."""
        with self.changed:
            self._ends[end.identity] = end

    def leave(self, end: LocalTransport) -> None:
        """For transports: an end has closed."""
        self._ends.pop(end.identity, None)

    def find(self, identity: str) -> LocalTransport | None:
        """For transports: the living end with this identity."""
        return self._ends.get(identity)

    def link(self, peer: Peer, owner: LocalTransport, other: LocalTransport) -> Link:
        """For transports: a connection; its two ends know each other."""
        there = Peer(other.next_peer(), owner.identity, owner.name)
        ours, theirs = Link(peer, owner, other), Link(there, other, owner)
        ours.back, theirs.back = theirs, ours
        self._links += [ours, theirs]
        other.links[there.id] = theirs
        other.events.append(Connected(there))
        return ours

    def send(self, link: Link, operation: Operation) -> None:
        """For transports: put an operation on its way, with what goes wrong with it."""
        operation.due_s = self.now_s()
        fault = self.faults.due(operation.kind, link.owner.name, link.other.name, operation.data)
        action = fault.action if fault is not None else ""
        if action == "drop":
            return
        if action == "fail":
            self._answered(link, Failed(operation.token, "the transport refused to send it", in_doubt=False))
        elif action == "late":
            self._late.append((link, operation))
        elif action == "overtake":
            link.way.appendleft(operation)
        else:
            operation.held = action == "hold"
            operation.due_s += fault.delay_s if fault is not None else 0.0
            operation.breaks = action if action.startswith(("kill", "stall")) else ""
            link.way.append(operation)
            if action == "duplicate":
                link.way.append(attrs.evolve(operation))
        self.run()

    def close(self, link: Link) -> None:
        """For transports: the owner of ``link`` accesses nothing of the other end any more."""
        if link.closed:
            return
        link.closed = True
        link.way.clear()
        self._late = [(each, operation) for each, operation in self._late if each is not link]
        for token in list(link.unanswered):
            self._answered(link, Failed(token, "the connection was closed", in_doubt=True))
        link.owner.events.append(Closed(link.peer))
        del link.owner.links[link.peer.id]
        if link.back.closed:
            self._links = [each for each in self._links if each is not link and each is not link.back]
        else:
            self.down(link.back, "it has disconnected")
        self.changed.notify_all()

    def down(self, link: Link, reason: str) -> None:
        """For transports: the owner of ``link`` learns that the other end is gone."""
        if not link.down and not link.closed:
            link.down = True
            link.owner.events.append(PeerDown(link.peer, reason))

    def run(self) -> None:
        """For transports: let everything arrive that can."""
        now_s, moved = self.now_s(), True
        while moved:
            moved = False
            for link in list(self._links):
                while link.way and self._passes(link, now_s):
                    self._arrive(link, link.way.popleft())
                    moved = True
        due = [link for due_s, link in self._deaths if due_s <= now_s]
        self._deaths = [(due_s, link) for due_s, link in self._deaths if due_s > now_s]
        for link in due:
            self.down(link, "its process has ended")
        self.changed.notify_all()

    def _passes(self, link: Link, now_s: float) -> bool:
        operation = link.way[0]
        if operation.held or operation.due_s > now_s or link.owner.stalled:
            return False
        if operation.breaks.startswith("stall"):
            operation.breaks = ""
            self.stall(link.other)
        return not link.other.stalled or (
            operation.kind == "write" and not link.other.capabilities.target_must_progress
        )

    def _arrive(self, link: Link, operation: Operation) -> None:
        if operation.kind == "answer":
            assert operation.answer is not None
            self._answered(link.back, operation.answer)
        elif operation.kind == "message":
            if not link.back.closed and link.other.identity in self._ends:
                link.other.events.append(Message(link.back.peer, operation.data))
        else:
            self._land(link, operation)

    def _land(self, link: Link, operation: Operation) -> None:
        fragments, target = operation.fragments, link.other
        assert fragments is not None
        if target.identity not in self._ends:
            return
        refusal = target.refusal(link.back, fragments, operation.grant)
        if operation.breaks:
            self._copy(link, operation, fragments, len(fragments) // 2)
            self.kill(link.owner if operation.breaks == "kill_sender" else target)
            return
        if not refusal:
            self._copy(link, operation, fragments, len(fragments))
        answer = Failed(operation.token, refusal, in_doubt=False) if refusal else Done(operation.token)
        if not link.back.closed:
            self.send(link.back, Operation("answer", answer=answer))

    def _copy(self, link: Link, operation: Operation, fragments: Fragments, count: int) -> None:
        source = link.owner.memory[fragments.source_region]
        target = link.other.memory[fragments.destination_region]
        for begin, to, size in zip(
            fragments.sources[:count].tolist(),
            fragments.destinations[:count].tolist(),
            fragments.byte_counts[:count].tolist(),
        ):
            target[to : to + size] = source[begin : begin + size]
            names = (link.owner.name, link.other.name)
            where = (fragments.destination_region, to, to + size)
            self.writes.append(WriteRecord(*names, *where, operation.token, operation.grant))

    def _answered(self, link: Link, answer: Done | Failed) -> None:
        """Each write has one answer, however many arrive."""
        if answer.token in link.unanswered:
            del link.unanswered[answer.token]
            link.owner.events.append(answer)
