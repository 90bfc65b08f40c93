"""What an LRU prefix cache does, in the plainest form: one object per block, nothing shared with Kvist.

The rules, each of which can be checked by reading:

* A block in the tree has its parent's tokens before it. A prompt reuses the longest run of cached tokens, all but its
  last token at most. Inside the block where it leaves the cached run, leading rows are copied to a page of its own.
* A running request holds the blocks that it reuses and those that it computed. The whole blocks of a prompt enter the
  tree when it is computed; everything else, an open last block too, when the request ends. A whole block that is in
  the tree already is used instead of the request's own; an open block that the tree's closest block continues is left
  out, and a block that continues an open one takes its place.
* A block is used when a request that reuses it opens, and when a request that has published it, or what is above it,
  publishes or ends.
* When a page is needed and none is free, the least recently used block that nobody holds and that has no children
  goes; of several with the same last use, which are then on one path, the deepest.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Block:
    """Tokens of one block, and its place in the tree while it has one."""

    __slots__ = ("children", "depth", "holders", "last_used", "parent", "tokens")

    def __init__(self, tokens: bytes = b"") -> None:
        self.tokens = tokens
        self.parent: Block | None = None
        self.children: dict[bytes, Block] = {}
        self.depth = 0
        self.holders = 0
        self.last_used = 0

    def attach(self, parent: Block) -> None:
        self.parent = parent
        self.depth = parent.depth + 1
        parent.children[self.tokens] = self

    def detach(self) -> None:
        assert self.parent is not None and not self.children
        del self.parent.children[self.tokens]
        self.parent = None


class Request:
    """One running request."""

    def __init__(self, number: int, prompt: Tokens, output: Tokens) -> None:
        self.number = number
        # Big-endian, so that bytes compare as token ids do.
        self.data = np.concatenate([prompt, output]).astype(np.int32).tobytes()
        self.prompt_length = len(prompt)
        self.remaining = len(output)
        self.computed = 0
        self.reused = 0
        self.blocks: list[Block] = []
        self.source: Block | None = None
        self.tip: Block | None = None
        self.published = 0


class Cache:
    """A pool of ``page_count`` pages. ``scan`` looks for each victim among all blocks instead of in a heap."""

    def __init__(self, page_count: int, block_tokens: int, *, token_wise: bool = True, scan: bool = False) -> None:
        self.page_count = page_count
        self.block_bytes = 4 * block_tokens
        self.block_tokens = block_tokens
        self.token_wise = token_wise
        self.root = Block()
        #: Blocks in the tree or held: each has a page.
        self.used = 0
        self.idle = 0
        self.evicted = 0
        self._clock = 0
        self._order = 0
        self._heap: list[tuple[int, int, int, Block]] | None = None if scan else []

    # -- pages ------------------------------------------------------------------------------------------------------

    def hold(self, block: Block) -> None:
        if block.parent is not None and not block.holders:
            self.idle -= 1
        block.holders += 1

    def drop(self, block: Block) -> None:
        block.holders -= 1
        if not block.holders:
            if block.parent is None:
                self.used -= 1
            else:
                self.idle += 1
                self._candidate(block)

    def new_block(self) -> Block:
        """A page for a request, held once."""
        if self.used == self.page_count:
            victim = self._victim()
            parent = victim.parent
            victim.detach()
            self.used -= 1
            self.idle -= 1
            self.evicted += 1
            assert parent is not None
            self._candidate(parent)
        self.used += 1
        block = Block()
        block.holders = 1
        return block

    def room(self) -> int:
        """Pages that can be had. A held block's ancestors are held too, so every idle block can go in time."""
        return self.page_count - self.used + self.idle

    def _candidate(self, block: Block) -> None:
        if self._heap is not None and not block.children and not block.holders and block is not self.root:
            self._order += 1
            heapq.heappush(self._heap, (block.last_used, -block.depth, self._order, block))

    def _victim(self) -> Block:
        if self._heap is None:
            leaves = [block for block in self.tree() if not block.children and not block.holders]
            return min(leaves, key=lambda block: (block.last_used, -block.depth))
        while True:
            tick, _, _, block = heapq.heappop(self._heap)
            if block.parent is None or block.children or block.holders:
                continue
            if block.last_used == tick:
                return block
            self._candidate(block)

    def tree(self) -> list[Block]:
        """Every block in the tree."""
        found, stack = [], list(self.root.children.values())
        while stack:
            block = stack.pop()
            found.append(block)
            stack.extend(block.children.values())
        return found

    # -- requests ---------------------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Claim the longest cached run."""
        limit = request.prompt_length - 1
        block, position = self.root, 0
        while position + self.block_tokens <= limit:
            child = block.children.get(self._cut(request, position, limit + 1))
            if child is None:
                break
            block, position = child, position + self.block_tokens
            request.blocks.append(child)
            self.hold(child)
        request.published = request.computed = position
        request.tip = block
        if position:
            self._touch(block)
        if self.token_wise:
            closest, common = self._closest(block, self._cut(request, position, limit + 1))
            common = min(common, limit - position)
            if common:
                assert closest is not None
                request.source = closest
                self.hold(closest)
                request.computed += common
        request.reused = request.computed

    def compute_prompt(self, request: Request) -> bool:
        """Get pages for the prompt, compute it, publish it. False when the pages cannot be had."""
        needed = -(-request.prompt_length // self.block_tokens) - len(request.blocks)
        if needed > self.room():
            return False
        request.blocks += [self.new_block() for _ in range(needed)]
        request.computed = request.prompt_length
        self._publish(request, request.computed - request.computed % self.block_tokens)
        self._drop_source(request)
        return True

    def compute_token(self, request: Request) -> None:
        """One token more."""
        if request.computed == len(request.blocks) * self.block_tokens:
            request.blocks.append(self.new_block())
        request.computed += 1
        request.remaining -= 1

    def close(self, request: Request) -> None:
        """Publish the rest, let go of everything."""
        self._publish(request, request.computed)
        for block in request.blocks:
            self.drop(block)
        self._drop_source(request)
        if request.tip is not None and request.tip is not self.root:
            self._touch(request.tip)

    def turn_away(self, request: Request) -> None:
        """There is no room now. What the request claimed counts as used."""
        last = request.source or request.tip
        for block in request.blocks:
            self.drop(block)
        self._drop_source(request)
        if last is not None and last is not self.root:
            self._touch(last)

    def _drop_source(self, request: Request) -> None:
        if request.source is not None:
            self.drop(request.source)
            request.source = None

    def _publish(self, request: Request, end: int) -> None:
        """Put the first ``end`` tokens of a request into the tree."""
        if end <= request.published:
            return
        first = request.published // self.block_tokens
        block = request.blocks[first - 1] if first else self.root
        for ordinal in range(first, -(-end // self.block_tokens)):
            block = self._insert(block, request, ordinal, self._cut(request, ordinal * self.block_tokens, end))
        request.published = end
        request.tip = block
        self._touch(block)

    def _insert(self, parent: Block, request: Request, ordinal: int, tokens: bytes) -> Block:
        """Put one block of a request under ``parent``. Returns the block of the tree that holds its tokens."""
        own = request.blocks[ordinal]
        known = parent.children.get(tokens)
        if known is not None:
            if len(tokens) == self.block_bytes:
                self.hold(known)
                self.drop(own)
                request.blocks[ordinal] = known
            return known
        closest, common = self._closest(parent, tokens)
        if closest is not None and 4 * common == len(tokens):
            return closest
        if closest is not None and 4 * common == len(closest.tokens):
            self._remove(closest)
        own.tokens = tokens
        own.attach(parent)
        return own

    def _remove(self, block: Block) -> None:
        """A longer block takes the place of an open one."""
        if not block.holders:
            self.idle -= 1
            self.used -= 1
        block.detach()

    def _closest(self, parent: Block, tokens: bytes) -> tuple[Block | None, int]:
        """The child that shares the most leading tokens, and how many; of several the neighbour in order, the
        smaller one first."""
        best: Block | None = None
        best_key: tuple[int, bool, Any] | None = None
        shared = 0
        for child in parent.children.values():
            count = common_tokens(child.tokens, tokens)
            smaller = child.tokens < tokens
            if not count or (best_key is not None and (count, smaller) < best_key[:2]):
                continue
            if best is not None and best_key is not None and (count, smaller) == best_key[:2]:
                nearer = child.tokens > best.tokens if smaller else child.tokens < best.tokens
                if not nearer:
                    continue
            best, best_key, shared = child, (count, smaller, None), count
        return best, shared

    def _cut(self, request: Request, position: int, end: int) -> bytes:
        return request.data[4 * position : 4 * min(position + self.block_tokens, end)]

    def _touch(self, block: Block) -> None:
        self._clock += 1
        node: Block | None = block
        while node is not None:
            node.last_used = self._clock
            node = node.parent


def common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two runs share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // 4
    count = 0
    while left[4 * count : 4 * count + 4] == right[4 * count : 4 * count + 4]:
        count += 1
    return count


def simulate(
    requests: Iterable[tuple[Tokens, Tokens]],
    *,
    page_count: int,
    block_tokens: int,
    concurrency: int,
    token_wise: bool = True,
    scan: bool = False,
) -> tuple[list[int], Cache]:
    """Reused prompt tokens of each ``(prompt, output)``, and the cache at the end.

    The job: first in, first out; at most ``concurrency`` requests run; prompt and output are reserved against the
    pool; prompts are computed in one piece as requests are admitted, then every running request gets one token.
    token_wise: reuse inside the block where a prompt leaves the cached run; otherwise whole blocks only.
    """
    cache = Cache(page_count, block_tokens, token_wise=token_wise, scan=scan)
    given = list(requests)
    waiting = deque(Request(number, prompt, output) for number, (prompt, output) in enumerate(given))
    reused = [0] * len(waiting)
    running: list[tuple[Request, int]] = []
    reserved = 0
    blocked = False
    while waiting or running:
        while waiting and len(running) < concurrency and not blocked:
            request = waiting[0]
            pages = -(-(request.prompt_length + request.remaining) // block_tokens)
            if reserved + pages > page_count:
                assert running, f"request {request.number} can never fit"
                blocked = True
                break
            cache.open(request)
            if not cache.compute_prompt(request):
                # Reserved pages are there, but the block that is copied from is one more.
                assert running, f"request {request.number} does not fit beside the block it copies from"
                cache.turn_away(request)
                waiting[0] = Request(request.number, *given[request.number])
                blocked = True
                break
            waiting.popleft()
            reserved += pages
            reused[request.number] = request.reused
            running.append((request, pages))
        # Requests without output leave before the step, the others after their last one.
        for step in (False, True):
            for request, _ in running if step else ():
                cache.compute_token(request)
            for request, pages in running:
                if not request.remaining:
                    cache.close(request)
                    reserved -= pages
                    blocked = False
            running = [each for each in running if each[0].remaining]
    return reused, cache
