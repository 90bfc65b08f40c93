"""How a transfer ends, and what is counted."""

from __future__ import annotations

import enum

import attrs


class Status(enum.Enum):
    """The logical outcome of a session. It says nothing about when its pages can be used again."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


@attrs.frozen
class Outcome:
    """reason: why, empty for ``DONE``."""

    status: Status
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.DONE


DONE = Outcome(Status.DONE)


@attrs.frozen
class Patience:
    """All waits, in seconds.

    request_s: until a request must have ended, unless it says another time. alive_s: between signs of life. silent_s:
        without one, until a peer with open requests counts as gone. settle_s: after the end of a request, until a peer
        that has not answered or reported is disconnected, where that ends its access. remember_s: how long a sender
        knows of a request that has ended, so that whoever asks late is told why.
    """

    request_s: float = 60.0
    alive_s: float = 1.0
    silent_s: float = 5.0
    settle_s: float = 10.0
    remember_s: float = 60.0


@attrs.frozen
class TransferStats:
    """Counters of one transceiver since it was made, and what is true now.

    sent, received: sessions that ended well; failed: any other way. sent_bytes, received_bytes: really written, as the
    writers say. odd_evidence: duplicates, and what belongs to nothing that is known; wrong_evidence: contradictions and
    what comes from the wrong peer. open_sessions: without an outcome. quarantined_pages: of sessions that have ended
    and that somebody may still write to. peers: connections. remembered: ended requests, and ones that nobody offered
    yet.
    """

    sent: int = 0
    received: int = 0
    failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    odd_evidence: int = 0
    wrong_evidence: int = 0
    open_sessions: int = 0
    quarantined_pages: int = 0
    peers: int = 0
    remembered: int = 0
