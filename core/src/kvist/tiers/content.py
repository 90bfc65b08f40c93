"""Which blocks of a token run the disk has, by content key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist.errors import TierError
from kvist.keys import block_keys, format_digest, scope_seed
from kvist.layout import Layout
from kvist.memory.disk import DiskStore
from kvist.prefix.extent import Extent
from kvist.prefix.named import keys_of
from kvist.spec import Scope
from kvist.step import IntArray

#: Keys computed at a time where nothing says how many blocks the disk has.
_CHUNK_BLOCKS = 64


class Content:
    """Keys of what the disk has. Extents remember theirs, so that a block is hashed once while it is in memory."""

    def __init__(self, layout: Layout, disk: DiskStore) -> None:
        """Raises SpecError for a model without a fingerprint, TierError for a disk of another format."""
        self.disk = disk
        self._digest = format_digest(layout)
        if disk.format_digest != self._digest:
            raise TierError(
                f"disk tier {disk.folder} was opened for another format than this cache's",
                hint="open it with kvist.keys.format_digest(layout) of the same layout",
            )
        self._block = layout.block_tokens
        dense = [group.index for group in layout.groups if not group.sparse]
        #: What every block has a part of, as bits.
        self._every = sum(1 << group for group in dense)

    def keys(self, path: Sequence[tuple[Extent, int]]) -> list[bytes]:
        """Of all whole blocks matched on ``path``, which begins at the root."""
        found: list[bytes] = []
        for extent, matched in path:
            found += keys_of(extent, self._digest)[: matched // self._block]
        return found

    def look(
        self, scope: Scope, tokens: IntArray, path: Sequence[tuple[Extent, int]], *, within: bool
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Keys and groups as bits of the leading blocks of ``tokens`` as far as the disk may have them.

        path: what a tier in memory has of ``tokens``. within: is of interest what the disk has of that?
        """
        block = self._block
        keys = self.keys(path)
        masks = self.disk.masks(keys) if within else [self._every] * len(keys)
        while len(masks) < len(tokens) // block:
            begin = len(keys)
            run = tokens[begin * block : (begin + _CHUNK_BLOCKS) * block]
            if self._every:
                # Where the disk has no block it has none after it: mostly one key tells.
                first = block_keys(keys[-1] if keys else self._seed(scope), run[:block], block)
                if not self.disk.contains(first[0]):
                    break
            keys += block_keys(keys[-1] if keys else self._seed(scope), run, block)
            masks += self.disk.masks(keys[begin:])
            if self._every and any(mask & self._every != self._every for mask in masks[begin:]):
                break
        found = np.array(masks, np.int64)
        if self._every:
            # Before that another tier has what the disk lacks.
            known = sum(matched // block for _, matched in path)
            gaps = np.flatnonzero(found[known:] & self._every != self._every)
            if len(gaps):
                found = found[: known + int(gaps[0])]
        else:
            there = np.flatnonzero(found)
            found = found[: int(there[-1]) + 1 if len(there) else 0]
        return keys[: len(found)], found

    def _seed(self, scope: Scope) -> bytes:
        return scope_seed(self._digest, scope)
