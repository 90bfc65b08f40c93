"""A listener that believes what it is told, beside one that reads the whole index again and again."""

from __future__ import annotations

from kvist.contract import CacheManager
from kvist.events import Entry, apply


class Follower:
    """Attached to a manager when it is made. ``index``: what can be found, by its events."""

    def __init__(self, manager: CacheManager) -> None:
        self._listener, self._other = manager.listen(), manager.listen()
        self.index: set[Entry] = set()
        if self._listener.behind:
            apply(self.index, self._listener.snapshot().stored)

    def follow(self) -> None:
        """Take the events there are. Raises AssertionError when they have gaps, or lead to another index."""
        number = self._listener.number
        events = self._listener.take()
        assert [event.number for event in events] == list(range(number + 1, number + 1 + len(events))), (
            "numbers of events have gaps"
        )
        apply(self.index, events)
        now: set[Entry] = set()
        apply(now, self._other.snapshot().stored)
        assert self.index == now, "who follows the events believes in another index than there is"
