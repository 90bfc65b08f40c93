"""A tier with pages: which token runs are in it, which of them copies need, and taking in what has arrived.

The device and the host are the same thing here: a prefix tree, a ledger and an arena each. A copy that is finished is
inserted like anything that was computed, so known blocks are kept once, whatever happened since it was submitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvist.eviction import choose, evict
from kvist.keeper import Keeper
from kvist.ledger import Ledger
from kvist.memory.mover import Tier
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.spec import Scope
from kvist.step import NO_PAGE, IntArray, present

Cells = npt.NDArray[np.bool_]


@attrs.frozen(eq=False)
class Known:
    """What a tier has of a token run.

    path: extents from the root side on, with the tokens matched in each.
    length: tokens in blocks that are there as a whole, and in the tier's open last block if all of that matches.
    pages: int32 ``[groups, ceil(length / block_tokens)]``.
    """

    path: list[tuple[Extent, int]]
    length: int
    pages: IntArray


@attrs.frozen(eq=False)
class Pin:
    """What a copy keeps of one tier until it is finished.

    extent: held, with everything above it. pages: per group; leased where the group is sparse, otherwise new ones that
    nobody else has. read: per group, pages of dense groups in what is held that the copy reads.
    """

    extent: Extent | None
    pages: list[IntArray]
    read: list[IntArray] = attrs.Factory(list)


@attrs.define(eq=False)
class Arrival:
    """Blocks on their way into a tier.

    scope, tokens: what the blocks belong to, from position 0 to the end of the last block.
    first: leading blocks that the tier had, to the end of the pin's extent.
    ordinals: int64 ``[n]``, ascending: the blocks that something is copied for; all from ``first`` on that have pages
        of dense groups are among them.
    pages: int32 ``[groups, n]``, the tier's pages to copy to, NO_PAGE where nothing is copied.
    lost: bool ``[groups, n]``: did not arrive.
    pin: keeps the path to ``first``, and the pages.
    """

    scope: Scope
    tokens: IntArray
    first: int
    ordinals: npt.NDArray[np.int64]
    pages: IntArray
    lost: Cells
    pin: Pin


class Level:
    """Owns nothing; mutates the tier's tree and ledger. ``evicted``: pages per group that made room, so far."""

    def __init__(self, tier: Tier, tree: PrefixTree, ledger: Ledger) -> None:
        self.tier = tier
        self.tree = tree
        self.ledger = ledger
        self._keeper = Keeper(tree, None)
        self.block = ledger.layout.block_tokens
        self.groups = range(len(ledger.sparse))
        self.dense: Cells = ~np.array(ledger.sparse, np.bool_)
        self.evicted = [0 for _ in self.groups]
        #: For the audit: every pin that is not given back.
        self.pins: dict[int, Pin] = {}

    def look(self, scope: Scope, tokens: IntArray) -> Known:
        """What is here of ``tokens``. Changes nothing."""
        path = self.tree.walk(scope, tokens)
        if not path:
            return Known([], 0, np.empty((len(self.groups), 0), np.int32))
        last, matched = path[-1]
        length = last.start + matched
        if not (last.is_open and matched == last.length):
            length -= length % self.block
        pieces = [extent.pages[:, : -(-count // self.block)] for extent, count in path]
        pages = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        return Known(path, length, pages[:, : -(-length // self.block)])

    def path_to(self, extent: Extent) -> Known:
        """The run that ends with ``extent``, all of it."""
        path = [(extent, extent.length)]
        while (above := path[-1][0].parent) is not None and above.parent is not None:
            path.append((above, above.length))
        path.reverse()
        return Known(path, extent.end, np.concatenate([each.pages for each, _ in path], axis=1))

    def pin(self, known: Known, blocks: int, cells: Cells | None = None) -> Pin:
        """Keep the first ``blocks`` blocks of ``known``, and pages of sparse groups where ``cells`` ``[groups, n]``
        says so. May split an extent, so ``known.path`` is of no use afterwards. Mutates."""
        extent = None
        if blocks:
            for node, _ in reversed(known.path):
                first = node.start // self.block
                if first < blocks:
                    extent = self.tree.split_at(node, blocks - first)
                    self.tree.hold(extent)
                    break
        nothing: IntArray = np.empty(0, np.int32)
        pages, read = [], []
        for group in self.groups:
            kept = nothing if cells is None else known.pages[group, : cells.shape[1]][cells[group]]
            if self.ledger.sparse[group] and len(kept):
                self.ledger.lease(group, kept)
            pages.append(kept if self.ledger.sparse[group] else nothing)
            read.append(nothing if self.ledger.sparse[group] else kept)
        return self._noted(Pin(extent, pages, read))

    def held(self) -> Iterator[Extent]:
        """Extents that copies hold."""
        return (pin.extent for pin in self.pins.values() if pin.extent is not None)

    @property
    def copying(self) -> list[int]:
        """Pages per group that pins keep, a page once for each."""
        return pinned(self.pins.values(), len(self.groups))

    def touched(self) -> Iterator[tuple[int, IntArray]]:
        """Groups and pages that copies in progress read or write, and which must stay where they are."""
        for pin in self.pins.values():
            yield from enumerate(pin.pages)
            yield from enumerate(pin.read)

    def allocate(self, pin: Pin, pages: list[IntArray]) -> Pin:
        """``pin`` with new pages too, per group, which the caller has taken from the ledger."""
        del self.pins[id(pin)]
        return self._noted(Pin(pin.extent, [np.concatenate(each) for each in zip(pin.pages, pages)], pin.read))

    def unpin(self, pin: Pin, *, used: bool, silent: bool = True) -> None:
        """Give back a pin: its pages and its hold. Mutates.

        used: does that count as a use? silent: a copy down is no news for those who look for what to copy down; they
        would try again for ever what fails.
        """
        del self.pins[id(pin)]
        for group, pages in enumerate(pin.pages):
            if len(pages):
                self.ledger.release(group, pages)
        if pin.extent is not None:
            idled = self.tree.idled
            if silent:
                self.tree.idled = None
            self._unpublish(self.tree.release(pin.extent, used=used))
            self.tree.idled = idled

    def make_room(self, needed: Sequence[int]) -> bool:
        """Evict until ``needed[group]`` pages are free. False when they cannot be, and then nothing changes."""
        eviction, short = choose(self._keeper, self.ledger, needed)
        if any(short):
            return False
        for group, count in enumerate(evict(self._keeper, self.ledger, eviction)):
            self.evicted[group] += count
        return True

    def take(self, needed: Sequence[int]) -> list[IntArray]:
        """New pages, for which there is room, with one lease each."""
        if len(needed) > 1:
            self.ledger.arena.gather(needed)
        return [self.ledger.allocate(group, count) for group, count in enumerate(needed)]

    def arrive(self, arrival: Arrival) -> list[int]:
        """Let everybody find what has arrived, give back the rest and the pin. Returns the pages kept per group.

        Dense groups are kept up to the first block that one of them lacks.
        """
        tree, block = self.tree, self.block
        ordinals, pages, first = arrival.ordinals, arrival.pages, arrival.first
        there = ordinals[((pages != NO_PAGE) & ~arrival.lost).any(axis=0)]
        end = max(first, int(there[-1]) + 1) if len(there) else first
        if len(there) and not self.dense.any():
            # Tokens behind the last page belong to it: those that nobody is to reuse at the end of what is known.
            end = -(-len(arrival.tokens) // block)
        gaps = ordinals[(arrival.lost & self.dense[:, None]).any(axis=0)]
        if len(gaps):
            end = max(first, min(end, int(gaps[0])))
        tip, owned = arrival.pin.extent, np.zeros(len(ordinals), np.bool_)
        if end > first:
            inside = (ordinals >= first) & (ordinals < end)
            offered = np.full((len(pages), end - first), NO_PAGE, np.int32)
            offered[np.ix_(self.dense, ordinals[inside] - first)] = pages[np.ix_(self.dense, inside)]
            run = arrival.tokens[first * block : end * block]
            result = tree.insert(arrival.scope, run, offered, tip)
            if result.replaced is not None:
                self._unpublish([result.replaced])
            low = first + result.covered
            owned = inside & (ordinals >= low) & (ordinals < low + result.added)
            tip = result.tip or tip
        kept = [0 for _ in self.groups]
        if tip is not None:
            tree.hold(tip)
            self._file(arrival, tip, kept)
        for group in self.groups:
            if self.dense[group]:
                kept[group] = int(np.count_nonzero(owned))
                arrival.pin.pages[group] = present(pages[group, ~owned])
        self.unpin(arrival.pin, used=True)
        if tip is not None:
            self._unpublish(tree.release(tip))
        return kept

    def _file(self, arrival: Arrival, tip: Extent, kept: list[int]) -> None:
        """Publish the arrived pages of sparse groups where the path to ``tip`` has none; ``kept`` counts them."""
        ordinals = arrival.ordinals
        for extent, first, view in above(tip, self.block, int(ordinals[0]), int(ordinals[-1]) + 1):
            inside = np.flatnonzero((ordinals >= first) & (ordinals < first + view.shape[1]))
            for group in self.groups:
                if self.dense[group]:
                    continue
                row, pages = view[group], arrival.pages[group, inside]
                at = ordinals[inside] - first
                fill = (pages != NO_PAGE) & ~arrival.lost[group, inside] & (row[at] == NO_PAGE)
                if fill.any():
                    row[at[fill]] = pages[fill]
                    if self.tree.watcher is not None:
                        self.tree.watcher.filed(extent, group, at[fill] + first - extent.start // self.block)
                    self.ledger.publish(group, pages[fill])
                    kept[group] += int(np.count_nonzero(fill))

    def discard(self, scope: Scope, tokens: IntArray, ordinal: int) -> None:
        """Forget block ``ordinal`` of ``tokens`` and what comes after it, unless somebody holds it. Mutates."""
        known = self.look(scope, tokens[: (ordinal + 1) * self.block])
        if known.length <= ordinal * self.block:
            return
        for extent, _ in known.path:
            if extent.start <= ordinal * self.block < extent.end:
                order = [extent]
                for node in order:
                    order.extend(node.children.values())
                if any(node.holds for node in order):
                    return
                for node in reversed(order[1:]):
                    self._unpublish([self.tree.truncate(node, 0, "failed")])
                self._unpublish([self.tree.truncate(extent, ordinal - extent.start // self.block, "failed")])

    def touch(self, extent: Extent) -> None:
        """Count a use of an extent and of everything above it. Mutates."""
        self.tree.hold(extent)
        self._unpublish(self.tree.release(extent))

    def forget(self) -> tuple[list[int], list[int]]:
        """Empty the tier of all that nobody holds, and hide the rest. Returns pages freed and still held, per group."""
        before = list(self.ledger.arena.taken_count)
        removed, kept = self.tree.forget()
        self._unpublish(removed)
        for extent in kept:
            for group in self.groups:
                if self.ledger.sparse[group]:
                    row = extent.pages[group]
                    self.ledger.unpublish(group, present(row))
                    row[:] = NO_PAGE
        held = list(self.ledger.arena.taken_count)
        return [then - now for now, then in zip(held, before)], held

    def _noted(self, pin: Pin) -> Pin:
        self.pins[id(pin)] = pin
        return pin

    def _unpublish(self, removed: list[IntArray]) -> None:
        for pages in removed:
            for group, row in enumerate(pages):
                self.ledger.unpublish(group, present(row))


def pinned(pins: Iterable[Pin], group_count: int) -> list[int]:
    """Pages per group that ``pins`` keep, a page once for each."""
    counts = [0] * group_count
    for pin in pins:
        for group in range(group_count):
            counts[group] += len(pin.pages[group]) + len(pin.read[group])
    return counts


def above(tip: Extent, block: int, low: int, high: int) -> Iterator[tuple[Extent, int, IntArray]]:
    """Blocks ``low .. high - 1`` on the path to ``tip``: extent and first block of each piece, and a writable view of
    its pages ``[groups, n]``. Deepest piece first."""
    node: Extent | None = tip
    while node is not None and node.parent is not None and low < high:
        first = node.start // block
        begin, end = max(low, first), min(high, first + node.block_count)
        if begin < end:
            yield node, begin, node.pages[:, begin - first : end - first]
        high = min(high, first)
        node = node.parent
