"""Asks the admission policy about every cache, and lower tiers whether they have room for somebody's pages."""

from __future__ import annotations

from typing import TypeVar

from kvist.contract import CacheManager
from kvist.scheduling.admission import AdmissionPolicy, ReserveToEnd, Room
from kvist.scheduling.job import Job, State
from kvist.scheduling.joint import Companion
from kvist.scheduling.roster import Roster
from kvist.sequence import Sequence as CacheSequence

J = TypeVar("J", bound=Job)


class Gate:
    """Between a queue and the memory.

    closed_at: the first in the queue when somebody was not let in; nobody need be asked for again before somebody has
        given pages back or there is another first.
    crowded: somebody had to give way, and nobody has ended since.
    """

    def __init__(self, manager: CacheManager, companion: Companion | None, policy: AdmissionPolicy) -> None:
        self.managers = (manager,) if companion is None else (manager, companion.manager)
        self.closed_at: Job | None = None
        self.crowded = False
        self._companion = companion
        self._policy = policy
        # Whoever has lost its pages once comes back when it can stay.
        self._returning = ReserveToEnd()
        self._copying = 0

    def opened(self) -> None:
        """Somebody has given pages back."""
        self.closed_at = None

    def poll(self) -> None:
        """Take in what tiers have copied."""
        copying = 0
        for manager in self.managers:
            manager.poll()
            copying += manager.copying
        if copying < self._copying:
            # Copies keep pages.
            self.opened()
        self._copying = copying

    def admits(self, job: J, roster: Roster[J]) -> bool:
        """May a job begin now? Alone it always may."""
        if not roster.holding_count:
            return True
        policy = self._returning if job.preempted else self._policy
        jobs = [*roster.holding(), job]
        for number, manager in enumerate(self.managers):
            held = [group.held for group in manager.stats().groups]
            pairs = [(each, self._sequence(each, number)) for each in jobs]
            if not policy.admits(Room(manager.layout, held, pairs)):
                return False
        return True

    def parks(self, job: J, roster: Roster[J]) -> bool:
        """Has the tier below the device room for what a job has, beside what was suspended before?"""
        for number, manager in enumerate(self.managers):
            tiers = manager.stats().tiers
            if not tiers:
                return False
            jobs = [job, *(each for each in roster.queue if each.state is State.SUSPENDED)]
            wanted = 0
            for each in jobs:
                sequence = self._sequence(each, number)
                if sequence is not None:
                    wanted += sum(
                        manager.layout.most_pages(group, max(1, sequence.known)) * group.page_bytes
                        for group in manager.layout.groups
                    )
            if wanted > tiers[0].capacity_bytes:
                return False
        return True

    def _sequence(self, job: Job, number: int) -> CacheSequence | None:
        if number:
            assert self._companion is not None
            return self._companion.sequence(job)
        return job.sequence
