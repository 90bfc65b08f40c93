"""Who waits for what, and when that will never come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import attrs

from kvist.contract import CacheManager
from kvist.errors import CapacityError, DeadlockError
from kvist.plan import Shortage
from kvist.scheduling.job import Job
from kvist.scheduling.roster import Roster

J = TypeVar("J", bound=Job)


@attrs.frozen
class Wait:
    """One job that cannot go on.

    what: it waits for, in words, e.g. "the prefix that request 3 computes". ends: is somebody at work who will end it?
    """

    number: int
    what: str
    ends: bool

    def __str__(self) -> str:
        return f"request {self.number} waits for {self.what}"


def waits(roster: Roster[J], shortages: Sequence[Shortage], copying: bool) -> list[Wait]:
    """For every job that does not compute, in order of the states.

    shortages: what the smallest step lacks that those with something to compute could make; empty when it fits.
    copying: will copies between tiers, or transfers, give pages back?
    """
    external = copying or bool(roster.loading or roster.arriving)
    ends = external or (bool(roster.prefill or roster.decode) and not shortages)
    found = [Wait(job.number, "its rows from another process", True) for job in roster.arriving]
    found += [Wait(job.number, "its rows from a lower tier", True) for job in roster.loading]
    if shortages:
        lacking = "; ".join(map(str, shortages))
        found += [Wait(job.number, f"pages: {lacking}", ends) for job in (*roster.prefill, *roster.decode)]
    for job in roster.deferred:
        assert job.behind is not None
        found.append(Wait(job.number, f"the prefix that request {job.behind.number} computes", ends))
    for before, job in zip([None, *roster.queue], roster.queue):
        found.append(
            Wait(job.number, "room" if before is None else f"request {before.number}, which comes first", ends)
        )
    return found


def deadlock(found: Sequence[Wait], outside: str) -> DeadlockError:
    """For waits of which none ends. outside: from :func:`outside_of`."""
    return DeadlockError(
        "no request can go on, and nobody is at work who will change that: " + "; ".join(map(str, found)) + outside,
        hint="close the sequences and release the holds that others than this scheduler have on its cache",
    )


def outside_of(manager: CacheManager, roster: Roster[J]) -> str:
    """What holds pages of a manager beside the only job of a roster that holds memory, if any does; in words, empty if
    nothing else does."""
    stats = manager.stats()
    own = [job.sequence for job in roster if job.sequence is not None]
    blocks = sum(sequence.block_count for sequence in own)
    pages = max((stats.groups[g.index].held - blocks for g in manager.layout.groups if not g.sparse), default=0)
    sequences = stats.open_sequences - len(own)
    if pages <= 0 and sequences <= 0:
        return ""
    return f"; others than its requests have {max(sequences, 0)} open sequences and hold {max(pages, 0)} pages"


def does_not_fit(manager: CacheManager, shortages: Sequence[Shortage]) -> CapacityError:
    """For a request that lacks pages although it has the cache for itself."""
    return CapacityError(
        f"one request alone does not fit a cache of {manager.layout.arena_bytes} bytes: "
        + "; ".join(map(str, shortages)),
        hint="give the cache more memory",
    )
