"""Between the prefix tree and an eviction policy: who goes first, and what a policy that learns is told."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import attrs
import numpy as np

from kvist.policies import NO_MARK, Candidates, EvictionPolicy, LeastRecentlyUsed
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.step import IntArray

#: The end of a request, as a policy knows it again: where the first block lies that somebody added, and its tokens.
Key = tuple[int, bytes]


class Keeper:
    """Orders idle leaves by what a policy says. Owns the policy; marks extents of the tree.

    Without a policy, leaves go least recently used first, from the tree's own heap: the order of
    :class:`LeastRecentlyUsed`, at a cost that does not grow with the number of leaves. Once somebody has made a wish,
    that policy itself is asked.
    """

    def __init__(self, tree: PrefixTree, policy: EvictionPolicy | None) -> None:
        self.tree = tree
        self.policy = policy
        #: Does the policy want to know what happens?
        self.learns = policy is not None and policy.learns
        self._policy: EvictionPolicy = policy if policy is not None else LeastRecentlyUsed()

    def key_of(self, start: int, block: IntArray) -> Key:
        """start: token position of a block. block: its tokens."""
        return start, block.tobytes()

    def ended(
        self, tip: Extent | None, claimed_mark: int, key: Key | None, length: int, reused: int, cached: int
    ) -> None:
        """A request's tokens are in the tree and end in ``tip``. The arguments are those of ``EvictionPolicy.used``."""
        mark = self._policy.used(claimed_mark, key, self.tree.clock, length, reused, cached)
        if tip is not None:
            tip.mark = mark

    def left_behind(self, rest: Extent) -> None:
        """A request claimed only what lay before ``rest`` in one extent with it."""
        rest.mark = self._policy.left_behind(rest.mark, rest.last_used, rest.length)

    def cutting(self, extent: Extent, keep_blocks: int) -> None:
        """All but the first ``keep_blocks`` blocks of a leaf are about to go."""
        block = extent.block_tokens
        first = keep_blocks * block
        self._policy.evicted(extent.mark, self.key_of(extent.start + first, extent.tokens[first : first + block]))
        parent = extent.parent
        if not keep_blocks and parent is not None and parent.parent is not None and len(parent.children) == 1:
            parent.mark = self._policy.uncovered(parent.mark, extent.mark)

    def queue(self) -> Queue:
        """Idle leaves in the order in which they should go."""
        if self.policy is None and not self.tree.wished:
            return Queue(self.tree)
        return _ScoredQueue(self.tree, self._policy)


class Queue:
    """Idle leaves, least recently used first, and what would become a leaf when they were gone. Changes nothing."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        #: Leaf extents, with how many of their first blocks they keep; 0 removes one.
        self.victims: list[tuple[Extent, int]] = []
        self._gone: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._leaves = self.tree.leaves()
        #: The next leaf, where it had to be known whether a parent goes first.
        self._leaf: Extent | None = None
        #: Parents whose children would all be gone, by last use.
        self._uncovered: list[tuple[int, int, Extent]] = []

    def pop(self) -> Extent | None:
        """The next extent to cut."""
        leaf, self._leaf = self._leaf, None
        if leaf is None:
            leaf = next(self._leaves, None)
        if self._uncovered and (leaf is None or self._uncovered[0][0] <= leaf.last_used):
            self._leaf = leaf
            return heapq.heappop(self._uncovered)[2]
        return leaf

    def cut(self, extent: Extent, keep_blocks: int) -> None:
        """Note a victim."""
        self.victims.append((extent, keep_blocks))
        parent = extent.parent
        if not keep_blocks and parent is not None and parent.parent is not None and not parent.holds:
            gone = self._gone.get(id(parent), 0) + 1
            self._gone[id(parent)] = gone
            if gone == len(parent.children):
                self._uncover(parent, extent)

    def _uncover(self, parent: Extent, child: Extent) -> None:
        heapq.heappush(self._uncovered, (parent.last_used, len(self.victims), parent))

    def looked_at(self) -> tuple[list[Extent], Extent | None]:
        """Extents that the tree sets aside until the plan is carried out, and the one of them that stays."""
        looked_at = [extent for extent, _ in self.victims]
        if self._leaf is not None:
            looked_at.append(self._leaf)
        self.tree.set_aside = looked_at
        return looked_at, self._leaf


class _ScoredQueue(Queue):
    """Idle leaves by the score of a policy, of equal ones the deepest first."""

    def __init__(self, tree: PrefixTree, policy: EvictionPolicy) -> None:
        self._policy = policy
        super().__init__(tree)

    def _begin(self) -> None:
        leaves = list(self.tree.idle_leaves())
        scores = self._scores(leaves, [leaf.mark for leaf in leaves])
        self._heap = [(score, -leaf.start, at, leaf) for at, (score, leaf) in enumerate(zip(scores, leaves))]
        heapq.heapify(self._heap)

    def pop(self) -> Extent | None:
        return heapq.heappop(self._heap)[3] if self._heap else None

    def _uncover(self, parent: Extent, child: Extent) -> None:
        mark = self._policy.uncovered(parent.mark, child.mark) if self._policy.learns else NO_MARK
        score = self._scores([parent], [mark])[0]
        heapq.heappush(self._heap, (score, -parent.start, -len(self.victims), parent))

    def looked_at(self) -> tuple[list[Extent], Extent | None]:
        # Nothing was taken out of the tree's own heap.
        return [], None

    def _scores(self, leaves: Sequence[Extent], marks: Sequence[int]) -> list[float]:
        if not leaves:
            return []
        rows = [(leaf.last_used, leaf.start, leaf.length) for leaf in leaves]
        used, start, length = np.array(rows, np.int64).T
        candidates = Candidates(used, start, length, np.array(marks, np.int64))
        if self.tree.wished:
            wishes = [(leaf.wish.priority, leaf.wish.lifetime_tokens) for leaf in leaves]
            priority, lifetime = np.array(wishes, np.int64).T
            alive = self.tree.clock - used < lifetime
            candidates = attrs.evolve(candidates, priority=np.where(alive, priority, 0))
        scores: list[float] = self._policy.score(candidates, self.tree.clock).tolist()
        return scores
