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
    held: leased now; held_peak: at most so far. evicted: pages evicted so far. moved: pages copied so far to empty a
    slab for another group. ``padding_bytes`` of each page hold nothing.
    """

    name: str
    page_bytes: int
    capacity: int
    free: int
    cached: int
    held: int
    held_peak: int
    evicted: int
    moved: int
    padding_bytes: int

    @property
    def padding_fraction(self) -> float:
        """Share of a page that holds nothing."""
        return self.padding_bytes / self.page_bytes


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

    @property
    def hit_rate(self) -> float:
        """Reused share of all prompt tokens, 0 when there were none."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@attrs.frozen
class Cleared:
    """What ``clear`` did. freed: pages per group that are free now. held: pages per group that are still held by open
    sequences; nobody else finds them, and they become free when those end."""

    freed: tuple[int, ...]
    held: tuple[int, ...]


def group_stats(
    layout: Layout, ledger: Ledger, idle_blocks: int, evicted: Sequence[int], moved: Sequence[int]
) -> tuple[GroupStats, ...]:
    """Pages of every group now. idle_blocks: of the prefix tree. evicted, moved: pages so far, per group."""
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
            moved[group.index],
            group.padding_bytes,
        )
        for group in layout.groups
    )
