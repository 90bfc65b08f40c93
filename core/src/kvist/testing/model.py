"""A prefix cache in its plainest form: every token prefix it knows, by scope, with the value at its end.

It knows nothing of pages. What may be known bounds reuse from above, always. What must be known bounds it from below
until something is evicted; where the two are the same, so is the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvist.testing.memory import Live

Prefixes = dict[int, dict[bytes, int]]
#: By scope and prefix: what stands in the block where the prefix ends, with all before it.
Points = dict[int, dict[bytes, set[bytes]]]


class ReuseModel:
    """Filled by the machine as sequences compute; asked when a prompt is opened."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self.may: Prefixes = {}
        self.must: Prefixes = {}
        #: Prefixes at whose end windows, and states, can surely be resumed.
        self._windows: Points = {}
        self._states: Points = {}

    def publish(self, live: Live, *, ended: bool, surely: bool = True) -> None:
        """A sequence's committed tokens become findable: whole blocks, all of them when it ``ended``."""
        if not live.shares:
            return
        end = live.committed if ended else live.committed - live.committed % self._block
        _add(self.may, live, live.may_length, end)
        live.may_length = max(live.may_length, end)
        if surely:
            _add(self.must, live, live.must_length, end)
            live.must_length = max(live.must_length, end)

    def keep_windows(self, live: Live, positions: Iterable[int]) -> None:
        for position in positions:
            self._keep(self._windows, live, position)

    def keep_state(self, live: Live, position: int) -> None:
        self._keep(self._states, live, position)

    def _keep(self, points: Points, live: Live, position: int) -> None:
        end = min(-(-position // self._block) * self._block, live.committed)
        points.setdefault(live.scope, {}).setdefault(live.text[:position], set()).add(live.text[:end])

    def evicted(self, lives: Iterable[Live]) -> None:
        """Nobody knows what is left; what sequences hold is there and is told again."""
        self.must.clear()
        self._windows.clear()
        self._states.clear()
        for live in lives:
            live.must_length = 0

    def clear(self, lives: Iterable[Live]) -> None:
        self.evicted(lives)
        self.may.clear()
        for live in lives:
            live.shares = False

    def known(self, scope: int, prompt: bytes) -> tuple[int, int]:
        """Leading tokens that are surely known, and those that may be."""
        return _longest(self.must, scope, prompt), _longest(self.may, scope, prompt)

    def resumable(self, scope: int, prompt: bytes, limit: int, unit: int, *, windows: bool, states: bool) -> int:
        """The deepest position up to ``limit`` at which groups of these kinds can surely resume."""
        kept = [points.get(scope, {}) for points, asked in ((self._windows, windows), (self._states, states)) if asked]
        may = self.may.get(scope, {})
        for length in range(limit - limit % unit, 0, -unit):
            # Inside a block only the one is looked at that shares most, and of several any.
            only = not length % self._block or not any(prompt[:length] + bytes([token]) in may for token in range(8))
            if all(
                any(
                    only or (len(end) % self._block == 0 and prompt.startswith(end))
                    for end in points.get(prompt[:length], ())
                )
                for points in kept
            ):
                return length
        return 0


def _add(prefixes: Prefixes, live: Live, start: int, end: int) -> None:
    known = prefixes.setdefault(live.scope, {})
    for length in range(start + 1, end + 1):
        known[live.text[:length]] = int(live.values[length - 1])


def _longest(prefixes: Prefixes, scope: int, prompt: bytes) -> int:
    known = prefixes.get(scope)
    if known:
        for length in range(len(prompt), 0, -1):
            if prompt[:length] in known:
                return length
    return 0
