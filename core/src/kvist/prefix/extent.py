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
        "_pages", "_tokens", "alive", "block_tokens", "children", "last_used", "length", "order", "parent", "start",
        "version",
    )  # fmt: skip

    def __init__(self, block_tokens: int, group_count: int, parent: Extent | None, start: int) -> None:
        self.block_tokens = block_tokens
        self.parent = parent
        self.start = start
        self.length = 0
        self._tokens: IntArray = np.empty(0, np.int32)
        self._pages: IntArray = np.empty((group_count, 0), np.int32)
        self.children: dict[bytes, Extent] = {}
        #: Keys of the children, sorted: the child sharing the longest prefix with any tokens is a neighbour.
        self.order: list[bytes] = []
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

    @property
    def key(self) -> bytes:
        return order_key(self._tokens[: min(self.length, self.block_tokens)])

    def append(self, tokens: IntArray, pages: IntArray) -> None:
        """Add blocks after a whole last block.

        tokens: int32, all tokens of some sequence up to the new end; those before ``end`` are known to be equal. The
        array is kept, not copied, when most of its buffer is this extent's, so it must never change.
        pages: ``[groups, blocks]`` of the new blocks; copied.
        """
        first, blocks = self.block_count, self.block_count + pages.shape[1]
        self.length = len(tokens) - self.start
        run = tokens[self.start :]
        self._tokens = run if 2 * len(run) >= _buffer_size(run) else run.copy()
        if blocks > self._pages.shape[1]:
            # The first content fits exactly; what grows again is likely to go on growing.
            wider = np.empty((len(pages), blocks if not first else max(blocks, first * 3 // 2)), np.int32)
            wider[:, :first] = self._pages[:, :first]
            self._pages = wider
        self._pages[:, first:blocks] = pages

    def cut(self, block_count: int) -> IntArray:
        """Keep the first ``block_count`` blocks. Returns the pages ``[groups, removed blocks]`` of the others."""
        removed = self.pages[:, block_count:].copy()
        self.length = min(self.length, block_count * self.block_tokens)
        self.version += 1
        self._tokens = self._tokens[: self.length]
        if 2 * self.length < _buffer_size(self._tokens):
            self._tokens = self._tokens.copy()
            self._pages = self.pages.copy()
        return removed

    def split(self, block_count: int) -> Extent:
        """Move the first ``block_count`` blocks into a new parent, which takes this extent's place. Returns it."""
        blocks = self.block_count
        assert self.parent is not None and 0 < block_count < blocks
        upper = Extent(self.block_tokens, len(self._pages), self.parent, self.start)
        cut = block_count * self.block_tokens
        upper.length = cut
        upper._tokens = self._tokens[:cut].copy()
        upper._pages = self._pages[:, :block_count].copy()
        upper.last_used = self.last_used
        self.parent.children[upper.key] = upper
        # Copies: the lower part must not keep the whole buffer alive.
        self._tokens = self._tokens[cut : self.length].copy()
        self._pages = self._pages[:, block_count:blocks].copy()
        self.start += cut
        self.length -= cut
        self.version += 1
        self.parent = upper
        upper.add_child(self)
        return upper

    def add_child(self, child: Extent) -> None:
        key = child.key
        assert key not in self.children
        self.children[key] = child
        insort(self.order, key)

    def remove_child(self, key: bytes) -> None:
        del self.children[key]
        del self.order[bisect_left(self.order, key)]

    def closest_child(self, tokens: IntArray) -> tuple[Extent, int] | None:
        """The child that shares the most leading tokens with ``tokens`` (at most one block), and how many."""
        key = order_key(tokens[: self.block_tokens])
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
