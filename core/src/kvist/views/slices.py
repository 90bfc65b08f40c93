"""A recorded run cut into slices of equal time, for pictures and tables."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvist.iterations.records import Begin, BranchesRecord, BranchRecord, Record, RequestRecord, StepRecord
from kvist.views.board import Totals


@attrs.define
class Slice:
    """What was recorded between two moments.

    last: the last step up to its end, also of an earlier slice; ``None`` before the first one. running, waiting: the
    most requests at a time. requests: those that ended.
    """

    start: float
    end: float
    totals: Totals
    last: StepRecord | None = None
    running: int = 0
    waiting: int = 0
    requests: list[RequestRecord] = attrs.Factory(list)


@attrs.frozen
class Run:
    """A whole run: its totals, its slices, the requests that ended, and the branches as they were recorded last."""

    begin: Begin
    duration: float
    totals: Totals
    slices: list[Slice]
    requests: list[RequestRecord]
    branches: Sequence[BranchRecord]
    record_count: int

    @classmethod
    def of(cls, begin: Begin, records: Sequence[Record], slice_count: int) -> Run:
        """Cut ``records`` into at most ``slice_count`` slices: of steps, into no more than there were."""
        duration = max((record.time for record in records), default=0.0)
        if begin.time_unit == "steps":
            slice_count = max(1, min(slice_count, int(duration)))
        slices = [
            Slice(duration * place / slice_count, duration * (place + 1) / slice_count, Totals.of(begin))
            for place in range(slice_count)
        ]
        run = cls(begin, duration, Totals.of(begin), slices, [], [], len(records))
        branches: Sequence[BranchRecord] = ()
        for record in records:
            # A moment between two slices belongs to the earlier one.
            place = -int(-record.time * slice_count // duration) - 1 if duration else 0
            here = slices[min(slice_count - 1, max(0, place))]
            if isinstance(record, StepRecord):
                run.totals.add(record)
                here.totals.add(record)
                here.last = record
                here.running, here.waiting = max(here.running, record.running), max(here.waiting, record.waiting)
            elif isinstance(record, RequestRecord):
                run.requests.append(record)
                here.requests.append(record)
            elif isinstance(record, BranchesRecord):
                branches = record.branches
        last = None
        for each in slices:
            each.last = last = each.last or last
        return attrs.evolve(run, branches=branches)

    @property
    def clock(self) -> tuple[float, str]:
        """What one unit of the time axis is in the records' unit, and its name."""
        if self.begin.time_unit == "steps":
            return 1.0, "steps"
        for size, name in ((3600.0, "hours"), (60.0, "minutes")):
            if self.duration >= 3 * size:
                return size, name
        return 1.0, "seconds"
