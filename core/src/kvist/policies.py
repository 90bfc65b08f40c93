"""Which published extents go first: policies that score leaves of the prefix tree, knowing only the past.

Leaves go from their ends, lowest score first, until enough is free. A policy object belongs to one cache, whose thread
calls it. Time is a *clock*: the tokens, prompt and output, of all requests so far. Same requests, same decisions.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NO_MARK = -1  #: the mark of an extent about which a policy was never told


@attrs.frozen(eq=False)
class Candidates:
    """Leaves that nobody runs on, one row each, as int64 arrays that are the caller's. ``last_used``: the clock when a
    request last claimed or published the extent. ``start``, ``length``: tokens. ``mark``: what the policy returned.
    ``priority``: what requests wish, from -10 to 10; 0 without a wish and once its lifetime is over."""

    last_used: Ints
    start: Ints
    length: Ints
    mark: Ints
    priority: Ints = attrs.field()

    @priority.default
    def _no_wishes(self) -> Ints:
        return np.zeros(len(self.mark), np.int64)


class EvictionPolicy(Protocol):
    """Scores leaves. A row's score depends on the row, the clock, and what the policy was told before.

    learns: whether the notifications, all but ``score``, matter; if not, a cache need not call them. They return marks,
        integers that the cache stores with extents. Both parts of an extent that is split keep its mark."""

    learns: bool = False

    def score(self, candidates: Candidates, now: int) -> Floats:
        """float64, finite, one for each row: the lowest goes first, of equal ones the deepest."""

    def used(self, mark: int, key: Hashable, now: int, length: int, reused: int, cached: int) -> int:
        """A request's tokens are in the tree; once per request. Returns the mark of its last extent.
        mark: of the deepest extent it claimed, or NO_MARK. now: the clock before the request's own tokens.
        key: names the first block that it added by content and position, ``None`` if there is none. length, reused,
        cached: tokens of the request, of these reused, and in the cache before it added any."""
        return NO_MARK

    def left_behind(self, mark: int, last_used: int, length: int) -> int:
        """A request claimed only the beginning of an extent; before its ``used``. The rest's old and new mark."""
        return mark

    def evicted(self, mark: int, key: Hashable) -> None:
        """The end of an extent is gone, from the block that ``key`` names on."""
        return None

    def uncovered(self, mark: int, child_mark: int) -> int:
        """An extent's last child is gone. Returns the extent's new mark, from both old ones."""
        return mark


#: More than any clock, and with ten priorities still exact in a float.
_PRIORITY = 2.0**48


class LeastRecentlyUsed(EvictionPolicy):
    """What has the lowest priority goes first, and of that what was used longest ago."""

    def score(self, candidates: Candidates, now: int) -> Floats:
        return candidates.last_used + candidates.priority * _PRIORITY


_LRU = LeastRecentlyUsed()

#: Octave k holds ages, clock differences, from 512 * 2**k to twice that; the first and the last one also all beyond.
_OCTAVES, _LEAST_AGE = 22, 512.0
_EDGES: Floats = np.concatenate([[0.0], _LEAST_AGE * 2.0 ** np.arange(1, _OCTAVES + 1)])
#: Kinds: by turn (first, second, third, later) times length (up to three limits or above); and what was left behind.
_TURNS, _LENGTHS, _LEFT = 4, (1 << 15, 1 << 16, 1 << 17), 16
#: Assumed before anything is seen: one continuation per octave, at a rate of 0.2 / age. This is LRU's order.
_PRIOR: Floats = 0.2 / (_EDGES[1:] * 0.5**0.5)
#: So many continuations weigh a kind's own rate and the assumed one alike; scores are LRU's until so many are seen.
_SHRINK, _FEWEST = 64.0, 10
#: Requests over which hits are compared with LRU's, by how much they may fall short, and how long LRU takes over.
_COMPARED, _LAG, _TAKEN_OVER = 256, 0.98, 256


class ReuseRate(EvictionPolicy):
    """What promises the fewest hits per token and time goes first; learned from the last ``memory`` records.

    The end of each request is a record: when, and of what kind (turn, length). A later request that continues there
    closes it, also when its content was evicted meanwhile. Records give for each kind the rate at which extents of an
    age are continued, and from that the best that keeping one can bring:

        score(age) = max over T > age of  P(continued between age and T) / E(time until continued or T)

    A rate that falls with age gives LRU's order. Where it rises first, the newest go, so that others reach the age at
    which they are continued. What requests left behind is a kind of its own. LRU's hits are estimated from the same
    records, and it takes over for a while when it would have hit more. Memory: two records per request at most."""

    learns = True

    def __init__(self, memory: int = 8192) -> None:
        self._memory, self._made, self._requests, self._lru_until = memory, 0, 0, 0
        # Records by mark modulo memory. Gap: clock until continued, -1 while open. Ghost: the last cut of its path.
        self._since, self._gap, self._tokens = np.zeros(memory), np.full(memory, -1.0), np.zeros(memory)
        self._kind, self._turn = np.zeros(memory, np.int64), [0] * memory
        self._ghost: list[Hashable] = [None] * memory
        self._ghosts: dict[Hashable, int] = {}
        self._hits, self._lru_hits, self._all = 0.0, 0.0, 0.0
        self._table: Floats | None = None

    def score(self, candidates: Candidates, now: int) -> Floats:
        if self._table is None or self._requests < self._lru_until:
            return _LRU.score(candidates, now)
        known = candidates.mark >= max(0, self._made - self._memory)
        kind = np.where(known, self._kind.take(candidates.mark, mode="wrap"), 0)
        octaves: Floats = np.log2(np.clip(now - candidates.last_used, _LEAST_AGE, _EDGES[-1] - 1) / _LEAST_AGE)
        octave = octaves.astype(np.int64)
        share, cell = octaves - octave, kind * (_OCTAVES + 1) + octave
        # Nothing brings a hit per token and unit of time: a higher priority outweighs every rate.
        rate = self._table.take(cell) * (1 - share) + self._table.take(cell + 1) * share
        return candidates.priority + rate

    def used(self, mark: int, key: Hashable, now: int, length: int, reused: int, cached: int) -> int:
        lost = (ghost := self._ghosts.pop(key, NO_MARK)) > mark
        mark = ghost if lost else mark
        slot, turn, lru_hits = mark % self._memory, 0, float(reused)
        if self._remembers(mark):
            # A second branch begins at its origin's turn: requests that share a beginning are no conversation.
            turn = self._turn[slot] + int(self._gap[slot] < 0)
            if self._gap[slot] < 0:
                # LRU would keep what is newer before it keeps this.
                newer = np.arange(mark + 1, self._made) % self._memory
                room = cached - float(self._tokens[newer] @ (self._gap[newer] < 0))
                lru_hits = min(max(reused, min(self._tokens[slot], length)) if lost else reused, max(0.0, room))
                self._gap[slot] = now - self._since[slot]
        fade, self._requests = 1 - 1 / _COMPARED, self._requests + 1
        self._hits, self._lru_hits = self._hits * fade + reused, self._lru_hits * fade + lru_hits
        self._all = self._all * fade + length
        if self._requests == self._lru_until:
            self._hits = self._lru_hits = 0.0  # what LRU hit in the meantime says nothing about the scores
        elif self._requests > self._lru_until and self._hits < _LAG * self._lru_hits - (1 - _LAG) / 2 * self._all:
            self._lru_until = self._requests + _TAKEN_OVER
        if self._requests % (16 if self._requests < 1024 else 64) == 0:
            self._learn(now)
        size = sum(length > limit for limit in _LENGTHS)
        return self._record(now, turn, min(turn, _TURNS - 1) * (len(_LENGTHS) + 1) + size, length)

    def left_behind(self, mark: int, last_used: int, length: int) -> int:
        return self._record(last_used, self._turn[mark % self._memory], _LEFT, length)

    def evicted(self, mark: int, key: Hashable) -> None:
        if self._remembers(mark):
            self._ghosts.pop(self._ghost[mark % self._memory], None)
            self._ghost[mark % self._memory], self._ghosts[key] = key, mark

    def uncovered(self, mark: int, child_mark: int) -> int:
        return child_mark if child_mark > mark and self._kind[child_mark % self._memory] != _LEFT else mark

    def _remembers(self, mark: int) -> bool:
        return mark >= max(0, self._made - self._memory)

    def _record(self, since: int, turn: int, kind: int, tokens: int) -> int:
        slot = self._made % self._memory
        if self._ghosts.get(self._ghost[slot]) == self._made - self._memory:  # else a newer record was cut there
            del self._ghosts[self._ghost[slot]]
        self._ghost[slot], self._turn[slot], self._kind[slot] = None, turn, kind
        self._since[slot], self._gap[slot], self._tokens[slot] = since, -1.0, tokens
        self._made += 1
        return self._made - 1

    def _learn(self, now: int) -> None:  # rates from the records, scores from the rates
        count = min(self._made, self._memory)
        closed = self._gap[:count] >= 0
        if np.count_nonzero(closed) < _FEWEST:
            return
        age = np.where(closed, self._gap[:count], now - self._since[:count])
        octave = np.log2(np.clip(age, _LEAST_AGE, _EDGES[-1] - 1) / _LEAST_AGE).astype(np.int64)
        cell = self._kind[:count] * _OCTAVES + octave
        events, ended, inside = (
            np.bincount(cell, weights, (_LEFT + 1) * _OCTAVES).reshape(-1, _OCTAVES)
            for weights in (closed, None, age - _EDGES[octave])
        )
        # The time that records spent in each octave: all of it if they went on, a part if they ended in it.
        exposure = (np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended) * np.diff(_EDGES) + inside
        common = (events.sum(axis=0) + 1) / (exposure.sum(axis=0) + 1 / _PRIOR)
        factor = (events.sum(axis=1) + _SHRINK) / (exposure @ common + _SHRINK)
        # What turn and length say is estimated apart first, because few records have both in common.
        seen, expected = events[:_LEFT].sum(axis=1).reshape(_TURNS, -1), (exposure[:_LEFT] @ common).reshape(_TURNS, -1)
        by_turn = (seen.sum(axis=1) + _SHRINK) / (expected.sum(axis=1) + _SHRINK)
        by_length = (seen.sum(axis=0) + _SHRINK) / (by_turn @ expected + _SHRINK)
        factor[:_LEFT] = np.outer(by_turn, by_length).ravel()
        self._table = promises((events + _SHRINK) / (exposure + _SHRINK / (factor[:, None] * common))).ravel()


def promises(rates: Floats) -> Floats:
    """float64 ``[kinds, octaves + 1]``: scores at the octaves' edges, from ``[kinds, octaves]`` rates within them."""
    best, total, time = (np.zeros((len(rates), _OCTAVES + 1)) for _ in range(3))
    np.cumsum(rates * np.diff(_EDGES), axis=1, out=total[:, 1:])
    alive = np.exp(-np.minimum(total, 50.0))  # nothing survives, and larger sums would only lose precision
    np.cumsum((alive[:, :-1] - alive[:, 1:]) / rates, axis=1, out=time[:, 1:])
    for at in range(_OCTAVES):
        gained, spent = alive[:, at, None] - alive[:, at + 1 :], time[:, at + 1 :] - time[:, at, None]
        best[:, at] = (gained / np.maximum(spent, 1e-9)).max(axis=1)
    return best
