"""Which blocks can be found, told as it changes: for routers, for indexes that span processes, and for people.

The *index* is a set of entries ``(key, group, tier)``: block ``key`` can be found, and ``group`` has its page of it in
``tier``. Keys are those of :mod:`kvist.keys`: equal in every process for equal content, chained, so that a router that
knows the format digest computes them from a prompt itself. Only whole blocks are in the index; an open last block has
no key, and what it adds to a hit is less than a block. A block for which no group has a page is not in it either.

One entry appears with one :class:`Stored` and disappears with one :class:`Removed`, however many sequences hold the
page or have computed it. Dense groups have every block down to the last one, so what they have of a prompt can be
reused; of sparse groups a prompt needs what their retention requires at the position to resume at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import SpecError, StateError
from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.prefix.extent import Extent
from kvist.prefix.named import key_before, keys_of
from kvist.prefix.tree import PrefixTree, scope_of
from kvist.step import NO_PAGE, IntArray

#: The tier that every page is in while it is computed.
DEVICE = "device"

#: Key, group index and tier.
Entry = tuple[bytes, int, str]

#: evicted: others needed the room. cleared: ``manager.clear()``; sequences that hold the pages go on with them.
Reason = Literal["evicted", "cleared"]


@attrs.frozen(eq=False)
class _Run:
    """Consecutive blocks of one sequence and what they have in common.

    number: increases by one with every event. After a time in which nobody got any it skips one, so that a reader who
        comes back too late notices.
    scope: digest of the scope, 32 bytes.
    start: number of the first block in its sequence. keys: 32 bytes for each block, in order.
    groups: indices of the groups that the event is about, ascending; it is about each of them for every key.
    """

    number: int
    scope: bytes
    start: int
    keys: tuple[bytes, ...]
    groups: tuple[int, ...]

    @property
    def block_count(self) -> int:
        return len(self.keys)

    def _entries(self, tier: str) -> Iterator[Entry]:
        return ((key, group, tier) for key in self.keys for group in self.groups)


@attrs.frozen(eq=False)
class Stored(_Run):
    """The blocks can be found now, in ``tier``.

    parent: key of the block before the first one, or the seed of the scope.
    tokens: int32, the blocks' token ids. A read-only view that keeps the prompt alive: copy it to keep it for long.
    """

    parent: bytes
    tokens: IntArray
    tier: str = DEVICE


@attrs.frozen(eq=False)
class Moved(_Run):
    """The blocks went from the tier ``source`` to the tier ``target``."""

    source: str
    target: str


@attrs.frozen(eq=False)
class Removed(_Run):
    """The blocks can not be found any more in ``tier``."""

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
            index.difference_update(event._entries(event.source))
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
        """The whole index now. Drops the events not taken; the next one has the number after the snapshot's.

        Costs a hash for every block of the index that was never named. Raises StateError if the listener is closed.
        """
        if self._events is None:
            raise StateError("snapshot() of a closed listener", hint="make a new one with manager.listen()")
        self._waiting.clear()
        self._blocks = 0
        self._behind = False
        snapshot = self._events.snapshot()
        self.number = snapshot.number
        return snapshot

    def close(self) -> None:
        """No more events. Idempotent."""
        if self._events is not None:
            self._events.detach(self)
            self._events = None
            self._waiting.clear()

    def _offer(self, event: Event) -> None:
        if self._behind:
            return
        self._blocks += event.block_count
        if self._blocks > self._max_blocks:
            self._behind = True
            self._waiting.clear()
        else:
            self._waiting.append(event)


class Events:
    """Turns changes of a prefix tree into events for its listeners. The tree knows it only while there are any.

    Implements :class:`~kvist.prefix.watch.IndexWatcher`; changes nothing but the keys kept on extents.
    """

    def __init__(self, layout: Layout, tree: PrefixTree) -> None:
        """Raises SpecError for a spec without content keys."""
        self._format = format_digest(layout)
        self._block = layout.block_tokens
        self._tree = tree
        self._listeners: list[Listener] = []
        #: Of the last event.
        self.number = 0
        #: Were there changes since that nobody was told?
        self._missed = False

    def attach(self, max_blocks: int) -> Listener:
        """A new listener, which is behind unless the index is empty. Raises SpecError for a bound below 1."""
        if max_blocks < 1:
            raise SpecError(f"listen(max_blocks={max_blocks}) must be at least 1")
        behind = bool(self._tree.roots)
        if not behind:
            self._catch_up()
        listener = Listener(self, max_blocks, behind)
        self._listeners.append(listener)
        self._tree.watcher = self
        return listener

    def detach(self, listener: Listener) -> None:
        """No more events for ``listener``."""
        self._listeners.remove(listener)
        if not self._listeners:
            self._tree.watcher = None
            self._missed = True

    def snapshot(self) -> Snapshot:
        """The whole index now."""
        self._catch_up()
        stored: list[Stored] = []
        stack = [child for root in self._tree.roots.values() for child in root.children.values()]
        while stack:
            extent = stack.pop()
            stack.extend(extent.children.values())
            for first, stop, groups in _runs(self._present(extent, 0)):
                stored.append(self._stored(extent, first, stop, groups, self.number))
        return Snapshot(self.number, tuple(stored))

    def inserted(self, extent: Extent, first: int) -> None:
        if self._heard():
            for low, high, groups in _runs(self._present(extent, first)):
                self._tell(self._stored(extent, first + low, first + high, groups, self.number + 1))

    def filed(self, extent: Extent, group: int, blocks: npt.NDArray[np.integer]) -> None:
        if self._heard():
            for low, high in self._stretches(extent, blocks):
                self._tell(self._stored(extent, low, high, (group,), self.number + 1))

    def lost(self, extent: Extent, group: int, blocks: npt.NDArray[np.integer]) -> None:
        if self._heard():
            for low, high in self._stretches(extent, blocks):
                self._tell(self._removed(extent, low, high, (group,), "evicted"))

    def truncated(self, extent: Extent, keep_blocks: int) -> None:
        if self._heard():
            self._remove(extent, keep_blocks, "evicted")

    def forgotten(self, extent: Extent) -> None:
        if self._heard():
            self._remove(extent, 0, "cleared")

    def moved(
        self, extent: Extent, groups: tuple[int, ...], blocks: npt.NDArray[np.integer], source: str, target: str
    ) -> None:
        """``blocks`` of the extent, ascending, went to another tier."""
        if self._heard():
            for low, high in self._stretches(extent, blocks):
                scope, start, keys = self._names(extent, low, high)
                self._tell(Moved(self.number + 1, scope, start, keys, groups, source, target))

    def _heard(self) -> bool:
        """Does anybody get events now?"""
        if any(not listener.behind for listener in self._listeners):
            return True
        self._missed = True
        return False

    def _catch_up(self) -> None:
        """From now on somebody gets events."""
        if self._missed:
            self._missed = False
            self.number += 1

    def _tell(self, event: Event) -> None:
        self.number = event.number
        for listener in self._listeners:
            listener._offer(event)

    def _remove(self, extent: Extent, first: int, reason: Reason) -> None:
        # From the end, so that no event leaves a block without the one before it.
        for low, high, groups in reversed(_runs(self._present(extent, first))):
            self._tell(self._removed(extent, first + low, first + high, groups, reason))

    def _removed(self, extent: Extent, first: int, stop: int, groups: tuple[int, ...], reason: Reason) -> Removed:
        scope, start, keys = self._names(extent, first, stop)
        return Removed(self.number + 1, scope, start, keys, groups, reason)

    def _stored(self, extent: Extent, first: int, stop: int, groups: tuple[int, ...], number: int) -> Stored:
        scope, start, keys = self._names(extent, first, stop)
        known = keys_of(extent, self._format)
        parent = known[first - 1] if first else key_before(extent, self._format)
        tokens = extent.tokens_from(first * self._block)[: (stop - first) * self._block]
        tokens.flags.writeable = False
        return Stored(number, scope, start, keys, groups, parent, tokens)

    def _names(self, extent: Extent, first: int, stop: int) -> tuple[bytes, int, tuple[bytes, ...]]:
        keys = keys_of(extent, self._format)[first:stop]
        return scope_of(extent).digest(), extent.start // self._block + first, tuple(keys)

    def _present(self, extent: Extent, first: int) -> npt.NDArray[np.bool_]:
        """Which groups have a page for the whole blocks from ``first`` on: ``[groups, n]``."""
        there: npt.NDArray[np.bool_] = extent.pages[:, first : extent.length // self._block] != NO_PAGE
        return there

    def _stretches(self, extent: Extent, blocks: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
        """``blocks`` without an open one, as ranges of consecutive ones."""
        whole = blocks[blocks < extent.length // self._block]
        if not len(whole):
            return []
        breaks = np.flatnonzero(np.diff(whole) != 1) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(whole, breaks)]


def _runs(there: npt.NDArray[np.bool_]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Ranges of consecutive blocks for which the same groups have a page, with these; none where no group has."""
    count = there.shape[1]
    if not count:
        return []
    changes = (np.flatnonzero((there[:, 1:] != there[:, :-1]).any(axis=0)) + 1).tolist()
    runs = []
    for low, high in zip([0, *changes], [*changes, count]):
        groups = tuple(np.flatnonzero(there[:, low]).tolist())
        if groups:
            runs.append((low, high, groups))
    return runs
