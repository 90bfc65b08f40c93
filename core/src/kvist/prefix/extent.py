"""A run of consecutive blocks kept as one object: the node of the prefix tree."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from kvist.step import IntArray

#: A dtype object: parsing the string costs more than the conversion.
_BIG_ENDIAN = np.dtype(">i4")


def order_key(tokens: IntArray) -> bytes:
    """Tokens as bytes that sort like the tokens do, so that neighbours share the longest prefix."""
    return tokens.astype(_BIG_ENDIAN).tobytes()


class Extent:
    """``length`` tokens from position ``start`` of every sequence below it, with one page id per block and group.

    Only the last block of an extent may be partial, and then it has no children. ``start`` is a multiple of
    ``block_tokens``. Children are keyed by the tokens of their first block. A root has length 0 and no parent.
    """

    __slots__ = (
        "_pages", "key", "_source", "_tokens", "alive", "block_tokens", "children", "last_used", "length", "order", "parent",
        "start", "version",
    )  # fmt: skip

    def __init__(
        self,
        block_tokens: int,
        parent: Extent | None,
        start: int,
        run: IntArray,
        pages: IntArray,
        source: IntArray | None = None,
    ) -> None:
        """``run``, ``pages`` and ``source`` as in :meth:`append`."""
        self.block_tokens = block_tokens
        self.parent = parent
        self.start = start
        self.length = len(run)
        # The array of somebody's whole prompt that _tokens is a view of; None for a buffer of our own.
        self._source = source if source is not None and 2 * len(run) >= source.size else None
        self._tokens: IntArray = run if self._source is not None else run.copy()
        self._pages: IntArray = pages.copy()
        self.children: dict[bytes, Extent] = {}
        #: Keys of the children, sorted: the child sharing the longest prefix with any tokens is a neighbour.
        self.order: list[bytes] = []
        #: Tokens of the first block, as the parent files them.
        self.key = order_key(run[:block_tokens])
        self.last_used = 0
        self.alive = True
        #: Grows whenever tokens are removed, so that a remembered position can be checked in O(1).
        self.version = 0

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
        """int32 ``[length]``."""
        return self._tokens[: self.length]

    @property
    def pages(self) -> IntArray:
        """int32 ``[groups, block_count]``, a writable view."""
        return self._pages[:, : self.block_count]

    def can_append(self, source: IntArray | None) -> bool:
        """Would ``append`` be cheap: into a buffer of our own, or by showing more of the same prompt?"""
        return not self.children and (self._source is None or self._source is source)

    def append(self, run: IntArray, pages: IntArray, source: IntArray | None) -> None:
        """Add blocks after a whole last block.

        run: int32 tokens to add.
        pages: int32 ``[groups, blocks]`` of them; copied.
        source: the read-only array of all tokens from position 0 on that ``run`` is a part of, or None. It is kept
            instead of copied when most of it is this extent's.
        """
        first = self.block_count
        blocks, end = first + pages.shape[1], self.length + len(run)
        if source is not None and source is self._source:
            self._tokens = source[self.start : self.start + end]
        else:
            if end > len(self._tokens) or self._source is not None:
                # What grows once is likely to go on growing.
                grown = np.empty(end * 3 // 2, np.int32)
                grown[: self.length] = self._tokens[: self.length]
                self._source, self._tokens = None, grown
            self._tokens[self.length : end] = run
        if blocks > self._pages.shape[1]:
            wider = np.empty((len(pages), blocks * 3 // 2), np.int32)
            wider[:, :first] = self._pages[:, :first]
            self._pages = wider
        self._pages[:, first:blocks] = pages
        self.length = end

    def cut(self, block_count: int) -> IntArray:
        """Keep the first ``block_count`` blocks. Returns the pages ``[groups, removed blocks]`` of the others."""
        removed = self.pages[:, block_count:].copy()
        self.length = min(self.length, block_count * self.block_tokens)
        self.version += 1
        self._shrink()
        return removed

    def split(self, block_count: int) -> Extent:
        """Move the first ``block_count`` blocks into a new parent, which takes this extent's place. Returns it."""
        blocks = self.block_count
        assert self.parent is not None and 0 < block_count < blocks
        cut = block_count * self.block_tokens
        upper = Extent(self.block_tokens, self.parent, self.start, self._tokens[:cut], self._pages[:, :block_count])
        upper.last_used = self.last_used
        self.parent.children[upper.key] = upper
        self._tokens = self._tokens[cut : self.length]
        self._pages = self._pages[:, block_count:blocks].copy()
        self.start += cut
        self.length -= cut
        self.key = order_key(self._tokens[: self.block_tokens])
        self._shrink()
        self.version += 1
        self.parent = upper
        upper.add_child(self)
        return upper

    def _shrink(self) -> None:
        """Let go of a buffer that is mostly not this extent's any more."""
        if 2 * self.length < _buffer_size(self._tokens):
            self._source, self._tokens = None, self._tokens[: self.length].copy()
            self._pages = self._pages[:, : self.block_count].copy()

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
        for near in self.order[max(0, at - 1) : at + 1]:
            count = _common_tokens(near, key)
            if count and (best is None or count > best[1]):
                best = self.children[near], count
        return best


def _buffer_size(array: IntArray) -> int:
    """Elements that ``array`` keeps in memory, itself or by the array it is a view of."""
    return array.base.size if isinstance(array.base, np.ndarray) else array.size


def _common_tokens(left: bytes, right: bytes) -> int:
    if left[:4] != right[:4]:
        return 0
    size = min(len(left), len(right)) // 4
    differs = np.frombuffer(left, _BIG_ENDIAN, size) != np.frombuffer(right, _BIG_ENDIAN, size)
    return int(differs.argmax()) if differs.any() else size
