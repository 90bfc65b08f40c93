"""One process's end of all transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs

from kvist.errors import RequestError, TransferError
from kvist.step import IntArray
from kvist.transfer.incoming import Incoming
from kvist.transfer.outcome import Outcome, Patience, Status, TransferStats
from kvist.transfer.outgoing import Outgoing, Piece
from kvist.transfer.pagetable import PageTable
from kvist.transfer.switchboard import Session, Switchboard
from kvist.transfer.transport import IncompatibleError, Region, Transport

_PATIENCE = Patience()


class Transceiver(Switchboard):
    """Sends and receives requests' caches over one transport. Makes progress in ``poll`` only; any thread may call the
    other methods meanwhile.

    transport: belongs to the transceiver from now on, which closes it. region: of the transport, the arena that
    ``table`` describes. clock: seconds, never going back.
    """

    def __init__(
        self,
        transport: Transport,
        region: Region,
        table: PageTable,
        *,
        patience: Patience = _PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if table.arena_bytes > region.byte_count:
            raise TransferError(
                f"the page table describes {table.arena_bytes} bytes, the registered memory has {region.byte_count}",
                hint="register the memory of the layout that was described",
            )
        super().__init__(transport, region, table, patience, clock)

    def hello(self) -> bytes:
        """What a receiver needs to reach this process; travels with the request, any way."""
        return self.transport.hello()

    def send(self, request: str, *, receivers: int = 1, deadline_s: float | None = None) -> Outgoing:
        """Offer a request's cache to ``receivers`` ranks, which ask for it. What there is to give is added with
        :meth:`Outgoing.add` through :meth:`add`.

        request: an id that no other request of this process has while it lives. deadline_s: seconds from now.
        Raises RequestError for an id in use.
        """
        with self._lock:
            if request in self._outgoing:
                raise RequestError(f"request {request!r} is being sent already", hint="give each request its own id")
            now_s = self._clock()
            session = Outgoing(self, request, receivers, now_s, self._deadline(now_s, deadline_s))
            self._outgoing[request] = session
            self._ended.pop(request, None)
            for partner, publish, _ in self._early.pop(request, ()):
                session.ask(partner, publish, now_s)
            self.transport.wake()
            return session

    def add(
        self,
        session: Outgoing,
        pages: Sequence[IntArray | None],
        begin: int,
        end: int,
        *,
        last: bool,
        payload: bytes = b"",
    ) -> None:
        """Give the next piece: tokens ``begin .. end - 1``, ``begin`` at a block.

        pages: per group, positional over the whole request; ``None`` for groups that a later piece brings, as windows
            and states are. They must stay as they are until the session is quiescent. payload: small data that rides
            with the last piece.
        """
        with self._lock:
            session.add(Piece(pages, begin, end), self._clock(), last=last, payload=payload)
            self.transport.wake()

    def receive(
        self,
        request: str,
        pages: Sequence[IntArray],
        length: int,
        senders: Sequence[bytes],
        *,
        deadline_s: float | None = None,
    ) -> Incoming:
        """Let all of ``senders``, ranks of one instance by their hellos, write a request's cache to ``pages``.

        pages: per group, positional, NO_PAGE where nothing is to be written; nobody else may write to them until the
            session is quiescent. length: tokens. deadline_s: seconds from now.
        What goes wrong with a sender is the session's outcome. Raises RequestError for an id in use and for no sender.
        """
        with self._lock:
            if request in self._incoming:
                raise RequestError(
                    f"request {request!r} is being received already", hint="give each request its own id"
                )
            if not senders:
                raise RequestError(f"request {request!r} has no sender")
            now_s, attempt = self._clock(), next(self._numbers)
            partners, refusal = [], ""
            for hello in senders:
                try:
                    partners.append(self._partner(self.transport.connect(hello), now_s))
                except IncompatibleError as error:
                    refusal = refusal or str(error)
            deadline = self._deadline(now_s, deadline_s)
            session = Incoming(self, request, attempt, length, tuple(pages), partners, now_s, deadline)
            self._incoming[request] = self._attempts[attempt] = session
            if refusal:
                session.cancel(Outcome(Status.FAILED, refusal), now_s)
            session.advance(now_s)
            self.transport.wake()
            return session

    def cancel(self, session: Session) -> bool:
        """End a session, unless it has ended. Idempotent. Can its pages be used for something else now?"""
        with self._lock:
            session.cancel(Outcome(Status.CANCELLED, "it was cancelled"), self._clock())
            self.transport.wake()
            return session.quiescent

    def poll(self, timeout_s: float = 0.0) -> None:
        """Act on what has happened and on what is due. Waits for something to happen, up to ``timeout_s``."""
        with self._lock:
            wait_s = min(timeout_s, max(0.0, self._next_due() - self._clock()))
        events = self.transport.poll(wait_s)
        with self._lock:
            now_s = self._clock()
            for event in events:
                self._handle(event, now_s)
            self._sweep(now_s)

    def stats(self) -> TransferStats:
        """Numbers so far."""
        with self._lock:
            return attrs.evolve(
                self._counts,
                odd_evidence=self._counts.odd_evidence + sum(each.odd for each in self._incoming.values()),
                wrong_evidence=self._counts.wrong_evidence + sum(each.wrong for each in self._incoming.values()),
                open_sessions=sum(each.outcome is None for each in self._sessions),
                quarantined_pages=sum(
                    each.page_count for each in self._incoming.values() if each.outcome and not each.quiescent
                ),
                peers=len(self._partners),
                remembered=len(self._ended) + sum(map(len, self._early.values())),
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """End everything, disconnect, and close the transport. Raises TransferError while somebody may still write to
        pages of ours or read them; call it again then."""
        with self._lock:
            outcome = Outcome(Status.CANCELLED, "its process is shutting down")
            for session in self._sessions:
                session.cancel(outcome, self._clock())
        self._settle(timeout_s, lambda: not self._sessions)
        if self._sessions:
            # Not disconnected: their peers may still say that they have ended.
            raise TransferError(
                f"{len(self._sessions)} request(s) are still being written or read",
                hint="close again when their peers have ended",
            )
        with self._lock:
            for partner in self._partners.values():
                self.transport.disconnect(partner.peer)
        self._settle(timeout_s, lambda: not self._partners)
        self.transport.close()

    def _deadline(self, now_s: float, deadline_s: float | None) -> float:
        return now_s + (self._patience.request_s if deadline_s is None else deadline_s)

    def _settle(self, timeout_s: float, done: Callable[[], bool]) -> None:
        # Of the world's time, whatever the sessions' clock is: somebody waits for the call to return.
        until_s = time.monotonic() + timeout_s
        self.poll()
        while not done() and (left_s := until_s - time.monotonic()) > 0:
            self.poll(left_s)
