"""Numbers about a cache manager. Counters never decrease."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import attrs

from kvist.errors import StateError
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.sequence import Sequence


@attrs.frozen
class GroupStats:
    """Pages of one group: ``free + cached + held == capacity`` when it is the only group.

    capacity: pages if the group had the whole arena. free: takable at once. cached: published, held by nobody.
    held: leased now; held_peak: at most so far. evicted: pages evicted so far. moved: pages copied so far to
    empty a slab for another group. ``padding_bytes`` of each page hold nothing.
    taken: pages that steps took so far, for rows, states and snapshots; those of a cancelled step too, which its
        sequences keep and no later step takes again. copying: what copies to and from other tiers and other processes
        keep now, a page once for each of them.
    lost_tokens: prompt tokens that were known and still had to be computed, because this group had no restore point
        behind them. Where several groups lack one, the tokens count for the one that had the least.
    """

    name: str
    page_bytes: int
    capacity: int
    free: int
    cached: int
    held: int
    held_peak: int
    evicted: int
    lost_tokens: int
    moved: int
    padding_bytes: int
    taken: int = 0
    copying: int = 0

    @property
    def padding_fraction(self) -> float:
        """Share of a page that holds nothing."""
        return self.padding_bytes / self.page_bytes


@attrs.frozen
class TierGroupStats:
    """Pages of one group in a tier below the device. For the disk a page is a block's part of the group.

    capacity: pages if the group had the whole tier, 0 for the disk, whose budget is in bytes. used: pages there now,
    those on their way down included. moved_down, moved_up: pages that arrived there from above, and on the device from
    there. evicted: pages that made room; the disk counts its own. copying: as of :class:`GroupStats`.
    """

    name: str
    page_bytes: int
    capacity: int
    used: int
    moved_down: int
    moved_up: int
    evicted: int
    copying: int = 0


@attrs.frozen
class TierStats:
    """One tier below the device: ``host`` or ``disk``.

    reused_tokens: of the manager's, those in blocks that had come up from here; what no tier below claims was on the
    device. resumed_tokens: likewise. failed_blocks: copies of blocks, up or down, that did not arrive.
    """

    name: str
    capacity_bytes: int
    used_bytes: int
    reused_tokens: int
    resumed_tokens: int
    failed_blocks: int
    groups: tuple[TierGroupStats, ...]

    def since(self, earlier: TierStats) -> TierStats:
        """As :meth:`ManagerStats.since`."""
        groups = tuple(_less(now, then, _TIER_GROUP_COUNTERS) for now, then in zip(self.groups, earlier.groups))
        return attrs.evolve(_less(self, earlier, _TIER_COUNTERS), groups=groups)


@attrs.frozen
class ManagerStats:
    """Totals since the manager was made. Work of refused or cancelled steps is not in them: a sequence counts when its
    first step completes, and however often it was opened, planned, refused or resumed before, it counts once.

    requests: opened sequences. prompt_tokens: their prompts; ``reused_tokens`` of them came from the cache,
        ``received_tokens`` from another process, and the others were computed. resumes: times that a sequence went on
        after it was suspended, with ``resumed_tokens`` taken back in all. forks: forked sequences, which began with
        ``forked_tokens`` in all.
    suspends: times that a sequence was suspended after a step of it, by ``suspend`` or because a step that failed may
        have spoilt its states: less ``resumes``, those that have not gone on. ``recomputed_tokens`` were computed when
        they were suspended and no longer there when they went on.
    partial_reuses: requests whose ``reused_tokens`` end inside a block, which costs a copy of it. handed_tokens: of
        sequences handed over to other processes.
    computed_tokens: rows written by completed steps, rejected drafts not counted. steps: completed ones.
    """

    requests: int
    prompt_tokens: int
    reused_tokens: int
    resumes: int
    resumed_tokens: int
    forks: int
    forked_tokens: int
    computed_tokens: int
    steps: int
    open_sequences: int
    extents: int
    groups: tuple[GroupStats, ...]
    tiers: tuple[TierStats, ...] = ()
    received_tokens: int = 0
    handed_tokens: int = 0
    partial_reuses: int = 0
    suspends: int = 0
    recomputed_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Reused share of all prompt tokens, 0 when there were none."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def since(self, earlier: ManagerStats) -> ManagerStats:
        """What happened after ``earlier``, which was taken from the same manager: the differences of all that is
        counted. What is true now (pages, open sequences, extents) and ``held_peak`` stay as they are.

        Raises StateError if ``earlier`` is not earlier.
        """
        difference = _less(self, earlier, _COUNTERS)
        groups = tuple(_less(now, then, _GROUP_COUNTERS) for now, then in zip(self.groups, earlier.groups))
        tiers = tuple(now.since(then) for now, then in zip(self.tiers, earlier.tiers))
        return attrs.evolve(difference, groups=groups, tiers=tiers)


_GROUP_COUNTERS = ("evicted", "lost_tokens", "moved", "taken")
_TIER_COUNTERS = ("reused_tokens", "resumed_tokens", "failed_blocks")
_TIER_GROUP_COUNTERS = ("moved_down", "moved_up", "evicted")
_COUNTERS = (
    "requests",
    "prompt_tokens",
    "reused_tokens",
    "received_tokens",
    "handed_tokens",
    "partial_reuses",
    "suspends",
    "recomputed_tokens",
    "resumes",
    "resumed_tokens",
    "forks",
    "forked_tokens",
    "computed_tokens",
    "steps",
)
_Counted = TypeVar("_Counted", GroupStats, ManagerStats, TierGroupStats, TierStats)


def _less(now: _Counted, then: _Counted, counters: tuple[str, ...]) -> _Counted:
    counts = {name: getattr(now, name) - getattr(then, name) for name in counters}
    if min(counts.values()) < 0:
        raise StateError(
            f"since() of stats that are not earlier ones: {min(counts, key=counts.__getitem__)} would be "
            f"{min(counts.values())}",
            hint="subtract what the same manager's stats() gave before",
        )
    return attrs.evolve(now, **counts)


class Tally:
    """The counters, kept by a manager."""

    def __init__(self, group_count: int) -> None:
        self.requests = self.prompt_tokens = self.reused_tokens = self.received_tokens = 0
        self.resumes = self.resumed_tokens = self.forks = self.forked_tokens = 0
        self.computed_tokens = self.steps = 0
        self.handed_tokens = self.partial_reuses = self.suspends = self.recomputed_tokens = 0
        #: Of the reused and of the resumed tokens those that came up from the host and from the disk.
        self.reused_below, self.resumed_below = [0, 0], [0, 0]
        self.evicted = [0] * group_count
        self.lost_tokens = [0] * group_count
        self.taken = [0] * group_count

    def begin(self, sequence: Sequence) -> None:
        """The sequence's first step, or its first one after ``resume``, is completed."""
        sequence.started = True
        if sequence.below is not None and sequence.origin != "forked":
            resumed = sequence.origin == "resumed"
            total = sequence.claimed if resumed else sequence.reused
            host = min(sequence.below.host_tokens, total)
            below = self.resumed_below if resumed else self.reused_below
            below[0] += host
            below[1] += min(sequence.below.disk_tokens, total - host)
        if sequence.origin == "resumed":
            self.resumes += 1
            self.resumed_tokens += sequence.claimed
            self.recomputed_tokens += max(0, sequence.had - sequence.claimed)
        elif sequence.origin == "forked":
            self.forks += 1
            self.forked_tokens += sequence.claimed
        else:
            self.requests += 1
            self.prompt_tokens += sequence.prompt_length
            self.reused_tokens += sequence.reused
            self.partial_reuses += sequence.reused % sequence.layout.block_tokens > 0
            if sequence.reused and sequence.tip is not None:
                sequence.tip.hits += 1
                sequence.tip.hit_tokens += sequence.reused
            self.received_tokens += sequence.received
            if sequence.limited_by is not None:
                self.lost_tokens[sequence.limited_by.index] += sequence.lost

    def suspended(self, sequence: Sequence) -> None:
        """The sequence has been suspended. Before its first step, also its first one after ``resume``, that is
        nothing."""
        self.suspends += sequence.started

    def catch_up(self, sequences: Iterable[Sequence]) -> None:
        """Count those that began in a decode batch, where nobody looks at single rows."""
        for sequence in sequences:
            if not sequence.started and sequence.computed > sequence.claimed:
                self.begin(sequence)


@attrs.frozen
class TierCleared:
    """What ``clear`` did to a tier below the device. freed_bytes: gone. held_bytes: nobody finds it any more, and it
    goes when copies in progress have finished; on the disk, files that could not be removed."""

    name: str
    freed_bytes: int
    held_bytes: int


@attrs.frozen
class Cleared:
    """What ``clear`` did. freed: pages per group that are free now. held: pages per group that are still held by open
    sequences and copies; nobody else finds them, and they become free when those end. tiers: below the device."""

    freed: tuple[int, ...]
    held: tuple[int, ...]
    tiers: tuple[TierCleared, ...] = ()


def group_stats(
    layout: Layout,
    ledger: Ledger,
    idle_blocks: int,
    tally: Tally,
    moved: SequenceOf[int],
    copying: SequenceOf[int],
) -> tuple[GroupStats, ...]:
    """Every group now. idle_blocks: of the prefix tree. moved: pages so far, per group. copying: pages, per group."""
    return tuple(
        GroupStats(
            group.name,
            group.page_bytes,
            layout.page_capacity(group),
            ledger.free_count(group.index),
            ledger.cached[group.index] if group.sparse else idle_blocks,
            ledger.held_count(group.index, idle_blocks),
            # Of sparse groups the ledger notes it when pages are given up.
            max(ledger.held_peak[group.index], ledger.held_count(group.index, idle_blocks)),
            tally.evicted[group.index],
            tally.lost_tokens[group.index],
            moved[group.index],
            group.padding_bytes,
            tally.taken[group.index],
            copying[group.index],
        )
        for group in layout.groups
    )
