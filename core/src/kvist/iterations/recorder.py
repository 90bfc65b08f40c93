"""Recording a manager and the requests that an engine runs on it."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import BinaryIO, Literal

import attrs
import msgspec

from kvist.contract import CacheManager
from kvist.errors import SpecError, StateError
from kvist.iterations.records import (
    Begin,
    BranchesRecord,
    BranchRecord,
    DeviceGroup,
    Group,
    LowerGroup,
    LowerTier,
    Phase,
    Record,
    RequestRecord,
    StepRecord,
    Tier,
    encoded,
)
from kvist.stats import ManagerStats
from kvist.step import Step


class Iterations:
    """Makes the records of one run. Belongs to the thread that drives the manager; any thread may call :meth:`since`.

    source: what is recorded, for people. clock: gives times in ``time_unit``; the run begins now. keep: newest records
    that :meth:`since` can give. file: gets every line as well; it is the caller's, who closes it. When it cannot be
    written any more, a warning says so and recording goes on without it.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        source: str = "",
        clock: Callable[[], float] = time.monotonic,
        time_unit: Literal["s", "steps"] = "s",
        keep: int = 4096,
        file: BinaryIO | None = None,
    ) -> None:
        if keep < 1:
            raise SpecError(f"keep={keep} must be at least 1 record")
        self._manager = manager
        self._clock, self._origin = clock, clock()
        self._file = file
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque(maxlen=keep)
        #: Of the next record.
        self.number = 0
        self._last = manager.stats()
        self.begin = _begin(self._last, source, time_unit, manager.layout.block_tokens)
        self._write(encoded(self.begin))

    @property
    def time(self) -> float:
        """Since the run began."""
        return self._clock() - self._origin

    @property
    def dropped(self) -> int:
        """Records that :meth:`since` can not give any more."""
        return self.number - len(self._kept)

    def step(self, step: Step | None = None, *, running: int = 0, waiting: int = 0) -> None:
        """Record what happened since the last record. After ``manager.complete(step)``.

        Without a step it records what came after the last one, and nothing if that is nothing.
        """
        now = self._manager.stats()
        if step is None and now == self._last:
            return
        self._add(_step(self.number, self.time, now.since(self._last), step, running, waiting))
        self._last = now

    def request(self, name: str) -> RequestTimer:
        """A request has arrived, and is in the queue."""
        return RequestTimer(self, name)

    def branches(self, limit: int = 40) -> None:
        """Record the largest branches of the prefix tree. Takes time in proportion to its extents."""
        found = tuple(BranchRecord(**attrs.asdict(branch)) for branch in self._manager.branches(limit))
        self._add(BranchesRecord(self.number, self.time, found))

    def close(self) -> None:
        """Record what came after the last step, and the branches as they are now."""
        self.step()
        self.branches()

    def since(self, number: int = -1) -> bytes:
        """The lines of all records after record ``number`` that are kept, behind a line that says what they are about
        and how many are gone. Any thread."""
        with self._lock:
            first = self.number - len(self._kept)
            lines = list(islice(self._kept, max(0, number + 1 - first), None))
        gone = max(0, first - (number + 1))
        begin = self.begin if not gone else msgspec.structs.replace(self.begin, dropped=gone)
        return b"".join([encoded(begin), *lines])

    def _add(self, record: Record) -> None:
        line = encoded(record)
        with self._lock:
            self._kept.append(line)
            self.number += 1
        self._write(line)

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except (OSError, ValueError) as error:
            self._file = None
            # Nobody's request may fail because a disk is full.
            warnings.warn(f"iteration records are not written to their file any more: {error}", stacklevel=2)


class RequestTimer:
    """One request on its way through the phases. Made by :meth:`Iterations.request`."""

    def __init__(self, iterations: Iterations, name: str) -> None:
        self._iterations = iterations
        self._name = name
        self._spent: dict[Phase, float] = {"queue": 0.0, "transfer": 0.0, "prefill": 0.0, "decode": 0.0}
        self._phase: Phase | None = "queue"
        self._entered = iterations.time
        self._pauses = 0

    def enter(self, phase: Phase) -> None:
        """The request is in ``phase`` from now on; in the queue again when it was paused."""
        if phase == "queue" and self._phase != "queue":
            self._pauses += 1
        self._leave(phase)

    def finish(self, outcome: str, *, prompt_tokens: int, reused_tokens: int, generated_tokens: int) -> None:
        """The request has ended: record it. Raises StateError when it had ended before."""
        self._leave(None)
        iterations = self._iterations
        iterations._add(
            RequestRecord(
                iterations.number,
                self._entered,
                self._name,
                outcome,
                queue=self._spent["queue"],
                transfer=self._spent["transfer"],
                prefill=self._spent["prefill"],
                decode=self._spent["decode"],
                prompt_tokens=prompt_tokens,
                reused_tokens=reused_tokens,
                generated_tokens=generated_tokens,
                pauses=self._pauses,
            )
        )

    def _leave(self, phase: Phase | None) -> None:
        if self._phase is None:
            raise StateError(f"request {self._name!r} has ended", hint="a request ends once")
        now = self._iterations.time
        self._spent[self._phase] += now - self._entered
        self._phase, self._entered = phase, now


def _begin(stats: ManagerStats, source: str, time_unit: Literal["s", "steps"], block_tokens: int) -> Begin:
    groups = tuple(Group(group.name, group.page_bytes, group.capacity) for group in stats.groups)
    device_bytes = max(group.capacity * group.page_bytes for group in groups)
    lower = (
        Tier(
            tier.name,
            tier.capacity_bytes,
            tuple(Group(group.name, group.page_bytes, group.capacity) for group in tier.groups),
        )
        for tier in stats.tiers
    )
    return Begin(source, time.time(), time_unit, block_tokens, (Tier("device", device_bytes, groups), *lower))


def _step(number: int, when: float, stats: ManagerStats, step: Step | None, running: int, waiting: int) -> StepRecord:
    """``stats``: the difference to the record before."""
    groups = tuple(
        DeviceGroup(
            group.free,
            group.cached,
            group.held,
            group.copying,
            group.taken,
            group.evicted,
            group.moved,
            group.lost_tokens,
        )
        for group in stats.groups
    )
    lower = tuple(
        LowerTier(
            tuple(
                LowerGroup(group.used, group.copying, group.moved_down, group.moved_up, group.evicted)
                for group in tier.groups
            ),
            tier.used_bytes,
            tier.reused_tokens,
            tier.resumed_tokens,
            tier.failed_blocks,
        )
        for tier in stats.tiers
    )
    return StepRecord(
        number,
        when,
        groups,
        lower,
        rows=0 if step is None else len(step.lengths),
        tokens=0 if step is None else step.token_count,
        running=running,
        waiting=waiting,
        open_sequences=stats.open_sequences,
        extents=stats.extents,
        steps=stats.steps,
        requests=stats.requests,
        prompt_tokens=stats.prompt_tokens,
        reused_tokens=stats.reused_tokens,
        partial_reuses=stats.partial_reuses,
        received_tokens=stats.received_tokens,
        handed_tokens=stats.handed_tokens,
        computed_tokens=stats.computed_tokens,
        suspends=stats.suspends,
        resumes=stats.resumes,
        resumed_tokens=stats.resumed_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        forks=stats.forks,
        forked_tokens=stats.forked_tokens,
    )
