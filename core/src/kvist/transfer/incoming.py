"""The receiver's side of one request: whom it told where to write, what they reported, and when that is over."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import attrs

from kvist.step import NO_PAGE, IntArray
from kvist.transfer.compatibility import differences, uncovered
from kvist.transfer.mapping import wanted_bytes
from kvist.transfer.messages import Cancel, Evidence, Publish, packed
from kvist.transfer.outcome import DONE, Outcome, Status
from kvist.transfer.partner import Partner, Post, ranges_of


@attrs.define(eq=False)
class _Writer:
    """One of those that are to write. told: it knows the addresses. settled: it cannot write to them any more.
    trusted: what it says counts, because it has not contradicted itself."""

    partner: Partner
    grant: int = -1
    told: bool = False
    settled: bool = False
    trusted: bool = True
    pieces: int = 0
    reports: dict[int, Evidence] = attrs.Factory(dict)
    failure: Evidence | None = None

    @property
    def complete(self) -> bool:
        return self.trusted and len(self.reports) == self.pieces > 0

    def contradicts(self, evidence: Evidence) -> bool:
        """Can this not be true together with what it said before?"""
        if self.failure is not None or self.complete:
            return True
        if evidence.status != "done":
            return False  # The last word after some pieces, of none in particular.
        if evidence.piece in self.reports:
            return True
        ends = evidence.pieces or self.pieces
        return bool(ends) and max(evidence.piece, *self.reports, 0) >= ends


class Incoming:
    """Made by :meth:`Transceiver.receive`. Two answers, apart: ``outcome`` is what the request can count on,
    ``quiescent`` says whether its pages can be used for anything else. One may come long before the other.

    request: its id. attempt: this transceiver's number for it. length: tokens. payload: small data of the sender.
    byte_count: bytes that writers have reported. began_s, ended_s: on the transceiver's clock; the end is that of the
    logical outcome.
    """

    def __init__(
        self,
        post: Post,
        request: str,
        attempt: int,
        length: int,
        pages: tuple[IntArray, ...],
        partners: Sequence[Partner],
        began_s: float,
        deadline_s: float,
    ) -> None:
        self.request, self.attempt, self.length, self.pages = request, attempt, length, pages
        self.began_s, self.deadline_s = began_s, deadline_s
        self.ended_s = 0.0
        self.outcome: Outcome | None = None
        self.payload = b""
        self.odd = self.wrong = 0
        self._post = post
        self._writers = [_Writer(partner) for partner in partners]
        self._published = False
        self._wanted_bytes = 0

    @property
    def quiescent(self) -> bool:
        """Can nobody write to the pages any more?"""
        if self.outcome is None:
            return False
        return all(writer.settled or not writer.told for writer in self._writers)

    @property
    def byte_count(self) -> int:
        return sum(report.byte_count for writer in self._writers for report in writer.reports.values())

    @property
    def page_count(self) -> int:
        """Pages that are written to."""
        return sum(int((pages != NO_PAGE).sum()) for pages in self.pages)

    @property
    def partners(self) -> list[Partner]:
        """Whom it still needs something from."""
        if self.outcome is None:
            return [writer.partner for writer in self._writers if not writer.complete]
        return [writer.partner for writer in self._writers if writer.told and not writer.settled]

    def advance(self, now_s: float) -> None:
        """Tell every writer where to write, once all of them have described themselves."""
        if self._published or self.outcome is not None:
            return
        for writer in self._writers:
            if reason := writer.partner.gone or writer.partner.unwell:
                return self._end(Outcome(Status.FAILED, f"{writer.partner.peer}: {reason}"), now_s)
        tables = [writer.partner.table for writer in self._writers if writer.partner.table is not None]
        if len(tables) < len(self._writers):
            return
        for writer, table in zip(self._writers, tables):
            if found := differences(table, self._post.table):
                reason = f"{writer.partner.peer} does not fit: {'; '.join(found)}"
                return self._end(Outcome(Status.FAILED, reason), now_s)
        if found := uncovered(self._post.table, tables):
            return self._end(Outcome(Status.FAILED, f"the senders lack something: {'; '.join(found)}"), now_s)
        self._published = True
        self._wanted_bytes = wanted_bytes(self._post.table, tables, self.pages, self.length)
        begins, ends = ranges_of(self._post.table, self.pages)
        pages = tuple(packed(each) for each in self.pages)
        turn = zlib.crc32(self.request.encode())
        for writer in self._writers:
            writer.grant = self._post.grant(self, writer.partner, begins, ends)
            publish = Publish(
                self.request, self.attempt, writer.grant, turn, self.length, pages, self.deadline_s - now_s
            )
            writer.told = self._post.say(writer.partner, publish)
            if not writer.told:
                reason = f"{writer.partner.peer} could not be told where to write"
                return self._end(Outcome(Status.FAILED, reason), now_s)

    def report(self, partner: Partner, evidence: Evidence, now_s: float) -> None:
        """Take in what a writer says."""
        writer = next((each for each in self._writers if each.partner is partner and each.told), None)
        if writer is None:
            self.wrong += 1
            return self._end(Outcome(Status.FAILED, f"{partner.peer} reports and was not asked to write"), now_s)
        if evidence.status == "over":
            writer.settled = writer.settled or writer.trusted
            return self._end(Outcome(Status.FAILED, f"{partner.peer}: {evidence.reason}"), now_s)
        if evidence in (writer.reports.get(evidence.piece), writer.failure):
            self.odd += 1
            return
        if writer.contradicts(evidence):
            # What it said before cannot be relied on either.
            self.wrong += 1
            writer.trusted = writer.settled = False
            self._post.revoke(writer.grant)
            return self._end(Outcome(Status.FAILED, f"{partner.peer} contradicts itself"), now_s)
        if evidence.status != "done":
            writer.failure = evidence
            writer.settled = writer.trusted and evidence.status == "failed"
            return self._end(Outcome(Status.FAILED, f"{partner.peer}: {evidence.reason}"), now_s)
        writer.reports[evidence.piece] = evidence
        writer.pieces = writer.pieces or evidence.pieces
        self.payload = self.payload or evidence.payload
        writer.settled = writer.settled or writer.complete
        if self.outcome is None and all(each.complete for each in self._writers):
            if self.byte_count != self._wanted_bytes:
                reason = f"{self.byte_count} of {self._wanted_bytes} bytes were written"
                return self._end(Outcome(Status.FAILED, reason), now_s)
            self._end(DONE, now_s)

    def lost(self, partner: Partner, reason: str, now_s: float, *, fenced: bool) -> None:
        """A partner is gone; ``fenced``: its writes cannot come any more."""
        for writer in self._writers:
            if writer.partner is partner and not writer.complete:
                writer.settled = writer.settled or fenced
                self._end(Outcome(Status.FAILED, f"{partner.peer}: {reason}"), now_s)

    def revoked(self, grant: int) -> None:
        """Nothing can be written under a grant any more."""
        for writer in self._writers:
            if writer.grant == grant:
                writer.settled = True

    def cancel(self, outcome: Outcome, now_s: float) -> None:
        """End it, unless it has ended."""
        self._end(outcome, now_s)

    def insist(self, partner: Partner) -> None:
        """Ask again a writer that has not settled, because the last word may be lost."""
        if self.outcome is not None and any(w.partner is partner and w.told and not w.settled for w in self._writers):
            self._post.say(partner, Cancel(self.request, self.attempt))

    def _end(self, outcome: Outcome, now_s: float) -> None:
        """The first outcome counts. Whoever has not reported is told to stop, and where there are grants made to."""
        if self.outcome is not None:
            return
        self.outcome, self.ended_s = outcome, now_s
        for writer in self._writers:
            if writer.told and not writer.settled:
                self._post.say(writer.partner, Cancel(self.request, self.attempt))
            elif not writer.told:
                # It may be waiting for us to ask.
                self._post.say(writer.partner, Cancel(self.request, 0))
            if writer.grant >= 0:
                self._post.revoke(writer.grant)
