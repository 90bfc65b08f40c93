"""A run of consecutive blocks kept as one object: the node of the prefix tree."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from kvist.step import IntArray
from kvist.wishes import NO_WISH


class Extent:
    """``length`` tokens from position ``start`` of every sequence below it, with one page id per block and group.

    Only the last block of an extent may be partial, and then it has no children. ``start`` is a multiple of
    ``block_tokens``. Children are keyed by the tokens of their first block. A root has length 0 and no parent.
    """

    __slots__ = (
        "_pages",
        "_pieces",
        "alive",
        "block_tokens",
        "children",
        "hit_tokens",
        "hits",
        "holds",
        "key",
        "keys",
        "last_used",
        "length",
        "mark",
        "order",
        "parent",
        "stale",
        "start",
        "wish",
    )

    def __init__(self, block_tokens: int, parent: Extent | None, start: int, run: IntArray, pages: IntArray) -> None:
        """``run`` and ``pages`` as in :meth:`append`."""
        self.block_tokens = block_tokens
        self.parent = parent
        self.start = start
        self.length = len(run)
        # The tokens, in the arrays they came in. Joined when somebody compares with them, which few extents ever see.
        self._pieces = [_kept(run)]
        self._pages: IntArray = pages.copy()
        self.children: dict[bytes, Extent] = {}
        #: Keys of the children, sorted: the child sharing the longest prefix with any tokens is a neighbour, in
        #: whatever order the bytes of a token put tokens.
        self.order: list[bytes] = []
        #: Tokens of the first block, as the parent files them.
        self.key = run[:block_tokens].tobytes()
        #: Content keys of leading whole blocks, as many as were asked for: :func:`kvist.prefix.named.keys_of`.
        self.keys: list[bytes] | None = None
        self.last_used = 0
        #: For statistics: requests whose reuse ended here, or in something below that is gone, and tokens they reused.
        self.hits = 0
        self.hit_tokens = 0
        #: For the eviction policy.
        self.mark = -1
        #: How long its blocks should stay; all have the same wish.
        self.wish = NO_WISH
        self.alive = True
        #: Holders, and children that are held: an extent is *idle* when there are none. Who holds an extent holds all
        #: of it, and everything above it.
        self.holds = 0
        #: Nobody may find it any more; it goes when nobody holds it.
        self.stale = False

    @property
    def end(self) -> int:
        """Token position after the last token."""
        return self.start + self.length

    @property
    def block_count(self) -> int:
        return -(-self.length // self.block_tokens)

    @property
    def is_open(self) -> bool:
        """Ends in the middle of a block."""
        return self.length % self.block_tokens != 0

    @property
    def tokens(self) -> IntArray:
        """int32 ``[length]``. Do not write to it."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0]

    @property
    def pages(self) -> IntArray:
        """int32 ``[groups, block_count]``, a writable view."""
        return self._pages[:, : -(-self.length // self.block_tokens)]

    def tokens_from(self, first: int) -> IntArray:
        """The tokens after the first ``first`` ones, without joining what came in one piece. Do not write to it."""
        last = self._pieces[-1]
        behind = first - (self.length - len(last))
        return last[behind:] if behind >= 0 else self.tokens[first:]

    def append(self, run: IntArray, pages: IntArray) -> None:
        """Add blocks after a whole last block.

        run: int32 tokens to add. Kept instead of copied when it is most of its buffer, so it must never change.
        pages: int32 ``[groups, blocks]`` of them; copied.
        """
        first = self.block_count
        blocks = first + pages.shape[1]
        self._pieces.append(_kept(run))
        self.length += len(run)
        if blocks > self._pages.shape[1]:
            # What grows once is likely to go on growing.
            wider = np.empty((len(pages), blocks * 3 // 2), np.int32)
            wider[:, :first] = self._pages[:, :first]
            self._pages = wider
        self._pages[:, first:blocks] = pages

    def cut(self, block_count: int) -> IntArray:
        """Keep the first ``block_count`` blocks. Returns the pages ``[groups, removed blocks]`` of the others."""
        removed = self.pages[:, block_count:].copy()
        length = min(self.length, block_count * self.block_tokens)
        excess, self.length = self.length - length, length
        while excess:
            piece = self._pieces.pop()
            if len(piece) > excess or not self._pieces:
                self._pieces.append(_kept(piece[: len(piece) - excess]))
                break
            excess -= len(piece)
        if self.keys is not None:
            del self.keys[block_count:]
        if 2 * block_count < self._pages.shape[1]:
            self._pages = self._pages[:, :block_count].copy()
        return removed

    def split(self, block_count: int) -> Extent:
        """Move the first ``block_count`` blocks into a new parent, which takes this extent's place. Returns it."""
        blocks, tokens = self.block_count, self.tokens
        assert self.parent is not None and 0 < block_count < blocks
        cut = block_count * self.block_tokens
        upper = Extent(self.block_tokens, self.parent, self.start, tokens[:cut], self._pages[:, :block_count])
        upper.last_used = self.last_used
        upper.mark = self.mark
        upper.wish = self.wish
        upper.holds = 1 if self.holds else 0
        upper.stale = self.stale
        if self.keys is not None:
            upper.keys, self.keys = self.keys[:block_count], self.keys[block_count:]
        self.parent.children[upper.key] = upper
        self._pieces = [_kept(tokens[cut:])]
        self._pages = self._pages[:, block_count:blocks].copy()
        self.start += cut
        self.length -= cut
        self.key = tokens[cut : cut + self.block_tokens].tobytes()
        self.parent = upper
        upper.add_child(self)
        return upper

    def add_child(self, child: Extent) -> None:
        assert child.key not in self.children
        self.children[child.key] = child
        insort(self.order, child.key)

    def replace_child(self, child: Extent, key: bytes) -> None:
        """File a child whose first block has changed under its new ``key``."""
        self.remove_child(child.key)
        child.key = key
        self.add_child(child)

    def remove_child(self, key: bytes) -> None:
        del self.children[key]
        del self.order[bisect_left(self.order, key)]

    def closest_child(self, key: bytes) -> tuple[Extent, int] | None:
        """The child that shares the most leading tokens with the block ``key`` stands for, and how many."""
        at = bisect_left(self.order, key)
        best: tuple[Extent, int] | None = None
        for near in self.order[at - 1 if at else 0 : at + 1]:
            count = _common_tokens(near, key)
            if count and (best is None or count > best[1]):
                best = self.children[near], count
        return best


def _kept(run: IntArray) -> IntArray:
    """``run``, or a copy where it would keep a buffer alive that is mostly something else's."""
    base = run.base
    return run if not isinstance(base, np.ndarray) or 2 * run.size >= base.size else run.copy()


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens, of 4 bytes each, that two keys share."""
    if left[:4] != right[:4]:
        return 0
    size = min(len(left), len(right))
    differs = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    # The lowest bit that is set lies in the first byte that differs.
    return ((differs & -differs).bit_length() - 1) // 32 if differs else size // 4
