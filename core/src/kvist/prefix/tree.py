"""The tree of extents: finding, inserting, holding and removing token runs."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import attrs
import numpy as np

from kvist.memory.diskstats import Reason
from kvist.prefix.extent import Extent
from kvist.prefix.watch import IndexWatcher
from kvist.spec import Scope
from kvist.step import IntArray
from kvist.wishes import NO_WISH, Wish, strongest


@attrs.define(eq=False)
class Inserted:
    """What :meth:`PrefixTree.insert` did.

    tip: the deepest extent that holds whole blocks of the run, or its open tail block if that was added. It ends where
        what the tree has of the run ends. ``None`` when there is nothing of it.
    covered: leading whole blocks that were known before; their pages may differ from the ones offered.
    added: blocks after those that are new in the tree, with the pages offered.
    replaced: pages ``[groups, 1]`` of an open block that the first added block continues; not in the tree any more.
    """

    tip: Extent | None
    covered: int
    added: int
    replaced: IntArray | None


class _Root(Extent):
    """Where all token runs of one scope begin."""

    __slots__ = ("scope",)
    scope: Scope


def scope_of(extent: Extent) -> Scope:
    """The scope of every sequence that goes through ``extent``."""
    node = extent
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, _Root)
    return node.scope


class PrefixTree:
    """Extents of one cache, one root per scope. Exact token comparison, no hashing.

    A path from a root spells token runs; an extent's block belongs to every longer path through it. Pages of dense
    groups in an extent belong to the tree, and a hold on the extent keeps them; the ledger keeps pages of sparse
    groups. Mutating calls say so; the caller passes on the pages they report.
    """

    def __init__(self, block_tokens: int, group_count: int) -> None:
        self.block_tokens = block_tokens
        #: int32 ``[groups, 0]``.
        self.no_pages: IntArray = np.empty((group_count, 0), np.int32)
        self.roots: dict[Scope, _Root] = {}
        self.extent_count = 0
        #: Blocks in idle extents: what eviction can free of every dense group.
        self.idle_blocks = 0
        #: Grows with every use; in tokens, as far as somebody passes time in tokens.
        self.clock = 0
        self._push_count = 0
        #: Idle leaves as a heap by (last use, order of offering); entries go stale and are checked when popped.
        self.candidates: list[tuple[int, int, Extent]] = []
        #: Leaves taken from the candidates for a plan that may not be committed.
        self.set_aside: list[Extent] = []
        #: Did anybody ever make a wish?
        self.wished = False
        #: Is told what can be found and what can not any more; ``None`` while nobody wants to know.
        self.watcher: IndexWatcher | None = None
        #: Where somebody wants to know of them: extents that somebody let go of, each with the path to it.
        self.idled: deque[Extent] | None = None

    def walk(self, scope: Scope, run: IntArray, tip: Extent | None = None) -> list[tuple[Extent, int]]:
        """The longest known run of leading tokens: ``(extent, tokens matched in it)``, root side first.

        run: tokens from position 0 on, or with ``tip`` from its end on; only extents below it are then listed.
        The last extent may share only the first tokens of its first block. Changes nothing.
        """
        block = self.block_tokens
        path: list[tuple[Extent, int]] = []
        node = tip if tip is not None else self.roots.get(scope)
        if node is None:
            return path
        position, total = 0, len(run)
        while node.children and position < total:
            key = run[position : position + block].tobytes()
            child = node.children.get(key)
            if child is None:
                closest = node.closest_child(key)
                if closest is not None:
                    path.append(closest)
                return path
            node = child
            count = min(node.length, total - position)
            # A search for the first true byte beats argmax, which has to be asked twice.
            same = (node.tokens[:count] != run[position : position + count]).tobytes().find(1)
            if same < 0:
                same = count
            position += same
            path.append((node, same))
            if same < node.length:
                return path
        return path

    def split_at(self, extent: Extent, block_count: int) -> Extent:
        """Make the first ``block_count`` blocks of ``extent`` an extent of their own and return it. Mutates."""
        if block_count >= extent.block_count:
            return extent
        self.extent_count += 1
        return extent.split(block_count)

    def insert(
        self, scope: Scope, run: IntArray, pages: IntArray, tip: Extent | None = None, wish: Wish = NO_WISH
    ) -> Inserted:
        """Add a run of tokens with their pages; known blocks keep their own pages. Mutates.

        run: tokens from position 0 on, or with ``tip``, which the caller holds, from its end on; may be kept and must
            never change.
        pages: int32 ``[groups, blocks]`` of the run; copied.
        wish: of the blocks that are new. Known ones keep theirs.

        An open last block that is already covered by a longer or equal run is left out; one that an idle open block
        is a prefix of replaces that block.
        """
        block = self.block_tokens
        path = self.walk(scope, run, tip) if tip is None or tip.children else None
        if path:
            last, matched = path[-1]
            known = matched + sum(extent.length for extent, _ in path[:-1])
            covered = known // block
            whole = matched // block
            node = last
            if matched == last.length and matched % block and known < len(run) and not last.holds:
                # The known tail is an open block and a prefix of ours: ours takes its place.
                filled = last.wish
                if filled != wish and whole:
                    self.split_at(last, whole)
                    whole = 0
                run, pages = run[covered * block :], pages[:, covered:]
                replaced = last.cut(whole)
                last.append(run, pages)
                self.idle_blocks += pages.shape[1] - 1
                if not whole:
                    assert last.parent is not None
                    last.parent.replace_child(last, run[:block].tobytes())
                if self.watcher is not None and not last.stale:
                    self.watcher.inserted(last, whole)
                if filled != wish:
                    # The block that was open had other users too.
                    last.wish, self.wished = wish, True
                    self.wish(last, last.start // block, last.start // block + 1, filled)
                return Inserted(last, covered, pages.shape[1], replaced)
            if matched < last.length or matched % block:
                if known == len(run) and matched % block:
                    # The block that covers our open one counts as used, what is behind it does not.
                    last = self.split_at(last, whole + 1)
                    self.clock += 1
                    last.last_used = self.clock
                if whole:
                    node = self.split_at(last, whole)
                else:
                    assert last.parent is not None
                    node = last.parent
            if known == len(run):
                return Inserted(None if node.parent is None else node, covered, 0, None)
            run, pages = run[covered * block :], pages[:, covered:]
        else:
            covered = 0
            node = tip if tip is not None else self._root(scope)
        holds = node.holds
        if (
            node.parent is not None
            and not node.children
            and (not holds or (holds == 1 and node is tip))
            and (node.wish is wish or node.wish == wish)
        ):
            node.append(run, pages)
        else:
            child = Extent(block, node, node.start + node.length, run, pages)
            child.last_used = self.clock
            child.stale = node.stale
            if wish is not NO_WISH:
                child.wish = wish
                self.wished = True
            node.add_child(child)
            self.extent_count += 1
            node, holds = child, 0
        if not holds:
            self.idle_blocks += pages.shape[1]
        if self.watcher is not None and not node.stale:
            self.watcher.inserted(node, node.block_count - pages.shape[1])
        return Inserted(node, covered, pages.shape[1], None)

    def wish(self, tip: Extent, low: int, high: int, wish: Wish) -> None:
        """Let blocks ``low .. high - 1`` on the path to ``tip``, counted from the root, have ``wish``, except where
        their own is stronger. Splits extents whose blocks would differ. Mutates."""
        node = tip
        while node.parent is not None and node.end > low * self.block_tokens:
            first = node.start // self.block_tokens
            if first < high and strongest(node.wish, wish) != node.wish:
                node = self.split_at(node, high - first)
                if first < low:
                    self.split_at(node, low - first)
                node.wish = wish
                self.wished = True
            assert node.parent is not None
            node = node.parent

    def priority(self, extent: Extent) -> int:
        """What is wished for an extent now."""
        wish = extent.wish
        return wish.priority if self.clock - extent.last_used < wish.lifetime_tokens else 0

    def hold(self, extent: Extent) -> None:
        """Keep ``extent``, all of it, and everything above it. Mutates."""
        node = extent
        node.holds += 1
        while node.holds == 1:
            parent = node.parent
            if parent is None:
                return
            self.idle_blocks -= node.block_count
            node = parent
            node.holds += 1

    def release(self, extent: Extent, *, used: bool = True) -> list[IntArray]:
        """Give a hold up. What nobody holds any more counts as just used, if it was ``used``. Returns pages
        ``[groups, n]`` of stale extents, which are not in the tree any more. Mutates."""
        removed: list[IntArray] = []
        self.clock += 1
        tick = self.clock if used else extent.last_used
        node = extent
        node.holds -= 1
        while node.parent is not None:
            # A parent was used whenever a child was, also if the child's release stopped at another hold.
            if node.last_used < tick:
                node.last_used = tick
            else:
                tick = node.last_used
            if node.holds:
                break
            self.idle_blocks += node.block_count
            if not node.children:
                if node.stale:
                    removed.append(self.truncate(node, 0))
                else:
                    self.offer(node)
            node = node.parent
            node.holds -= 1
        if self.idled is not None:
            self.idled.append(extent)
        return removed

    def pass_time(self, ticks: int) -> None:
        """Let the clock go on by ``ticks``."""
        self.clock += ticks

    def idle_leaves(self) -> Iterator[Extent]:
        """Idle leaves, each once, in no particular order. Takes nothing out of the candidates."""
        found: dict[int, Extent] = {id(extent): extent for _, _, extent in self.candidates}
        found.update((id(extent), extent) for extent in self.set_aside)
        for extent in found.values():
            if extent.alive and not extent.holds and not extent.children:
                yield extent

    def offer(self, extent: Extent) -> None:
        """Let an idle extent be found by :meth:`leaves` if it is a leaf."""
        if not extent.children and extent.parent is not None:
            self._push_count += 1
            heapq.heappush(self.candidates, (extent.last_used, self._push_count, extent))
            if len(self.candidates) > 4 * self.extent_count + 1024:
                self._compact_heap()

    def leaves(self) -> Iterator[Extent]:
        """Idle leaves, least recently used first, each once. Takes them out of the candidates: what remains a leaf
        must be offered again. Leaves set aside for a plan that was not committed are offered first."""
        for extent in self.set_aside:
            if extent.alive and not extent.holds:
                self.offer(extent)
        self.set_aside = []
        heap = self.candidates
        seen: set[int] = set()
        while heap:
            tick, number, extent = heapq.heappop(heap)
            if not extent.alive or extent.holds or extent.children or id(extent) in seen:
                continue
            if extent.last_used != tick:
                heapq.heappush(heap, (extent.last_used, number, extent))
                continue
            seen.add(id(extent))
            yield extent

    def truncate(self, extent: Extent, block_count: int, reason: Reason = "evicted") -> IntArray:
        """Keep the first ``block_count`` blocks of an idle leaf; with 0 the extent is removed, and its parent may
        become a leaf. Returns the pages ``[groups, n]`` that left the tree. Mutates."""
        assert not extent.children and not extent.holds
        parent = extent.parent
        assert parent is not None
        self.idle_blocks -= extent.block_count - block_count
        if self.watcher is not None and not extent.stale:
            self.watcher.truncated(extent, block_count, reason)
        if block_count:
            removed = extent.cut(block_count)
            self.offer(extent)
            return removed
        parent.remove_child(extent.key)
        parent.hits += extent.hits
        parent.hit_tokens += extent.hit_tokens
        extent.alive = False
        self.extent_count -= 1
        if not parent.children and not parent.holds:
            if parent.parent is None:
                assert isinstance(parent, _Root)
                if not parent.stale:
                    del self.roots[parent.scope]
                parent.alive = False
            elif not parent.stale:
                self.offer(parent)
        return extent.pages

    def forget(self) -> tuple[list[IntArray], list[Extent]]:
        """Remove everything idle and make the rest stale: nobody finds it any more. Returns the pages ``[groups, n]``
        that left the tree, and the extents that are held. Mutates."""
        removed, kept = [], []
        for root in self.roots.values():
            root.stale = True
            # Parents before children, without recursion: depth grows with the turns.
            order = list(root.children.values())
            for extent in order:
                extent.stale = True
                order.extend(extent.children.values())
            if self.watcher is not None:
                for extent in reversed(order):
                    self.watcher.truncated(extent, 0, "cleared")
            removed += [self.truncate(extent, 0) for extent in reversed(order) if not extent.holds]
            kept += [extent for extent in order if extent.holds]
        self.roots.clear()
        self.candidates.clear()
        self.set_aside.clear()
        return removed, kept

    def extents(self) -> Iterator[Extent]:
        """Every extent that can be found, in no particular order. No recursion: depth grows with the turns."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            extent = stack.pop()
            yield extent
            stack.extend(extent.children.values())

    def _root(self, scope: Scope) -> _Root:
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = _Root(self.block_tokens, None, 0, np.empty(0, np.int32), self.no_pages)
            root.scope = scope
        return root

    def _compact_heap(self) -> None:
        latest = {id(extent): (extent.last_used, number, extent) for _, number, extent in self.candidates}
        self.candidates = [e for e in latest.values() if e[2].alive and not e[2].children and not e[2].holds]
        heapq.heapify(self.candidates)
