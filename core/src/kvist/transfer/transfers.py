"""A cache manager's transfers: what leaves is kept while somebody reads it, what comes is published when complete."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import attrs
import numpy.typing as npt

from kvist.contract import CacheManager
from kvist.handover import Hold, Landing
from kvist.sequence import Sequence
from kvist.spec import Scope
from kvist.transfer.incoming import Incoming
from kvist.transfer.outcome import Outcome
from kvist.transfer.outgoing import Outgoing
from kvist.transfer.transceiver import Transceiver

_DEFAULT_SCOPE = Scope()


@attrs.define(eq=False)
class Sending:
    """A request on its way to another process. sent: tokens of it that are given to the transceiver."""

    session: Outgoing
    sent: int = 0
    _holds: list[Hold] = attrs.Factory(list)

    @property
    def outcome(self) -> Outcome | None:
        return self.session.outcome


@attrs.define(eq=False)
class Receiving:
    """A request on its way from another process.

    sequence: what goes on here, once it has arrived; ``None`` before, and for good if it does not. payload: what the
    sender let ride along, once it is there.
    """

    session: Incoming
    sequence: Sequence | None
    _landing: Landing | None
    _hold: Hold | None = None

    @property
    def outcome(self) -> Outcome | None:
        return self.session.outcome

    @property
    def payload(self) -> bytes:
        return self.session.payload


class Transfers:
    """Belongs to the thread that drives the manager; the transceiver may be polled by another one.

    Call :meth:`poll` once per step, also when nothing else is to be done: it is what gives pages back.
    """

    def __init__(self, manager: CacheManager, transceiver: Transceiver) -> None:
        self.manager, self.transceiver = manager, transceiver
        self._block = manager.layout.block_tokens
        self._whole = [not group.sparse for group in manager.layout.groups]
        self._sending: list[Sending] = []
        self._receiving: list[Receiving] = []

    def begin(self, request: str, *, receivers: int = 1, deadline_s: float | None = None) -> Sending:
        """Offer a request before its prefill has ended; see :meth:`Transceiver.send`."""
        sending = Sending(self.transceiver.send(request, receivers=receivers, deadline_s=deadline_s))
        self._sending.append(sending)
        return sending

    def advance(self, sending: Sending, sequence: Sequence) -> None:
        """Send the whole blocks that the sequence has computed by now, of groups that keep every block. Between steps.
        Does nothing when there are none, or when the request has ended."""
        end = sequence.published // self._block * self._block
        if sending.session.outcome is not None or end <= sending.sent:
            return
        hold = self.manager.lend(sequence)
        sending._holds.append(hold)
        pages = [each if whole else None for each, whole in zip(hold.pages, self._whole)]
        self.transceiver.add(sending.session, pages, sending.sent, end, last=False)
        sending.sent = end

    def finish(self, sending: Sending, sequence: Sequence, payload: bytes = b"") -> None:
        """Send the rest, and close the sequence: its slot and tables are free at once, its pages when they have been
        read. payload: small data that rides along, e.g. the first token."""
        hold = self.manager.hand_over(sequence)
        sending._holds.append(hold)
        if sending.session.outcome is not None:
            return
        if sending.sent:
            history = [each if whole else None for each, whole in zip(hold.pages, self._whole)]
            self.transceiver.add(sending.session, history, sending.sent, hold.length, last=False)
        pages = [None if whole and sending.sent else each for each, whole in zip(hold.pages, self._whole)]
        self.transceiver.add(sending.session, pages, 0, hold.length, last=True, payload=payload)
        sending.sent = hold.length

    def send(
        self,
        request: str,
        sequence: Sequence,
        payload: bytes = b"",
        *,
        receivers: int = 1,
        deadline_s: float | None = None,
    ) -> Sending:
        """Offer all that a sequence has computed, and close it."""
        sending = self.begin(request, receivers=receivers, deadline_s=deadline_s)
        try:
            self.finish(sending, sequence, payload)
        except Exception:
            self.cancel(sending)
            raise
        return sending

    def receive(
        self,
        request: str,
        tokens: npt.ArrayLike,
        senders: SequenceOf[bytes],
        scope: Scope = _DEFAULT_SCOPE,
        *,
        length: int | None = None,
        deadline_s: float | None = None,
    ) -> Receiving:
        """Let ``senders``, all ranks of the other side by their hellos, fill a new sequence for ``tokens`` up to
        ``length`` (default: all of them). What is cached here is not sent; if that is all, the sequence is there at
        once, and only the payload is to come.

        Raises what ``manager.land`` and ``Transceiver.receive`` raise; nothing has changed then.
        """
        landing = self.manager.land(tokens, scope, length=length)
        try:
            session = self.transceiver.receive(request, landing.pages, landing.length, senders, deadline_s=deadline_s)
        except Exception:
            self.manager.give_up(landing).release()
            raise
        receiving = Receiving(session, None, landing)
        if landing.complete:
            receiving.sequence, receiving._landing = self.manager.landed(landing), None
        self._receiving.append(receiving)
        return receiving

    def cancel(self, transfer: Sending | Receiving) -> None:
        """End it; ``poll`` gives the pages back when that is safe. Idempotent."""
        self.transceiver.cancel(transfer.session)

    def poll(self) -> list[Sending | Receiving]:
        """Publish what has arrived, and give back what nobody reads or writes any more. Returns the transfers that are
        over: they have their outcome and hold no page. One that failed tells the engine to compute the request here."""
        over: list[Sending | Receiving] = []
        for sending in self._sending:
            if sending.session.quiescent:
                for hold in sending._holds:
                    hold.release()
                over.append(sending)
        for receiving in self._receiving:
            # Asked once, before: another thread may end the session at any time.
            quiescent = receiving.session.quiescent
            self._take_in(receiving)
            if quiescent:
                if receiving._hold is not None:
                    receiving._hold.release()
                over.append(receiving)
        self._sending = [each for each in self._sending if each not in over]
        self._receiving = [each for each in self._receiving if each not in over]
        return over

    @property
    def open(self) -> int:
        """Transfers that are not over."""
        return len(self._sending) + len(self._receiving)

    def _take_in(self, receiving: Receiving) -> None:
        landing, outcome = receiving._landing, receiving.session.outcome
        if landing is None or outcome is None:
            return
        if not outcome.ok:
            receiving._hold, receiving._landing = self.manager.give_up(landing), None
        elif receiving.session.quiescent:
            receiving.sequence, receiving._landing = self.manager.landed(landing), None
