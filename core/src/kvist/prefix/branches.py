"""The largest branches of a prefix tree, for people who want to know what a cache is full of."""

from __future__ import annotations

import heapq
from hashlib import blake2b

import attrs

from kvist.errors import RequestError
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree


@attrs.frozen
class Branch:
    """A line of extents and everything that leaves it. Where the tree forks, the line goes on as long as one way has
    nine tenths of the tokens below; the other ways are its children.

    name: short, of its first block. parent: its place in the list, -1 for one that begins a sequence. scope: short, of
    the scope's digest; a salt may be a secret. start: token position where it begins. own_tokens: of the line.
    tokens: with everything below. extents: runs of tokens in it. children: branches right below it, listed or not.
    held: is anything of it in use?
    hits: requests that reused something of it, and ``hit_tokens``, what these reused in all, from position 0 on; those
        that took less than a block are not counted.
    """

    name: str
    parent: int
    scope: str
    start: int
    own_tokens: int
    tokens: int
    extents: int
    children: int
    held: bool
    hits: int
    hit_tokens: int


@attrs.define
class _Sum:
    tokens: int
    extents: int
    hits: int
    hit_tokens: int


def largest_branches(tree: PrefixTree, limit: int) -> list[Branch]:
    """See :meth:`kvist.contract.CacheManager.branches`."""
    if limit < 1:
        raise RequestError(f"branches(limit={limit}) must be at least 1")
    sums = _sums(tree)
    # A branch is never larger than the one it is part of, so that taking the largest finds parents first.
    waiting: list[tuple[int, int, Extent, int, str]] = []
    for root in tree.roots.values():
        scope = root.scope.digest().hex()[:8]
        for child in root.children.values():
            waiting.append((-sums[id(child)].tokens, len(waiting), child, -1, scope))
    heapq.heapify(waiting)
    offered = len(waiting)
    found: list[Branch] = []
    while waiting and len(found) < limit:
        _, _, extent, parent, scope = heapq.heappop(waiting)
        total = sums[id(extent)]
        name = blake2b(extent.key, digest_size=4).hexdigest()
        own_tokens, children = _line(extent, sums)
        for child in children:
            heapq.heappush(waiting, (-sums[id(child)].tokens, offered, child, len(found), scope))
            offered += 1
        found.append(
            Branch(
                name,
                parent,
                scope,
                extent.start,
                own_tokens,
                total.tokens,
                total.extents,
                len(children),
                extent.holds > 0,
                total.hits,
                total.hit_tokens,
            )
        )
    return found


def _line(extent: Extent, sums: dict[int, _Sum]) -> tuple[int, list[Extent]]:
    """Tokens of the line that begins with ``extent``, and what leaves it."""
    tokens, leaving = extent.length, list[Extent]()
    while extent.children:
        ways = list(extent.children.values())
        largest = max(ways, key=lambda way: sums[id(way)].tokens)
        if 10 * sums[id(largest)].tokens < 9 * sum(sums[id(way)].tokens for way in ways):
            return tokens, leaving + ways
        leaving += [way for way in ways if way is not largest]
        extent = largest
        tokens += extent.length
    return tokens, leaving


def _sums(tree: PrefixTree) -> dict[int, _Sum]:
    """Of every extent, by id: what it and everything below it comes to. No recursion: depth grows with the turns."""
    order = [child for root in tree.roots.values() for child in root.children.values()]
    for extent in order:
        order.extend(extent.children.values())
    sums = {id(extent): _Sum(extent.length, 1, extent.hits, extent.hit_tokens) for extent in order}
    for extent in reversed(order):
        above = sums.get(id(extent.parent))
        if above is not None:
            here = sums[id(extent)]
            above.tokens += here.tokens
            above.extents += here.extents
            above.hits += here.hits
            above.hit_tokens += here.hit_tokens
    return sums
