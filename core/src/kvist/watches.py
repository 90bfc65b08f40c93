"""What each tier tells listeners: a tier with pages from its prefix tree, the disk from its own list of changes."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvist.events import DEVICE, Events, Moved, Removed, Stored
from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.memory.disk import DiskStore
from kvist.memory.diskstats import Change, Reason
from kvist.memory.mover import Tier
from kvist.prefix.extent import Extent
from kvist.prefix.named import key_before, keys_of
from kvist.prefix.tree import PrefixTree, scope_of
from kvist.step import NO_PAGE


class TreeWatch:
    """Turns changes of a prefix tree into events. The tree knows it only while somebody listens.

    Implements :class:`~kvist.events.Watch` and :class:`~kvist.prefix.watch.IndexWatcher`; changes nothing but the keys
    kept on extents.
    """

    def __init__(self, events: Events, layout: Layout, tree: PrefixTree, tier: Tier = Tier.DEVICE) -> None:
        """Raises SpecError for a spec without content keys."""
        self._events = events
        self._format = format_digest(layout)
        self._block = layout.block_tokens
        self._tree = tree
        self._tier = tier.value

    def follow(self, on: bool) -> None:
        self._tree.watcher = self if on else None

    def is_empty(self) -> bool:
        return not self._tree.roots

    def catch_up(self) -> None:
        pass

    def stored(self) -> list[Stored]:
        found: list[Stored] = []
        stack = [child for root in self._tree.roots.values() for child in root.children.values()]
        while stack:
            extent = stack.pop()
            stack.extend(extent.children.values())
            for first, stop, groups in _runs(self._present(extent, 0)):
                found.append(self._stored(extent, first, stop, groups))
        return found

    def inserted(self, extent: Extent, first: int) -> None:
        if self._events.heard():
            for low, high, groups in _runs(self._present(extent, first)):
                self._tell_new(extent, first + low, first + high, groups)

    def filed(self, extent: Extent, group: int, blocks: npt.NDArray[np.integer]) -> None:
        if self._events.heard():
            for low, high in self._stretches(extent, blocks):
                self._tell_new(extent, low, high, (group,))

    def lost(self, extent: Extent, group: int, blocks: npt.NDArray[np.integer]) -> None:
        if self._events.heard():
            for low, high in self._stretches(extent, blocks):
                self._tell_removed(extent, low, high, (group,), "evicted")

    def truncated(self, extent: Extent, keep_blocks: int, reason: Reason) -> None:
        if self._events.heard():
            # From the end, so that no event leaves a block without the one before it.
            for low, high, groups in reversed(_runs(self._present(extent, keep_blocks))):
                self._tell_removed(extent, keep_blocks + low, keep_blocks + high, groups, reason)

    def _tell_new(self, extent: Extent, first: int, stop: int, groups: tuple[int, ...]) -> None:
        if self._tier == DEVICE:
            self._events.tell(self._stored(extent, first, stop, groups))
        else:
            number, names = self._events.number + 1, self._names(extent, first, stop)
            self._events.tell(Moved(number, *names, groups, DEVICE, self._tier))

    def _tell_removed(self, extent: Extent, first: int, stop: int, groups: tuple[int, ...], reason: Reason) -> None:
        number, names = self._events.number + 1, self._names(extent, first, stop)
        self._events.tell(Removed(number, *names, groups, reason, self._tier))

    def _stored(self, extent: Extent, first: int, stop: int, groups: tuple[int, ...]) -> Stored:
        known = keys_of(extent, self._format)
        parent = known[first - 1] if first else key_before(extent, self._format)
        tokens = extent.tokens_from(first * self._block)[: (stop - first) * self._block]
        tokens.flags.writeable = False
        number, names = self._events.number + 1, self._names(extent, first, stop)
        return Stored(number, *names, groups, parent, tokens, self._tier)

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


class DiskWatch:
    """Turns what a disk store notes of its changes, in any thread, into events. Implements
    :class:`~kvist.events.Watch`."""

    def __init__(self, events: Events, disk: DiskStore, source: Tier) -> None:
        """source: the tier that it is filled from."""
        self._events = events
        self._disk = disk
        self._source = source.value

    def follow(self, on: bool) -> None:
        self._disk.follow(on)

    def is_empty(self) -> bool:
        return not self._disk.stats().entries

    def catch_up(self) -> None:
        self._tell(self._disk.changes())

    def stored(self) -> list[Stored]:
        entries, changes = self._disk.entries()
        self._tell(changes)
        found = []
        for groups, run in groupby(entries, key=lambda entry: entry[1]):
            keys = tuple(key for key, _ in run)
            found.append(Stored(0, None, None, keys, _of_bits(groups), None, None, Tier.DISK.value))
        return found

    def _tell(self, changes: list[Change]) -> None:
        if not changes or not self._events.heard():
            return
        for (groups, reason), run in groupby(changes, key=lambda change: (change.groups, change.reason)):
            number, keys = self._events.number + 1, tuple(change.key for change in run)
            names = (number, None, None, keys, _of_bits(groups))
            if reason is None:
                self._events.tell(Moved(*names, self._source, Tier.DISK.value))
            else:
                self._events.tell(Removed(*names, reason, Tier.DISK.value))


def _of_bits(groups: int) -> tuple[int, ...]:
    return tuple(group for group in range(groups.bit_length()) if groups >> group & 1)


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
