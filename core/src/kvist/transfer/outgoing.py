"""The sender's side of one request: what it has to give, who asked for it, and when nobody reads it any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import attrs

from kvist.step import IntArray
from kvist.transfer.cutting import cut
from kvist.transfer.messages import Evidence, Publish, unpacked
from kvist.transfer.outcome import DONE, Outcome, Status
from kvist.transfer.partner import Partner, Post
from kvist.transfer.transport import Fragments

#: Bytes of one write, and writes to one receiver under way at once. Messages wait behind them, signs of life too: a
#: peer that takes so much within ``Patience.silent_s`` is not taken for dead.
PART_BYTES, PARTS = 8 << 20, 2


@attrs.frozen(eq=False)
class Piece:
    """pages: per group positional, ``None`` for groups that a later piece brings. begin, end: token positions, the
    first one at a block."""

    pages: Sequence[IntArray | None]
    begin: int
    end: int


@attrs.define(eq=False)
class _Delivery:
    """One receiver. begun, complete: how many pieces are. waiting: parts of pieces that are to be written; writing:
    those that are, by token; each with its piece. left: parts of a piece without an answer. byte_counts: of pieces that
    are begun. refused: why it gets nothing more. told: has it had our last word?"""

    partner: Partner
    asked: Publish
    begun: int = 0
    complete: int = 0
    waiting: deque[tuple[int, Fragments]] = attrs.Factory(deque)
    writing: dict[int, tuple[int, Fragments]] = attrs.Factory(dict)
    left: dict[int, int] = attrs.Factory(dict)
    byte_counts: dict[int, int] = attrs.Factory(dict)
    refused: str = ""
    doubt: bool = False
    told: bool = False
    done: bool = False


class Outgoing:
    """Made by :meth:`Transceiver.send`. ``outcome`` is what became of the request, ``quiescent`` says whether its pages
    can be used for anything else.

    receivers: ranks that are to ask, each for itself. byte_count: bytes written so far. began_s, ended_s: on the
    transceiver's clock.
    """

    def __init__(self, post: Post, request: str, receivers: int, began_s: float, deadline_s: float) -> None:
        self.request, self.receivers = request, receivers
        self.began_s, self.deadline_s = began_s, deadline_s
        self.ended_s = 0.0
        self.outcome: Outcome | None = None
        self.byte_count = 0
        self.payload = b""
        self._post = post
        self._pieces: list[Piece] = []
        self._all_there = False
        self._deliveries: dict[int, _Delivery] = {}

    @property
    def quiescent(self) -> bool:
        """Does nobody read the pages any more?"""
        return self.outcome is not None and not any(each.writing for each in self._deliveries.values())

    @property
    def partners(self) -> list[Partner]:
        """Whom it still needs something from."""
        return [each.partner for each in self._deliveries.values() if each.writing or not each.told]

    def add(self, piece: Piece, now_s: float, *, last: bool, payload: bytes = b"") -> None:
        """One more piece is computed."""
        assert not self._all_there
        self._pieces.append(piece)
        self._all_there, self.payload = last, payload
        for delivery in self._deliveries.values():
            self._advance(delivery, now_s)

    def ask(self, partner: Partner, publish: Publish, now_s: float) -> None:
        """A receiver says where to write."""
        if partner.peer.id in self._deliveries:
            self._post.say(
                partner,
                Evidence(publish.request, publish.attempt, 0, 0, "failed", reason="the request was asked for before"),
            )
            return
        delivery = self._deliveries[partner.peer.id] = _Delivery(partner, publish)
        if self.outcome is not None:
            delivery.refused = self.outcome.reason or "the request has ended"
        self._advance(delivery, now_s)

    def written(self, token: int, now_s: float, failure: str = "", *, doubt: bool = False) -> None:
        """A write has its answer."""
        for delivery in self._deliveries.values():
            written = delivery.writing.pop(token, None)
            if written is None:
                continue
            piece, part = written
            if failure:
                delivery.refused = delivery.refused or failure
                delivery.doubt |= doubt
            else:
                self.byte_count += part.byte_count
                delivery.left[piece] -= 1
                if not delivery.left[piece]:
                    delivery.complete += 1
                    self._report(delivery, piece)
            self._advance(delivery, now_s)

    def lost(self, partner: Partner, reason: str, now_s: float) -> None:
        """A partner is gone; its writes still get their answers."""
        delivery = self._deliveries.get(partner.peer.id)
        if delivery is not None and not delivery.told:
            delivery.told, delivery.refused = True, reason
            self._end(Outcome(Status.FAILED, f"{partner.peer}: {reason}"), now_s)

    def unwanted(self, partner: Partner, attempt: int, now_s: float) -> None:
        """A receiver does not want it any more, or never will (attempt 0)."""
        delivery = self._deliveries.get(partner.peer.id)
        if attempt and (delivery is None or delivery.asked.attempt != attempt or delivery.told):
            return self._post.over(partner, self.request, attempt)
        reason = f"{partner.peer} cancelled it"
        if delivery is not None:
            delivery.refused = delivery.refused or reason
            self._advance(delivery, now_s)
        self._end(Outcome(Status.CANCELLED, reason), now_s)

    def cancel(self, outcome: Outcome, now_s: float) -> None:
        """End it, unless it has ended. What is being written is written to the end."""
        self._end(outcome, now_s)

    def _advance(self, delivery: _Delivery, now_s: float) -> None:
        """Begin the writes that can begin; say the last word when everything has its answer."""
        if delivery.told:
            return
        while not delivery.refused and len(delivery.writing) < PARTS:
            if delivery.waiting:
                piece, part = delivery.waiting.popleft()
                token = self._post.write(self, delivery.partner, part, delivery.asked.grant)
                delivery.writing[token] = piece, part
            elif delivery.begun < len(self._pieces):
                self._begin(delivery, delivery.begun)
                delivery.begun += 1
            else:
                break
        if delivery.writing:
            return
        asked = delivery.asked
        if self._all_there and delivery.complete == len(self._pieces):
            # It has been told with the last piece.
            delivery.told = delivery.done = True
            if sum(each.done for each in self._deliveries.values()) == self.receivers:
                self._end(DONE, now_s)
        elif delivery.refused:
            delivery.told = True
            status: Literal["doubt", "failed"] = "doubt" if delivery.doubt else "failed"
            last_word = Evidence(asked.request, asked.attempt, 0, 0, status, reason=delivery.refused)
            self._post.say(delivery.partner, last_word)
            self._end(Outcome(Status.FAILED, delivery.refused), now_s)

    def _begin(self, delivery: _Delivery, index: int) -> None:
        piece, asked, partner = self._pieces[index], delivery.asked, delivery.partner
        try:
            end = min(piece.end, asked.length)
            fragments = partner.mapping(self._post.table).fragments(
                piece.pages, [unpacked(each) for each in asked.pages], asked.turn, (piece.begin, end)
            )
            fragments = attrs.evolve(fragments, source_region=self._post.region, destination_region=partner.region)
        except Exception as error:  # Whatever it is, the receiver must not have to wait for its deadline.
            delivery.refused = str(error) or type(error).__name__
            return
        parts = list(cut(fragments, PART_BYTES))
        delivery.byte_counts[index], delivery.left[index] = fragments.byte_count, len(parts)
        delivery.waiting += [(index, part) for part in parts]

    def _report(self, delivery: _Delivery, piece: int) -> None:
        last = self._all_there and piece == len(self._pieces) - 1
        asked = delivery.asked
        self._post.say(
            delivery.partner,
            Evidence(
                asked.request,
                asked.attempt,
                piece,
                len(self._pieces) if last else 0,
                "done",
                delivery.byte_counts[piece],
                payload=self.payload if last else b"",
            ),
        )

    def _end(self, outcome: Outcome, now_s: float) -> None:
        if self.outcome is not None:
            return
        self.outcome, self.ended_s = outcome, now_s
        if not outcome.ok:
            for delivery in list(self._deliveries.values()):
                delivery.refused = delivery.refused or outcome.reason or outcome.status.value
                self._advance(delivery, now_s)
