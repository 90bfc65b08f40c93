"""The numbers that `kvist top` shows, from records as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import quantiles

import attrs

from kvist.iterations.records import Begin, Record, RequestRecord, StepRecord

#: Of the totals: what is added up over a run.
TOTALS = (
    "steps",
    "requests",
    "prompt_tokens",
    "reused_tokens",
    "partial_reuses",
    "received_tokens",
    "handed_tokens",
    "computed_tokens",
    "suspends",
    "resumes",
    "resumed_tokens",
    "recomputed_tokens",
    "forks",
    "forked_tokens",
)
_GROUP_TOTALS = ("new", "evicted", "moved", "lost_tokens")
_LOWER_TOTALS = ("offloaded", "onboarded", "dropped")


@attrs.define
class Totals:
    """Sums over step records, by their names. groups: of the device, by group. lower: of each tier below, by group.
    reused_below: of ``reused_tokens``, by tier below."""

    counts: dict[str, int]
    groups: list[dict[str, int]]
    lower: list[list[dict[str, int]]]
    reused_below: list[int]

    @classmethod
    def of(cls, begin: Begin, steps: Iterable[StepRecord] = ()) -> Totals:
        """Of a run with these tiers and groups."""
        device, *below = begin.tiers
        totals = cls(
            dict.fromkeys(TOTALS, 0),
            [dict.fromkeys(_GROUP_TOTALS, 0) for _ in device.groups],
            [[dict.fromkeys(_LOWER_TOTALS, 0) for _ in tier.groups] for tier in below],
            [0 for _ in below],
        )
        for step in steps:
            totals.add(step)
        return totals

    def add(self, step: StepRecord) -> None:
        counts = self.counts
        for name in TOTALS:
            counts[name] += getattr(step, name)
        for sums, group in zip(self.groups, step.groups):
            for name in _GROUP_TOTALS:
                sums[name] += getattr(group, name)
        for place, tier in enumerate(step.lower):
            self.reused_below[place] += tier.reused_tokens
            for sums, lower in zip(self.lower[place], tier.groups):
                for name in _LOWER_TOTALS:
                    sums[name] += getattr(lower, name)

    @property
    def hit_rate(self) -> float | None:
        """Reused share of all prompt tokens; ``None`` when there were none."""
        asked = self.counts["prompt_tokens"]
        return self.counts["reused_tokens"] / asked if asked else None


def spread(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and 95th percentile; ``None`` of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


class Board:
    """A run so far, and the last ``window`` of its time: seconds, or steps where no model ran."""

    def __init__(self, begin: Begin, window: float) -> None:
        self.begin = begin
        self.window = window
        self.totals = Totals.of(begin)
        self.last: StepRecord | None = None
        #: Of the last step itself.
        self.rows = 0
        #: Records that were gone before anybody asked for them: the totals lack what they told.
        self.dropped = 0
        self.finished = 0
        self.pauses = 0
        #: The newest ones.
        self.requests: deque[RequestRecord] = deque(maxlen=200)
        self._recent: deque[StepRecord] = deque()

    def take(self, begin: Begin, records: Iterable[Record]) -> None:
        """Add what has come, with the line before it."""
        self.dropped += begin.dropped
        for record in records:
            if isinstance(record, StepRecord):
                self.totals.add(record)
                self.last = record
                self.rows = record.rows if record.steps else self.rows
                self._recent.append(record)
            elif isinstance(record, RequestRecord):
                self.requests.append(record)
                self.finished += 1
                self.pauses += record.pauses
        while self._recent and self._recent[0].time < self.time - self.window:
            self._recent.popleft()

    @property
    def time(self) -> float:
        """Of the last step."""
        return 0.0 if self.last is None else self.last.time

    @property
    def recent(self) -> Totals:
        """Of the last window."""
        return Totals.of(self.begin, self._recent)

    def rate(self, count: float) -> float:
        """Of something counted in the last window, per unit of time."""
        return count / max(min(self.window, self.time), 1e-9)

    def history(self, buckets: int) -> list[int]:
        """Tokens computed in each of so many equal parts of the last window, oldest first."""
        sums = [0] * buckets
        for step in self._recent:
            place = int((step.time - self.time + self.window) / self.window * buckets)
            sums[min(buckets - 1, max(0, place))] += step.computed_tokens
        return sums
