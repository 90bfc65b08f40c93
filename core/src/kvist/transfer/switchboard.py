"""What happens on a transport and what is due, and what sessions do about it. No I/O and no thread of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeAlias

import attrs

from kvist.errors import TransferError
from kvist.transfer.incoming import Incoming
from kvist.transfer.messages import Alive, Cancel, Describe, Evidence, Publish, Wire, decode, encode
from kvist.transfer.outcome import Outcome, Patience, Status, TransferStats
from kvist.transfer.outgoing import Outgoing
from kvist.transfer.pagetable import PageTable
from kvist.transfer.partner import Partner
from kvist.transfer.transport import (
    Closed,
    Connected,
    Done,
    Event,
    Failed,
    Fragments,
    Int64Array,
    Message,
    Peer,
    PeerDown,
    Region,
    Revoked,
    Transport,
)

Session: TypeAlias = Incoming | Outgoing


class Switchboard:
    """Sessions by request, partners by connection. Implements :class:`~kvist.transfer.partner.Post`. Whoever calls
    ``poll`` of the class below makes progress."""

    def __init__(
        self, transport: Transport, region: Region, table: PageTable, patience: Patience, clock: Callable[[], float]
    ) -> None:
        self.transport, self.table, self.region = transport, table, region.id
        self._arena, self._patience, self._clock = region, patience, clock
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._partners: dict[int, Partner] = {}
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._attempts: dict[int, Incoming] = {}
        self._tokens: dict[int, Outgoing] = {}
        self._grants: dict[int, Incoming] = {}
        #: Asked for and not offered yet, and ended: by request, until when they are remembered.
        self._early: dict[str, list[tuple[Partner, Publish, float]]] = {}
        self._ended: dict[str, tuple[str, float]] = {}
        self._counts = TransferStats()

    @property
    def _sessions(self) -> list[Session]:
        return [*self._outgoing.values(), *self._incoming.values()]

    # What sessions use; see partner.Post.

    def say(self, partner: Partner, message: Wire) -> bool:
        if partner.gone:
            return False
        partner.told_s = self._clock()
        try:
            self.transport.message(partner.peer, encode(message))
        except TransferError:
            return False
        return True

    def over(self, partner: Partner, request: str, attempt: int) -> None:
        reason, _ = self._ended.get(request, ("the request has ended there", 0.0))
        self.say(partner, Evidence(request, attempt, 0, 0, "over", reason=reason))

    def grant(self, owner: Incoming, partner: Partner, begins: Int64Array, ends: Int64Array) -> int:
        grant = next(self._numbers)
        if self.transport.capabilities.grants:
            self._grants[grant] = owner
            self.transport.grant(partner.peer, grant, self._arena, begins, ends)
        return grant

    def revoke(self, grant: int) -> None:
        if self.transport.capabilities.grants:
            self.transport.revoke(grant)

    def write(self, owner: Outgoing, partner: Partner, fragments: Fragments, grant: int) -> int:
        token = next(self._numbers)
        self._tokens[token] = owner
        self.transport.write(partner.peer, fragments, grant, token)
        return token

    # Events.

    def _handle(self, event: Event, now_s: float) -> None:
        if isinstance(event, Message):
            partner = self._partners.get(event.peer.id)
            if partner is not None and not partner.gone:
                partner.heard_s, partner.unwell = now_s, ""
                try:
                    self._hear(partner, decode(event.data), now_s)
                except TransferError as error:
                    self._lose(partner, error.message, now_s)
        elif isinstance(event, Done):
            self._tokens.pop(event.token).written(event.token, now_s)
        elif isinstance(event, Failed):
            self._tokens.pop(event.token).written(event.token, now_s, event.reason, doubt=event.in_doubt)
        elif isinstance(event, Revoked):
            if owner := self._grants.pop(event.grant, None):
                owner.revoked(event.grant)
        elif isinstance(event, Connected):
            self.say(self._partner(event.peer, now_s), Describe(self.table.encode(), self.region))
        elif isinstance(event, PeerDown):
            fenced = self.transport.capabilities.death_is_fence
            self._lose(self._partner(event.peer, now_s), event.reason, now_s, fenced=fenced)
        else:
            assert isinstance(event, Closed)
            if partner := self._partners.pop(event.peer.id, None):
                fenced = self.transport.capabilities.close_is_fence
                self._lose(partner, "the connection was closed", now_s, fenced=fenced)

    def _hear(self, partner: Partner, message: Wire, now_s: float) -> None:
        if isinstance(message, Describe):
            partner.table, partner.region = PageTable.decode(message.table), message.region
            for incoming in list(self._incoming.values()):
                incoming.advance(now_s)
        elif isinstance(message, Publish):
            if outgoing := self._outgoing.get(message.request):
                outgoing.ask(partner, message, now_s)
            elif message.request in self._ended:
                self.over(partner, message.request, message.attempt)
            else:
                entry = partner, message, now_s + message.remaining_s
                self._early.setdefault(message.request, []).append(entry)
        elif isinstance(message, Cancel):
            self._cancelled(partner, message, now_s)
        elif isinstance(message, Evidence):
            session = self._attempts.get(message.attempt)
            if session is None or session.request != message.request:
                self._count(odd_evidence=1)
            else:
                session.report(partner, message, now_s)

    def _cancelled(self, partner: Partner, message: Cancel, now_s: float) -> None:
        outgoing = self._outgoing.get(message.request)
        if outgoing is not None:
            outgoing.unwanted(partner, message.attempt, now_s)
            return
        self._forget_early(lambda request, entry: request == message.request and entry[0] is partner)
        if message.attempt:
            self.over(partner, message.request, message.attempt)

    def _lose(self, partner: Partner, reason: str, now_s: float, *, fenced: bool = False) -> None:
        partner.gone = partner.gone or reason
        self._forget_early(lambda _, entry: entry[0] is partner)
        for incoming in list(self._incoming.values()):
            incoming.lost(partner, partner.gone, now_s, fenced=fenced)
        for outgoing in list(self._outgoing.values()):
            outgoing.lost(partner, partner.gone, now_s)
        if partner.peer.id in self._partners:
            self.transport.disconnect(partner.peer)

    # Time.

    def _sweep(self, now_s: float) -> None:
        for session in self._sessions:
            if session.outcome is None and now_s >= session.deadline_s:
                waited = session.deadline_s - session.began_s
                session.cancel(Outcome(Status.TIMED_OUT, f"it did not end within {waited:g} s"), now_s)
        for session, partner in self._unsettled():
            if now_s >= session.ended_s + self._patience.settle_s:
                self._lose(partner, f"a write was not settled within {self._patience.settle_s:g} s", now_s)
        late = self._forget_early(lambda _, entry: now_s >= entry[2])
        for partner, publish, _ in late:
            reason = "nobody has offered the request"
            self.say(partner, Evidence(publish.request, publish.attempt, 0, 0, "failed", reason=reason))
        for partner in self._needed():
            self._look_after(partner, now_s)
        for request, (_, until_s) in list(self._ended.items()):
            if now_s >= until_s:
                del self._ended[request]
        self._collect(now_s)

    def _look_after(self, partner: Partner, now_s: float) -> None:
        """Give and expect signs of life."""
        silent_s = now_s - partner.heard_s
        capabilities = self.transport.capabilities
        if silent_s >= self._patience.silent_s and not partner.unwell:
            partner.unwell = f"no sign of life for {silent_s:g} s"
            if capabilities.grants or capabilities.close_is_fence:
                self._lose(partner, partner.unwell, now_s)
                return
            # To disconnect would not stop its writes, and we would never learn when they end.
            for incoming in list(self._incoming.values()):
                incoming.lost(partner, partner.unwell, now_s, fenced=False)
            for outgoing in list(self._outgoing.values()):
                outgoing.lost(partner, partner.unwell, now_s)
        if now_s - partner.told_s >= self._patience.alive_s:
            self.say(partner, Alive())
            for incoming in self._incoming.values():
                incoming.insist(partner)

    def _collect(self, now_s: float) -> None:
        """Forget what has ended and is quiescent."""
        until_s = now_s + self._patience.remember_s
        for request, outgoing in list(self._outgoing.items()):
            if outgoing.outcome is not None and outgoing.quiescent:
                del self._outgoing[request]
                self._ended[request] = outgoing.outcome.reason or "the request has been sent", until_s
                self._count(sent=outgoing.outcome.ok, failed=not outgoing.outcome.ok, sent_bytes=outgoing.byte_count)
        for request, incoming in list(self._incoming.items()):
            if incoming.outcome is not None and incoming.quiescent:
                del self._incoming[request], self._attempts[incoming.attempt]
                ok, received = incoming.outcome.ok, incoming.byte_count
                self._count(received=ok, failed=not ok, received_bytes=received)
                self._count(odd_evidence=incoming.odd, wrong_evidence=incoming.wrong)

    def _next_due(self) -> float:
        """When the next thing has to be done without an event."""
        due = [session.deadline_s for session in self._sessions if session.outcome is None]
        due += [until_s for entries in self._early.values() for _, _, until_s in entries]
        due += [until_s for _, until_s in self._ended.values()]
        due += [session.ended_s + self._patience.settle_s for session, _ in self._unsettled()]
        for partner in self._needed():
            due.append(partner.told_s + self._patience.alive_s)
            if not partner.unwell:
                due.append(partner.heard_s + self._patience.silent_s)
        return min(due, default=float("inf"))

    # Small things.

    def _partner(self, peer: Peer, now_s: float) -> Partner:
        """The partner of a connection, from whom something is wanted from now on."""
        partner = self._partners.get(peer.id)
        if partner is None:
            partner = self._partners[peer.id] = Partner(peer, now_s, now_s)
        elif partner not in self._needed():
            partner.heard_s = now_s
        return partner

    def _needed(self) -> list[Partner]:
        """Partners from whom somebody still needs something, or who need something from us."""
        found = {id(partner): partner for session in self._sessions for partner in session.partners}
        found.update((id(partner), partner) for entries in self._early.values() for partner, _, _ in entries)
        return [partner for partner in found.values() if not partner.gone]

    def _unsettled(self) -> list[tuple[Session, Partner]]:
        """What has ended and is not quiescent, and would be if the partner were disconnected: what we write ends with
        the connection, what is written here only where that is promised."""
        fence = self.transport.capabilities.close_is_fence
        return [
            (session, partner)
            for session in self._sessions
            if session.outcome is not None and (fence or isinstance(session, Outgoing))
            for partner in session.partners
            if not partner.gone
        ]

    def _forget_early(
        self, which: Callable[[str, tuple[Partner, Publish, float]], bool]
    ) -> list[tuple[Partner, Publish, float]]:
        forgotten = []
        for request, entries in list(self._early.items()):
            forgotten += [entry for entry in entries if which(request, entry)]
            kept = [entry for entry in entries if not which(request, entry)]
            if kept:
                self._early[request] = kept
            else:
                del self._early[request]
        return forgotten

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = attrs.evolve(self._counts, **counts)
