"""A prefix cache reduced to what eviction sees: a tree of extents, and requests one by one. No pages, no tokens.

A request looks its prompt up, claims the longest cached run, and adds the rest of its prompt and its output. When that
does not fit, a policy scores the idle leaves, and blocks go from the end of the lowest one, then of the next. Nothing
on the request's own path can go. What a request adds beyond the capacity is not kept.

Blocks are those of the trace. A prompt's last partial block and the request's output are one block of their own size,
because nothing else ever begins inside it. Capacity and hits are in tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvist.policies import NO_MARK, Candidates, EvictionPolicy
from kvist.replay.traces import TraceRequest

#: Share of the requests at the beginning of a slice that is not counted, as kvcache-simulator does with warm-up 0.3.
WARM_UP = 0.3
#: Leaves looked at before all of them are: one request rarely needs more.
_LOOKED_AT = 32


@attrs.frozen(eq=False)
class Workload:
    """Requests as (block ids, prompt tokens, prompt and output tokens). ``sizes`` has the blocks of unusual size."""

    block_tokens: int
    requests: Sequence[tuple[list[int], int, int]]
    sizes: dict[int, int]

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> Workload:
        """All with the same ``block_tokens``."""
        made = []
        sizes: dict[int, int] = {}
        block_tokens = 0
        for request in requests:
            block_tokens = request.block_tokens
            blocks, length = request.block_ids.tolist(), request.input_length
            if len(blocks) * block_tokens <= length:
                # Ids of traces are not negative.
                blocks.append(-1 - request.number)
            tail = length - (len(blocks) - 1) * block_tokens + request.output_length
            if tail:
                sizes.setdefault(blocks[-1], tail)
            else:
                blocks.pop()
            made.append((blocks, length, length + request.output_length))
        return cls(block_tokens, made, sizes)

    def tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of a run of blocks. Only its last one can be of unusual size."""
        last = self.sizes.get(blocks[-1], self.block_tokens)
        return (len(blocks) - 1) * self.block_tokens + last


@attrs.frozen(eq=False)
class Hits:
    """int64 tokens for each request: found in the cache, and in its prompt."""

    found: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]

    def rate(self, skip: float = WARM_UP) -> float:
        """Per cent of the prompt tokens after the first ``skip`` of the requests."""
        first = int(len(self.found) * skip)
        return 100 * float(self.found[first:].sum() / self.prompts[first:].sum())


class Cache:
    """One run of a workload. Extents are rows of columns; row 0 is the root."""

    def __init__(self, workload: Workload, capacity: int, policy: EvictionPolicy) -> None:
        self.workload, self.capacity, self.policy = workload, capacity, policy
        #: Tokens of all requests so far, and tokens held.
        self.now = self.used = 0
        self._columns = np.zeros((4, 1024), np.int64)
        self._last_used, self._start, self._length, self._mark = self._columns
        self._blocks: list[list[int]] = [[]]
        self._children: list[dict[int, int]] = [{}]
        self._parent = [-1]
        self._free: list[int] = []
        # A dict, because its order is the same in each run.
        self._leaves: dict[int, None] = {}

    def run(self) -> Hits:
        found = [self._serve(*request) for request in self.workload.requests]
        prompts = [prompt for _, prompt, _ in self.workload.requests]
        return Hits(np.array(found, np.int64), np.array(prompts, np.int64))

    def _serve(self, blocks: list[int], prompt: int, length: int) -> int:
        workload, policy = self.workload, self.policy
        path, known = self._claim(blocks)
        hit = min(known * workload.block_tokens, prompt - 1)
        tip = path[-1] if path else 0
        added = blocks[known:]
        key = added[0] if added else None
        mark = int(self._mark[tip]) if path else NO_MARK
        mark = policy.used(mark, key, self.now, length, hit, self.used) if policy.learns else NO_MARK
        self._last_used[path] = self.now
        if added:
            excess = self.used + workload.tokens(added) - self.capacity
            excess = self._evict(excess, tip) if excess > 0 else 0
            while excess > 0 and added:
                excess -= workload.sizes.get(added.pop(), workload.block_tokens)
        if added:
            self._leaves.pop(tip, None)
            extent = self._new(added, tip, known * workload.block_tokens, workload.tokens(added))
            self._last_used[extent], self._mark[extent] = self.now, mark
            self._leaves[extent] = None
            self.used += int(self._length[extent])
        elif path:
            self._mark[tip] = mark
        self.now += length
        return hit

    def _claim(self, blocks: list[int]) -> tuple[list[int], int]:
        """Extents on the path of the longest cached run, which ends with the last of them, and its blocks."""
        path: list[int] = []
        node, known = 0, 0
        while known < len(blocks):
            child = self._children[node].get(blocks[known])
            if child is None:
                break
            run = self._blocks[child]
            end = known + len(run)
            if blocks[known:end] != run:
                end = next(at for at in range(known, end) if at == len(blocks) or blocks[at] != run[at - known])
                child = self._split(child, end - known)
            path.append(child)
            node, known = child, end
        return path, known

    def _split(self, extent: int, count: int) -> int:
        """Give the first ``count`` blocks a row of their own. Returns it."""
        blocks, parent = self._blocks[extent], self._parent[extent]
        head = count * self.workload.block_tokens
        upper = self._new(blocks[:count], parent, int(self._start[extent]), head)
        self._last_used[upper], self._mark[upper] = self._last_used[extent], self._mark[extent]
        self._children[upper][blocks[count]] = extent
        self._blocks[extent], self._parent[extent] = blocks[count:], upper
        self._start[extent] += head
        self._length[extent] -= head
        if self.policy.learns:
            rest = int(self._last_used[extent]), int(self._length[extent])
            self._mark[extent] = self.policy.left_behind(int(self._mark[extent]), *rest)
        return upper

    def _new(self, blocks: list[int], parent: int, start: int, length: int) -> int:
        if not self._free:
            count = len(self._blocks)
            if count == self._columns.shape[1]:
                self._columns = np.pad(self._columns, ((0, 0), (0, count)))
                self._last_used, self._start, self._length, self._mark = self._columns
            self._blocks.append([])
            self._children.append({})
            self._parent.append(-1)
            self._free.append(count)
        row = self._free.pop()
        self._blocks[row], self._children[row], self._parent[row] = blocks, {}, parent
        self._start[row], self._length[row] = start, length
        self._children[parent][blocks[0]] = row
        return row

    def _candidates(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self.policy.score(Candidates(*self._columns.take(rows, axis=1)), self.now)

    def _evict(self, excess: int, tip: int) -> int:
        """Free ``excess`` tokens. Returns what is lacking when there is no more: not positive when there was enough."""
        while excess > 0:
            rows = np.fromiter((row for row in self._leaves if row != tip), np.int64)
            if not len(rows):
                break
            scores = self._candidates(rows)
            if len(rows) > 2 * _LOOKED_AT:
                lowest = np.argpartition(scores, _LOOKED_AT)[:_LOOKED_AT]
                rows, scores = rows[lowest], scores[lowest]
            heap = list(zip(scores.tolist(), (-self._start[rows]).tolist(), rows.tolist()))
            heapq.heapify(heap)
            while heap and excess > 0:
                extent = heapq.heappop(heap)[2]
                excess -= self._cut(extent, excess)
                parent = self._parent[extent]
                if not self._blocks[extent] and parent in self._leaves and parent != tip:
                    score = float(self._candidates(np.array([parent]))[0])
                    heapq.heappush(heap, (score, -int(self._start[parent]), parent))
        return excess

    def _cut(self, extent: int, wanted: int) -> int:
        """Remove blocks from a leaf's end until ``wanted`` tokens are gone, or all. Returns the tokens."""
        workload, policy = self.workload, self.policy
        blocks, parent = self._blocks[extent], self._parent[extent]
        keep = len(blocks)
        gone = 0
        while keep and gone < wanted:
            keep -= 1
            gone += workload.sizes.get(blocks[keep], workload.block_tokens)
        if policy.learns:
            policy.evicted(int(self._mark[extent]), blocks[keep])
        self._length[extent] -= gone
        self.used -= gone
        if not keep:
            del self._children[parent][blocks[0]], self._leaves[extent]
            self._free.append(extent)
            if not self._children[parent] and parent:
                self._leaves[parent] = None
                if policy.learns:
                    self._mark[parent] = policy.uncovered(int(self._mark[parent]), int(self._mark[extent]))
        self._blocks[extent] = blocks[:keep]
        return gone


def optimum(workload: Workload, capacity: int, *, ends_only: bool = False) -> Hits:
    """What a clairvoyant cache hits: Belady's rule for blocks.

    When a request has ended, blocks go until the rest fits: first those whose next use is farthest, never used again
    farthest of all, of equal ones the deepest. A block is used whenever its descendants are, so this takes leaves first
    by itself. It may drop what it has just computed, which a policy in the cache cannot; with blocks of one size no
    cache hits more.

    ends_only: know only what is never used again, and take the others by last use.
    """
    never = len(workload.requests)
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(never - 1, -1, -1):
        blocks = workload.requests[number][0]
        next_uses.append([following.get(block, never) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    next_uses.reverse()
    cached: dict[int, tuple[int, int]] = {}
    heap: list[tuple[tuple[int, int], int]] = []
    used = 0
    found = []
    for number, ((blocks, prompt, _), uses) in enumerate(zip(workload.requests, next_uses)):
        if ends_only:
            uses = [use if use == never else -number for use in uses]
        known = next((at for at, block in enumerate(blocks) if block not in cached), len(blocks))
        found.append(min(known * workload.block_tokens, prompt - 1))
        for depth, (block, use) in enumerate(zip(blocks, uses)):
            if block not in cached:
                used += workload.sizes.get(block, workload.block_tokens)
            cached[block] = (-use, -depth)
            heapq.heappush(heap, ((-use, -depth), block))
        while used > capacity:
            at, block = heapq.heappop(heap)
            if cached.get(block) == at:
                del cached[block]
                used -= workload.sizes.get(block, workload.block_tokens)
    return Hits(np.array(found, np.int64), np.array([prompt for _, prompt, _ in workload.requests], np.int64))
