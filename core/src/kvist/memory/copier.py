"""When copies between tiers run. No torch.

Copying never blocks its user: a batch is submitted, its pages stay leased on both sides, and its ticket comes back from
``finished`` once it has arrived or failed. Nothing may rely on the order in which batches run, so a copier refuses a
batch whose pages a pending one still needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np

from kvist.errors import StateError, TierError
from kvist.memory.mover import Copy, Mover, Tier
from kvist.step import IntArray, present

#: Seconds that ``close`` gives the copy under way. A disk that takes longer for one batch does not answer any more.
_CLOSE_S = 30.0


@attrs.frozen
class Ticket:
    """Names one submitted batch; numbers count from 1 in each copier."""

    number: int


@attrs.frozen(eq=False)
class Finished:
    """A batch nobody touches any more: its source pages are free to change, its target pages have what arrived.

    error: None when every block arrived.
    failed: positions of the blocks that did not arrive, ascending; the content of their target pages is undefined.
    """

    ticket: Ticket
    error: TierError | None = None
    failed: tuple[int, ...] = ()


class Copier(Protocol):
    """Runs batches some time after they are submitted. For one user thread. Only ``wait`` and ``close`` may block."""

    @property
    def room(self) -> int:
        """How many more batches ``submit`` takes before ``finished`` reports some."""

    def submit(self, copy: Copy) -> Ticket:
        """Take a batch over. Raises StateError, and takes nothing, without room, after ``close``, or when a target page
        belongs to a pending batch or a source page is the target of one."""

    def finished(self) -> list[Finished]:
        """Batches that have finished since the last call, in the order in which they did; each is reported once."""

    def wait(self, ticket: Ticket | None, deadline_s: float) -> bool:
        """Wait at most ``deadline_s`` seconds until ``finished`` would report the batch, or all with None, or has done
        so; whether that is the case."""

    def close(self) -> None:
        """Take no more, finish the copy under way and fail the others; ``finished`` still reports. Again is a no-op."""


class _Pending:
    """Tickets that are not reported yet, and their pages."""

    def __init__(self, pending_max: int) -> None:
        self._pending_max = pending_max
        self._copies: dict[Ticket, Copy] = {}
        self._count = 0
        # By tier and group, for each page how many pending batches read and write it.
        self._readers: dict[tuple[Tier, int], IntArray] = {}
        self._writers: dict[tuple[Tier, int], IntArray] = {}

    @property
    def room(self) -> int:
        return self._pending_max - len(self._copies)

    def add(self, copy: Copy) -> Ticket:
        if self.room <= 0:
            raise StateError(
                f"copy ({copy}): {len(self._copies)} copies are pending, and there is room for {self._pending_max}",
                hint="ask `room` before, and collect what has finished",
            )
        for group, pages in enumerate(copy.source_pages):
            self._require_idle(copy, copy.source, group, pages, self._writers)
        for group, pages in enumerate(copy.target_pages):
            self._require_idle(copy, copy.target, group, pages, self._writers)
            self._require_idle(copy, copy.target, group, pages, self._readers)
        self._change(copy, 1)
        self._count += 1
        ticket = Ticket(self._count)
        self._copies[ticket] = copy
        return ticket

    def remove(self, reports: Sequence[Finished]) -> None:
        for report in reports:
            self._change(self._copies.pop(report.ticket), -1)

    def _require_idle(
        self, copy: Copy, tier: Tier, group: int, pages: IntArray, users: dict[tuple[Tier, int], IntArray]
    ) -> None:
        counts = users.get((tier, group))
        if counts is None:
            return
        pages = present(pages)
        pages = pages[pages < len(counts)]
        busy = pages[counts[pages] > 0]
        if len(busy):
            raise StateError(
                f"copy ({copy}): a pending copy still {'writes' if users is self._writers else 'reads'} {tier.value} "
                f"pages {busy.tolist()} of group {group}",
                hint="keep the pages of a copy leased until it has finished",
            )

    def _change(self, copy: Copy, by: int) -> None:
        for users, tier, arrays in (
            (self._readers, copy.source, copy.source_pages),
            (self._writers, copy.target, copy.target_pages),
        ):
            for group, pages in enumerate(arrays):
                pages = present(pages)
                if len(pages):
                    counts = users.get((tier, group), np.empty(0, np.int32))
                    lacking = int(pages.max()) + 1 - len(counts)
                    if lacking > 0:
                        counts = users[tier, group] = np.pad(counts, (0, max(lacking, len(counts))))
                    counts[pages] += by


class ManualCopier:
    """Runs a batch when told to, in any order, well or not: for tests.

    queued: batches that were submitted and not run, in order of submission.
    """

    def __init__(self, mover: Mover, pending_max: int = 64) -> None:
        self._mover = mover
        self._pending = _Pending(pending_max)
        self.queued: dict[Ticket, Copy] = {}
        self._marks: dict[Ticket, object] = {}
        self._done: list[Finished] = []
        self._closed = False

    @property
    def room(self) -> int:
        return self._pending.room

    def submit(self, copy: Copy) -> Ticket:
        _require_open(self._closed)
        mark = self._mover.mark()
        ticket = self._pending.add(copy)
        self.queued[ticket], self._marks[ticket] = copy, mark
        return ticket

    def run(self, *tickets: Ticket) -> None:
        """Run these batches in this order, all that are queued without any."""
        for ticket in tickets or tuple(self.queued):
            self._done.append(_move(self._mover, ticket, self.queued.pop(ticket), self._marks.pop(ticket)))

    def fail(self, ticket: Ticket, *positions: int) -> None:
        """Run a batch in which these blocks fail, or all without any."""
        copy, mark = self.queued.pop(ticket), self._marks.pop(ticket)
        failed = set(positions or range(copy.block_count))
        others = [position for position in range(copy.block_count) if position not in failed]
        if others:
            failed.update(others[i] for i in _move(self._mover, ticket, copy.only(others), mark).failed)
        self._done.append(_report(ticket, copy, sorted(failed)))

    def finished(self) -> list[Finished]:
        done, self._done = self._done, []
        self._pending.remove(done)
        return done

    def wait(self, ticket: Ticket | None, deadline_s: float) -> bool:
        """Runs nothing and does not wait."""
        return not self.queued if ticket is None else ticket not in self.queued

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._done += [_abandoned(ticket, copy) for ticket, copy in self.queued.items()]
            self.queued.clear()
            self._mover.close()


class ThreadCopier:
    """Runs batches one after the other, in order of submission, in a thread of its own."""

    def __init__(self, mover: Mover, pending_max: int = 64) -> None:
        """``pending_max`` batches, queued or not yet reported, are the most it takes."""
        self._mover = mover
        self._pending = _Pending(pending_max)
        # Guards all below.
        self._changed = threading.Condition()
        self._queue: deque[tuple[Ticket, Copy, object]] = deque()
        self._unfinished: set[Ticket] = set()
        self._done: list[Finished] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvist-copier", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        return self._pending.room

    def submit(self, copy: Copy) -> Ticket:
        _require_open(self._closed)
        mark = self._mover.mark()
        ticket = self._pending.add(copy)
        with self._changed:
            self._queue.append((ticket, copy, mark))
            self._unfinished.add(ticket)
            self._changed.notify_all()
        return ticket

    def finished(self) -> list[Finished]:
        with self._changed:
            done, self._done = self._done, []
        self._pending.remove(done)
        return done

    def wait(self, ticket: Ticket | None, deadline_s: float) -> bool:
        def is_over() -> bool:
            return not self._unfinished if ticket is None else ticket not in self._unfinished

        with self._changed:
            return self._changed.wait_for(is_over, deadline_s)

    def close(self) -> None:
        """Raises TierError, and leaves the mover alone, when the copy under way does not end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TierError(
                f"the copy under way has not ended {_CLOSE_S:g} s after the copier was closed",
                hint="do not free its memory; a disk that does not answer is the likely cause",
            )
        self._mover.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                ticket, copy, mark = self._queue.popleft()
                closed = self._closed
            report = _abandoned(ticket, copy) if closed else _move(self._mover, ticket, copy, mark)
            with self._changed:
                self._unfinished.discard(ticket)
                self._done.append(report)
                self._changed.notify_all()


def _require_open(closed: bool) -> None:
    if closed:
        raise StateError("the copier is closed", hint="make a new one")


def _move(mover: Mover, ticket: Ticket, copy: Copy, mark: object) -> Finished:
    """Any failure of a batch is a report: the thread that copies must outlive it."""
    try:
        return _report(ticket, copy, mover.move(copy, mark))
    except Exception as cause:
        return _report(ticket, copy, range(copy.block_count), cause)


def _report(ticket: Ticket, copy: Copy, failed: Sequence[int], cause: Exception | None = None) -> Finished:
    if not failed:
        return Finished(ticket)
    why = f": {type(cause).__name__}: {cause}" if cause else ""
    error = TierError(f"copy {ticket.number} ({copy}): {len(failed)} did not arrive{why}")
    error.__cause__ = cause
    return Finished(ticket, error, tuple(failed))


def _abandoned(ticket: Ticket, copy: Copy) -> Finished:
    return _report(ticket, copy, range(copy.block_count), StateError("the copier was closed before it began"))
