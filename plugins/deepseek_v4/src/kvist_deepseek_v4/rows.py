"""One stream of one layer on the device: where a row lies, how rows get there and back."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from kvist.errors import StateError
from kvist.memory.device import DeviceMemory
from kvist.spec import Stream
from kvist.step import NO_PAGE, IntArray


@attrs.frozen(eq=False)
class StreamRows:
    """Row ``i`` of a sequence, which stands for tokens from ``i * tokens_per_row`` on, is in slot ``i % slots`` of the
    page of that token. Shares memory with the arena.

    view: ``[page, slot, ...]``. group: index of the stream's table in a step. block_rows: rows of a whole block; a ring
    has fewer slots.
    """

    layer_id: int
    name: str
    view: torch.Tensor
    group: int
    block_rows: int

    @classmethod
    def of(cls, memory: DeviceMemory, layer_id: int, stream: Stream) -> StreamRows:
        """The stream's rows in ``memory``."""
        group, part = memory.layout.part(layer_id, stream.name)
        view = memory.view(layer_id, stream.name, (part.row_count, *stream.row.shape), getattr(torch, stream.row.dtype))
        block_rows = memory.layout.block_tokens // stream.tokens_per_row
        return cls(layer_id, stream.name, view, group.index, block_rows)

    @property
    def slots(self) -> int:
        """Rows of a page."""
        return self.view.shape[1]

    def read(self, table: IntArray, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin .. end - 1`` as they are stored, ``[end - begin, ...]``, a copy.

        table: int32 ``[block]``, the sequence's. Raises StateError where a row has no page.
        """
        rows = np.arange(begin, end)
        pages = table[rows // self.block_rows].astype(np.int64)
        if len(pages) and pages.min() == NO_PAGE:
            block = int(rows[pages == NO_PAGE][0]) // self.block_rows
            raise StateError(f"layer {self.layer_id}: {self.name!r} of block {block} is read and has no page")
        return self.view[self._index(pages), self._index(rows % self.slots)]

    def write(self, table: IntArray, begin: int, rows: torch.Tensor) -> None:
        """Store rows ``begin ..``, rounded once. What has no page is left out, and what a later one of these rows
        would overwrite in a ring."""
        end = begin + len(rows)
        numbers = np.arange(begin, end)
        block_end = np.minimum((numbers // self.block_rows + 1) * self.block_rows, end)
        kept = numbers + self.slots >= block_end
        pages = table[numbers // self.block_rows].astype(np.int64)
        kept &= pages != NO_PAGE
        if not kept.all():
            numbers, pages, rows = numbers[kept], pages[kept], rows[self._index(np.flatnonzero(kept))]
        self.view[self._index(pages), self._index(numbers % self.slots)] = rows.to(self.view.dtype)

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` as they will be read back."""
        return rows.to(self.view.dtype)

    def _index(self, numbers: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.from_numpy(numbers).to(self.view.device)
