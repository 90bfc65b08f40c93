"""Numbers about a cache manager. Counters never decrease."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvist.layout import Layout
from kvist.ledger import Ledger


@attrs.frozen
class GroupStats:
    """Pages of one group: ``free + cached + held == capacity`` when it is the only group.

    capacity: pages if the group had the whole arena. free: takable at once. cached: published, held by nobody.
    held: leased now; held_peak: at most so far. evicted: pages evicted so far.
    """

    name: str
    page_bytes: int
    capacity: int
    free: int
    cached: int
    held: int
    held_peak: int
    evicted: int


@attrs.frozen
class TierGroupStats:
    """Pages of one group in a tier below the device. For the disk a page is a block's part of the group.

    capacity: pages if the group had the whole tier, 0 for the disk, whose budget is in bytes. used: pages there now,
    those on their way down included. moved_down, moved_up: pages that arrived there from above, and on the device from
    there. evicted: pages that made room; the disk counts its own.
    """

    name: str
    page_bytes: int
    capacity: int
    used: int
    moved_down: int
    moved_up: int
    evicted: int


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


@attrs.frozen
class ManagerStats:
    """Totals since the manager was made. Work of refused or cancelled steps is not in them.

    requests: sequences whose first step completed. prompt_tokens: their prompts; ``reused_tokens`` of them came from
    the cache. resumed_tokens: what suspended sequences got back. computed_tokens: rows written by completed steps,
    rejected drafts not counted. steps: completed ones.
    """

    requests: int
    prompt_tokens: int
    reused_tokens: int
    resumed_tokens: int
    computed_tokens: int
    steps: int
    open_sequences: int
    extents: int
    groups: tuple[GroupStats, ...]
    tiers: tuple[TierStats, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Reused share of all prompt tokens, 0 when there were none."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


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


def group_stats(layout: Layout, ledger: Ledger, idle_blocks: int, evicted: Sequence[int]) -> tuple[GroupStats, ...]:
    """Pages of every group now. idle_blocks: of the prefix tree. evicted: pages evicted so far, per group."""
    return tuple(
        GroupStats(
            group.name,
            group.page_bytes,
            layout.page_capacity(group),
            ledger.free_count(group.index),
            ledger.cached[group.index] if group.sparse else idle_blocks,
            ledger.held_count(group.index, idle_blocks),
            ledger.held_peak[group.index],
            evicted[group.index],
        )
        for group in layout.groups
    )
