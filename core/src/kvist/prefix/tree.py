"""The tree of extents: finding, inserting and removing token runs. Knows page ids, but not who holds them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import attrs
import numpy as np

from kvist.prefix.extent import Extent, order_key
from kvist.spec import Scope
from kvist.step import IntArray


@attrs.define(eq=False)
class Cursor:
    """A remembered position: the first ``length`` tokens (whole blocks) of some sequence end in or with ``extent``.

    Valid while the extent lives and its version is unchanged, because then those tokens are still there.
    """

    extent: Extent
    version: int
    length: int

    @classmethod
    def at(cls, extent: Extent, length: int) -> Cursor | None:
        """The position ``length`` on the path to ``extent``, or None at a root: a walk from there sees every child."""
        while extent.parent is not None and extent.start >= length:
            extent = extent.parent
        return None if extent.parent is None else cls(extent, extent.version, length)

    @property
    def valid(self) -> bool:
        extent = self.extent
        return extent.alive and extent.version == self.version and extent.start < self.length <= extent.end


@attrs.define(eq=False)
class Inserted:
    """What :meth:`PrefixTree.insert` did.

    tip: the deepest extent that holds tokens of the sequence.
    replaced: pages ``[groups, 1]`` that were the open tail block of an extent and are not in the tree any more.
    covered_blocks: leading blocks that were known before; their pages may differ from the ones offered.
    added: block ordinals ``[begin, end)`` that are new in the tree, with the pages offered.
    """

    tip: Extent
    replaced: IntArray | None
    covered_blocks: int
    added: tuple[int, int]


class _Root(Extent):
    """Where all token runs of one scope begin."""

    __slots__ = ("scope",)
    scope: Scope


class PrefixTree:
    """Extents of one cache, one root per scope. Exact token comparison, no hashing.

    A path from a root spells token runs; an extent's block belongs to every longer path through it. Mutating calls
    say so; the caller keeps the ledger in step with the pages they report.
    """

    def __init__(self, block_tokens: int, group_count: int) -> None:
        self.block_tokens = block_tokens
        self.group_count = group_count
        self.roots: dict[Scope, _Root] = {}
        self.extent_count = 0
        self._clock = 0
        self._push_count = 0
        #: Leaves as a heap by (last use, order of offering); entries go stale and are checked when popped.
        self.candidates: list[tuple[int, int, Extent]] = []
        #: Leaves taken from the candidates for a plan that may not be committed.
        self.set_aside: list[Extent] = []

    def walk(self, scope: Scope, run: IntArray, start: Cursor | None = None) -> list[tuple[Extent, int]]:
        """The longest known run of leading tokens: ``(extent, tokens matched in it)``, root side first.

        run: tokens from position 0 on, or with a valid ``start`` from there on; only extents from its own on are then
        listed. Changes nothing.
        """
        block = self.block_tokens
        path: list[tuple[Extent, int]] = []
        node: Extent
        if start is not None:
            node, matched = start.extent, start.length - start.extent.start
        else:
            root = self.roots.get(scope)
            if root is None:
                return path
            node, matched = root, 0
        position, total = 0, len(run)
        while True:
            count = min(node.length - matched, total - position)
            if count:
                differs = node.tokens[matched : matched + count] != run[position : position + count]
                same = int(differs.argmax())
                if not differs[same]:
                    same = count
                matched += same
                position += same
            if node.parent is not None:
                path.append((node, matched))
            if matched < node.length or not node.children or position == total:
                return path
            key = order_key(run[position : position + block])
            child = node.children.get(key)
            if child is None:
                closest = node.closest_child(key)
                if closest is not None:
                    path.append(closest)
                return path
            node, matched = child, 0

    def split_at(self, extent: Extent, block_count: int) -> Extent:
        """Make ``block_count`` blocks of ``extent`` an extent of their own and return it. Mutates the tree."""
        if block_count >= extent.block_count:
            return extent
        self.extent_count += 1
        return extent.split(block_count)

    def insert(self, scope: Scope, run: IntArray, pages: IntArray, start: Cursor | None = None) -> Inserted:
        """Add a run of tokens with their pages; known blocks keep their own pages. Mutates.

        run: tokens from position 0 on, or with a valid ``start`` from there on; may be kept and must never change.
        pages: int32 ``[groups, blocks]`` of the run.

        An open last block that is already covered by a longer or equal run is left out; one that a known open block
        is a prefix of replaces that block.
        """
        block = self.block_tokens
        offset = start.length if start is not None else 0
        path = self.walk(scope, run, start)
        node: Extent = path[-1][0] if path else self._root(scope)
        known = node.start + path[-1][1] if path else 0
        first = known // block
        if known == offset + len(run):
            return Inserted(node, None, first, (first, first))
        run, pages = run[first * block - offset :], pages[:, first - offset // block :]
        replaced = None
        if node.parent is not None and known < node.end:
            node = self._parent_for_branch(node, first * block)
        elif known % block:
            # The known tail is an open block and a prefix of ours: ours takes its place.
            replaced = node.cut(node.length // block)
            node.append(run, pages)
            if node.length == len(run):
                # It had nothing but the open block.
                assert node.parent is not None
                node.parent.replace_child(node, order_key(run[:block]))
            return Inserted(node, replaced, first, (first, first + pages.shape[1]))
        if node.parent is not None and not node.children:
            node.append(run, pages)
        else:
            child = Extent(block, node, first * block, run, pages)
            child.last_used = self._clock
            node.add_child(child)
            self.extent_count += 1
            node = child
        return Inserted(node, replaced, first, (first, first + pages.shape[1]))

    def touch(self, extent: Extent, length: int) -> None:
        """Mark the first ``length`` tokens of the path to ``extent`` as just used. Splits an extent in which they end,
        so that what is behind them keeps its age. Mutates."""
        self._clock += 1
        if not extent.alive:
            extent = _alive(extent)
        while extent.start >= length and extent.parent is not None:
            extent = extent.parent
        if extent.parent is not None and extent.end > length:
            extent = self.split_at(extent, -(-length // self.block_tokens) - extent.start // self.block_tokens)
        node: Extent | None = extent
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def offer(self, extent: Extent) -> None:
        """Let ``extent``, or what is left of the path to it, be found by :meth:`leaves` if it is a leaf. Call when a
        lease on one of its pages, or on a page of the path to it, is released."""
        if not extent.alive:
            extent = _alive(extent)
        if extent.alive and not extent.children and extent.parent is not None:
            self._push_count += 1
            heapq.heappush(self.candidates, (extent.last_used, self._push_count, extent))
            if len(self.candidates) > 4 * self.extent_count + 1024:
                self._compact_heap()

    def leaves(self) -> Iterator[Extent]:
        """Leaves from the least recently used on, each once. Those taken are not candidates any more until they are
        offered again, except that ``set_aside`` ones come back by themselves the next time."""
        for extent in self.set_aside:
            self.offer(extent)
        self.set_aside = []
        heap = self.candidates
        seen: set[int] = set()
        while heap:
            tick, number, extent = heapq.heappop(heap)
            if not extent.alive or extent.children or id(extent) in seen:
                continue
            if extent.last_used != tick:
                heapq.heappush(heap, (extent.last_used, number, extent))
                continue
            seen.add(id(extent))
            yield extent

    def truncate(self, extent: Extent, block_count: int) -> IntArray:
        """Keep the first ``block_count`` blocks of a leaf; with 0 the extent is removed, and its parent may become a
        leaf. Returns the pages ``[groups, n]`` that left the tree. Mutates."""
        assert not extent.children
        parent = extent.parent
        assert parent is not None
        if block_count:
            removed = extent.cut(block_count)
            self.offer(extent)
            return removed
        parent.remove_child(extent.key)
        extent.alive = False
        self.extent_count -= 1
        if not parent.children:
            if parent.parent is None:
                assert isinstance(parent, _Root)
                del self.roots[parent.scope]
                parent.alive = False
            else:
                self.offer(parent)
        return extent.pages

    def extents(self) -> Iterator[Extent]:
        """Every extent, in no particular order. No recursion: depth grows with the number of turns."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            extent = stack.pop()
            yield extent
            stack.extend(extent.children.values())

    def _root(self, scope: Scope) -> _Root:
        root = self.roots.get(scope)
        if root is None:
            nothing = np.empty((self.group_count, 0), np.int32)
            root = self.roots[scope] = _Root(self.block_tokens, None, 0, np.empty(0, np.int32), nothing)
            root.scope = scope
        return root

    def _parent_for_branch(self, node: Extent, position: int) -> Extent:
        """The extent that ends at ``position`` (a block boundary at or inside ``node``), split off if need be."""
        if position > node.start:
            return self.split_at(node, (position - node.start) // self.block_tokens)
        assert node.parent is not None
        return node.parent

    def _compact_heap(self) -> None:
        latest = {id(extent): (extent.last_used, number, extent) for _, number, extent in self.candidates}
        self.candidates = [entry for entry in latest.values() if entry[2].alive and not entry[2].children]
        heapq.heapify(self.candidates)


def _alive(extent: Extent) -> Extent:
    """``extent``, or the nearest extent above it that is still in the tree."""
    while not extent.alive and extent.parent is not None:
        extent = extent.parent
    return extent
