"""When a request may begin: whether what it needs will be there when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.scheduling.job import Job, State
from kvist.sequence import Sequence as CacheSequence
from kvist.spec import ceil_div


@attrs.frozen(eq=False)
class Room:
    """What an admission policy is told about one cache.

    held: pages per group that are held now, by whomever; what is only cached can be evicted.
    jobs: everybody who runs, and the candidate as the last one, each with its sequence in this cache, ``None`` before
        it has one.
    """

    layout: Layout
    held: Sequence[int]
    jobs: Sequence[tuple[Job, CacheSequence | None]]

    @property
    def slab_count(self) -> int:
        """Slabs for pages; slab 0 holds none."""
        return self.layout.slab_count - 1

    def slabs(self, horizon: Callable[[Job], int]) -> int:
        """Slabs that are needed when each job has computed as many tokens as ``horizon`` says: what is held now, which
        counts once however many share it, and what is still to come. What windows have shared is counted for each."""
        block = self.layout.block_tokens
        ends = [horizon(job) for job, _ in self.jobs]
        growth = sum(
            max(0, ceil_div(end, block) - _blocks(job, sequence, block))
            for end, (job, sequence) in zip(ends, self.jobs)
        )
        slabs = 0
        for group, held, floor in zip(self.layout.groups, self.held, self.layout.floor_slabs, strict=True):
            if group.sparse:
                pages = sum(self.layout.most_pages(group, end) for end in ends)
            else:
                pages = held + growth
            slabs += max(floor, ceil_div(pages, self.layout.slab_bytes // group.page_bytes))
        return slabs


def _blocks(job: Job, sequence: CacheSequence | None, block: int) -> int:
    """Blocks whose pages a job holds already. Those of rows that are on their way are held from the beginning."""
    if sequence is None:
        return ceil_div(job.remote_tokens, block) if job.state is State.ARRIVING else 0
    loaded = ceil_div(sequence.loadable, block) if sequence.loading else 0
    return max(sequence.block_count, loaded)


class AdmissionPolicy(Protocol):
    """Decides whether the next request may begin beside those that run. Asked for one request at a time, in order, and
    for the same one again only when somebody has given pages back. Not asked when nothing runs: alone, everybody fits.
    """

    def admits(self, room: Room) -> bool:
        """May the last of ``room.jobs`` begin?"""


@attrs.frozen
class ReserveToEnd:
    """Admit a request when it and all that run would fit up to their last tokens. Whoever is admitted can finish, and
    nobody is preempted; room that is reserved for tokens that are never generated stays unused."""

    def admits(self, room: Room) -> bool:
        return room.slabs(lambda job: job.end) <= room.slab_count


@attrs.frozen
class Watermark:
    """Admit a request when its prompt and those of all that run would fit and leave ``free_fraction`` of the memory.
    More run at the same time, and when their outputs outgrow the memory the last ones give way.

    Raises SpecError for a fraction outside 0..1.
    """

    free_fraction: float = 0.05

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.free_fraction < 1:
            raise SpecError(f"Watermark(free_fraction={self.free_fraction}) must be in [0, 1)")

    def admits(self, room: Room) -> bool:
        return room.slabs(lambda job: len(job.tokens) + 1) <= (1 - self.free_fraction) * room.slab_count
