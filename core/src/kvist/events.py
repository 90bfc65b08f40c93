"""Which blocks can be found, told as it changes: for routers, for indexes that span processes, and for people.

The *index* is a set of entries ``(key, group, tier)``: block ``key`` can be found, and ``group`` has its page of it in
``tier``. Keys are those of :mod:`kvist.keys`: equal in every process for equal content, chained, so that a router that
knows the format digest computes them from a prompt itself. Only whole blocks are in the index; an open last block has
no key, and what it adds to a hit is less than a block. A block for which no group has a page is not in it either.

One entry appears with one :class:`Stored` or :class:`Moved` and disappears with one :class:`Removed`, however many
sequences hold the page or have computed it. Dense groups have every block down to the last one, so what they have of a
prompt can be reused; of sparse groups a prompt needs what their retention requires at the position to resume at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import attrs

from kvist.errors import SpecError, StateError
from kvist.memory.diskstats import Reason
from kvist.memory.mover import Tier
from kvist.step import IntArray

__all__ = [
    "DEVICE",
    "Entry",
    "Event",
    "Events",
    "Listener",
    "Moved",
    "Reason",
    "Removed",
    "Snapshot",
    "Stored",
    "apply",
]

#: The tier that every page is in while it is computed. The others are ``"host"`` and ``"disk"``.
DEVICE = Tier.DEVICE.value

#: Key, group index and tier.
Entry = tuple[bytes, int, str]


@attrs.frozen(eq=False)
class _Run:
    """Blocks and what they have in common.

    number: increases by one with every event. After a time in which nobody got any it skips one, so that a reader who
        comes back too late notices.
    scope: digest of the scope, 32 bytes. start: number of the first block in its sequence. On the disk, which knows
        blocks by key alone, both are ``None``, and the blocks need not be of one sequence.
    keys: 32 bytes for each block; of consecutive blocks in order where ``start`` is known.
    groups: indices of the groups that the event is about, ascending; it is about each of them for every key.
    """

    number: int
    scope: bytes | None
    start: int | None
    keys: tuple[bytes, ...]
    groups: tuple[int, ...]

    @property
    def block_count(self) -> int:
        return len(self.keys)

    def _entries(self, tier: str) -> Iterator[Entry]:
        return ((key, group, tier) for key in self.keys for group in self.groups)


@attrs.frozen(eq=False)
class Stored(_Run):
    """The blocks can be found now, in ``tier``: computed, or brought up from a lower tier.

    parent: key of the block before the first one, or the seed of the scope.
    tokens: int32, the blocks' token ids. A read-only view that keeps the prompt alive: copy it to keep it for long.
        Both are ``None`` for the disk, which snapshots name as they name every tier.
    """

    parent: bytes | None
    tokens: IntArray | None
    tier: str = DEVICE


@attrs.frozen(eq=False)
class Moved(_Run):
    """The blocks went down from the tier ``source`` and can be found in ``target`` now; in ``source`` too, until a
    ``Removed`` says otherwise."""

    source: str
    target: str


@attrs.frozen(eq=False)
class Removed(_Run):
    """The blocks can not be found any more in ``tier``. What was cleared is gone for everybody but the sequences that
    hold it."""

    reason: Reason
    tier: str = DEVICE


Event = Stored | Moved | Removed


@attrs.frozen(eq=False)
class Snapshot:
    """The whole index after event ``number``, parents before children; every record in ``stored`` has that number."""

    number: int
    stored: tuple[Stored, ...]


def apply(index: set[Entry], events: Iterable[Event]) -> None:
    """Change ``index`` as the events say."""
    for event in events:
        if isinstance(event, Stored):
            index.update(event._entries(event.tier))
        elif isinstance(event, Removed):
            index.difference_update(event._entries(event.tier))
        else:
            index.update(event._entries(event.target))


class Listener:
    """Events for one reader, from the moment it was made on. Made by ``manager.listen()``; for the manager's thread.

    A listener is *behind* when there are changes that it has no events of: because the index was not empty when it was
    made, or because nobody took its events and they grew past its bound. It then gets no more events until
    :meth:`snapshot`.
    """

    def __init__(self, events: Events, max_blocks: int, behind: bool) -> None:
        #: Of the last event that ``take`` gave, or of the last snapshot: the event after it is the next number.
        self.number = events.number
        self._events: Events | None = events
        self._max_blocks = max_blocks
        self._waiting: deque[Event] = deque()
        self._blocks = 0
        self._behind = behind

    @property
    def behind(self) -> bool:
        """Is a snapshot needed?"""
        return self._behind

    def take(self) -> list[Event]:
        """The events since the last call, oldest first; their numbers follow each other without gaps.

        Raises StateError if the listener is behind or closed.
        """
        if self._events is None:
            raise StateError("take() of a closed listener", hint="make a new one with manager.listen()")
        self._events.catch_up()
        if self._behind:
            raise StateError(
                f"this listener is behind: it holds events of at most {self._max_blocks} blocks, and has no others",
                hint="replace your index by snapshot(), then go on with take(); take more often, or raise max_blocks",
            )
        events = list(self._waiting)
        if events:
            self.number = events[-1].number
        self._waiting.clear()
        self._blocks = 0
        return events

    def snapshot(self) -> Snapshot:
        """The whole index now, of every tier. Drops the events not taken; the next one follows the snapshot's number.

        Costs a hash for every block of the index that was never named. Raises StateError if the listener is closed.
        """
        if self._events is None:
            raise StateError("snapshot() of a closed listener", hint="make a new one with manager.listen()")
        snapshot = self._events.snapshot()
        self._waiting.clear()
        self._blocks = 0
        self._behind = False
        self.number = snapshot.number
        return snapshot

    def close(self) -> None:
        """No more events. Idempotent."""
        if self._events is not None:
            self._events.detach(self)
            self._events = None
            self._waiting.clear()

    def offer(self, event: Event) -> None:
        if self._behind:
            return
        self._blocks += event.block_count
        if self._blocks > self._max_blocks:
            self._behind = True
            self._waiting.clear()
        else:
            self._waiting.append(event)


class Watch(Protocol):
    """One tier's part of the index. Tells its changes to :class:`Events` while it is on."""

    def follow(self, on: bool) -> None:
        """Begin or stop to notice changes."""

    def is_empty(self) -> bool:
        """Has it no entry at all?"""

    def catch_up(self) -> None:
        """Tell what has changed in other threads."""

    def stored(self) -> list[Stored]:
        """Its whole part, parents before children, with any number; tells first what led to that."""


class Events:
    """Numbers the changes of all tiers and gives them to the listeners. Knows nothing of tiers but their watches."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._listeners: list[Listener] = []
        #: Of the last event.
        self.number = 0
        #: Were there changes since that nobody was told?
        self._missed = False

    def add(self, watch: Watch) -> None:
        """Watch one more tier; before anybody listens."""
        self._watches.append(watch)

    def attach(self, max_blocks: int) -> Listener:
        """A new listener, which is behind unless the index is empty. Raises SpecError for a bound below 1."""
        if max_blocks < 1:
            raise SpecError(f"listen(max_blocks={max_blocks}) must be at least 1")
        for watch in self._watches:
            watch.follow(True)
        self.catch_up()
        behind = not all(watch.is_empty() for watch in self._watches)
        if not behind:
            self._settle()
        listener = Listener(self, max_blocks, behind)
        self._listeners.append(listener)
        return listener

    def detach(self, listener: Listener) -> None:
        """No more events for ``listener``."""
        self._listeners.remove(listener)
        if not self._listeners:
            self._missed = True
            for watch in self._watches:
                watch.follow(False)

    def catch_up(self) -> None:
        """Tell what has changed in other threads."""
        for watch in self._watches:
            watch.catch_up()

    def snapshot(self) -> Snapshot:
        """The whole index now."""
        stored = [record for watch in self._watches for record in watch.stored()]
        self._settle()
        return Snapshot(self.number, tuple(attrs.evolve(record, number=self.number) for record in stored))

    def heard(self) -> bool:
        """Does anybody get events now? Asked once for each change; one that nobody hears is a gap in the numbers."""
        if any(not listener.behind for listener in self._listeners):
            return True
        self._missed = True
        return False

    def tell(self, event: Event) -> None:
        """Give everybody an event, whose number is the next one."""
        self.number = event.number
        for listener in self._listeners:
            listener.offer(event)

    def _settle(self) -> None:
        """From now on somebody gets events."""
        if self._missed:
            self._missed = False
            self.number += 1
