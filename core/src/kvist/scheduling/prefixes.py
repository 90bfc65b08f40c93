"""Who computes which prompt now, so that a request with the same beginning waits for it instead of computing it too."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from kvist.scheduling.job import Job, order
from kvist.spec import Scope
from kvist.step import IntArray

J = TypeVar("J", bound=Job)
_Key = tuple[Scope, bytes]


class Prefixes(Generic[J]):
    """Jobs that compute prompts, filed by their first block, each with those that wait for it.

    Two prompts are compared once, when the later one is about to be admitted, and only if their first blocks agree;
    after that nobody looks at tokens. Waiting costs a step or a few, and computing the same rows twice costs more. Only
    for jobs that come first and really run is waited, so nobody waits forever.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._by_first: dict[_Key, list[J]] = {}
        #: By the job waited for: up to which computed length, and who.
        self._followers: dict[Job, list[tuple[int, J]]] = {}

    @property
    def waiting_count(self) -> int:
        """Jobs that wait for another's prefix."""
        return sum(map(len, self._followers.values()))

    def add(self, job: J) -> None:
        """The job begins to compute its tokens."""
        if len(job.tokens) >= self._block:
            self._by_first.setdefault(self._key(job), []).append(job)

    def remove(self, job: J) -> list[J]:
        """The job does not compute its tokens any more. Returns those that waited for it."""
        if len(job.tokens) >= self._block:
            key = self._key(job)
            jobs = self._by_first.get(key, [])
            if job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._by_first[key]
        return [follower for _, follower in self._followers.pop(job, ())]

    def wait_for(self, job: J) -> J | None:
        """The job that ``job`` should wait for, and now does: an earlier one that is about to compute at least one more
        whole block of its prefix."""
        if len(job.tokens) <= self._block:
            return None
        best: J | None = None
        most = 0
        for other in self._by_first.get(self._key(job), ()):
            if order(other) > order(job):
                continue
            assert other.sequence is not None
            # The last token of a prompt is always computed.
            shared = min(_shared(job.tokens, other.tokens), len(job.tokens) - 1)
            if other.sequence.computed + self._block <= shared and shared > most:
                best, most = other, shared
        if best is not None:
            self._followers.setdefault(best, []).append((most - self._block, job))
        return best

    def advanced(self, job: J) -> list[J]:
        """The job has computed more. Returns those that need not wait for it any longer."""
        followers = self._followers.get(job)
        if not followers:
            return []
        assert job.sequence is not None
        computed = job.sequence.computed
        self._followers[job] = [each for each in followers if each[0] >= computed]
        return [follower for limit, follower in followers if limit < computed]

    def forget(self, job: J, other: Job) -> None:
        """``job`` does not wait for ``other`` any longer."""
        followers = self._followers.get(other, [])
        self._followers[other] = [each for each in followers if each[1] is not job]

    def _key(self, job: J) -> _Key:
        return job.scope, job.tokens[: self._block].tobytes()


def _shared(left: IntArray, right: IntArray) -> int:
    """Leading tokens that two prompts share."""
    count = min(len(left), len(right))
    differs = left[:count] != right[:count]
    first = int(np.argmax(differs)) if count else 0
    return first if count and differs[first] else count
