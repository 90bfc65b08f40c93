"""Who is in which state: the one place where a job's state changes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from kvist.scheduling.job import NEXT, Job, State, order

J = TypeVar("J", bound=Job)


class Roster(Generic[J]):
    """Jobs by state.

    queue: WAITING and SUSPENDED, in order. prefill: in order. decode: as rows of the decode batch. draft, loading,
    arriving, deferred: in the order in which they began that.
    started_count: jobs that were admitted and have not ended, wherever they are now.
    """

    def __init__(self) -> None:
        self.queue: list[J] = []
        self.prefill: list[J] = []
        self.decode: list[J] = []
        self.draft: list[J] = []
        self.loading: list[J] = []
        self.arriving: list[J] = []
        self.deferred: list[J] = []
        self.started_count = 0
        #: Is told of every job that has come into another state.
        self.watch: Callable[[J], None] | None = None
        #: Of the queue those that have run before.
        self.preempted_count = 0
        self._lists = {
            State.WAITING: self.queue,
            State.SUSPENDED: self.queue,
            State.PREFILL: self.prefill,
            State.DECODE: self.decode,
            State.DRAFT: self.draft,
            State.LOADING: self.loading,
            State.ARRIVING: self.arriving,
            State.DEFERRED: self.deferred,
        }

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[J]:
        """Every job that has not ended."""
        return chain(self.queue, self.deferred, self.arriving, self.loading, self.prefill, self.decode, self.draft)

    @property
    def idle(self) -> bool:
        """Has every job ended?"""
        return not any(self._lists.values())

    @property
    def holding_count(self) -> int:
        """Jobs that hold memory."""
        return len(self.prefill) + len(self.decode) + len(self.draft) + len(self.loading) + len(self.arriving)

    def holding(self) -> Iterator[J]:
        """Jobs that hold memory."""
        return chain(self.arriving, self.loading, self.prefill, self.decode, self.draft)

    def last(self) -> J:
        """Of those that compute, the last one in order."""
        decode = max(self.decode, key=order, default=None)
        if not self.prefill:
            assert decode is not None
            return decode
        return self.prefill[-1] if decode is None else max(self.prefill[-1], decode, key=order)

    def enter(self, job: J) -> None:
        """A new job, in the state that it has."""
        insort(self.queue, job, key=order)

    def move(self, job: J, state: State) -> None:
        """The only way from one state to another."""
        assert state in NEXT[job.state], f"job {job.number} cannot go from {job.state.value} to {state.value}"
        self._take(job)
        job.state = state
        if self.watch is not None:
            self.watch(job)
        if state is State.DONE:
            self.started_count -= job.started
            return
        jobs = self._lists[state]
        if jobs is self.queue or jobs is self.prefill:
            insort(jobs, job, key=order)
        else:
            jobs.append(job)
        if jobs is self.queue:
            self.preempted_count += job.started

    def _take(self, job: J) -> None:
        jobs = self._lists[job.state]
        if jobs is self.queue or jobs is self.prefill:
            del jobs[bisect_left(jobs, order(job), key=order)]
            if jobs is self.queue:
                self.preempted_count -= job.started
        else:
            jobs.remove(job)
