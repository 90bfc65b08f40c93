"""One stream of one layer on the device: where a row lies, how rows get there and back."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvist.errors import StateError
from kvist.memory.device import DeviceMemory
from kvist.spec import Stream
from kvist.step import NO_PAGE, IntArray
from kvist_deepseek_v4.codecs import Codec, Stored, codec_of
from kvist_deepseek_v4.formats import EncodedRow


@attrs.frozen(eq=False)
class StreamRows:
    """Row ``i`` of a sequence, which stands for tokens from ``i * tokens_per_row`` on, is in slot ``i % slots`` of the
    page of that token. Shares memory with the arena.

    views: ``[page, slot, ...]`` of what the codec stores: of plain rows the elements, of encoded ones the bytes of data
    and the bytes of scales. group: index of the stream's table in a step. block_rows: rows of a whole block; a ring
    has fewer slots.
    """

    layer_id: int
    name: str
    views: Stored
    codec: Codec
    group: int
    block_rows: int

    @classmethod
    def of(cls, memory: DeviceMemory, layer_id: int, stream: Stream, domain: str | None = None) -> StreamRows:
        """The stream's rows in ``memory``; ``domain`` as in :meth:`~kvist.layout.Layout.part`."""
        group, part = memory.layout.part(layer_id, stream.name, domain)
        block_rows = memory.layout.block_tokens // stream.tokens_per_row
        count, row = part.row_count, stream.row
        views: Stored
        if isinstance(row, EncodedRow):
            page = memory.view(layer_id, stream.name, (part.byte_count,), torch.uint8, domain)
            data, scales = page[:, : count * row.row_bytes].split(
                (count * row.data_bytes, count * row.scale_bytes), dim=1
            )
            views = data.unflatten(1, (count, -1)), scales.unflatten(1, (count, -1))
        else:
            views = (memory.view(layer_id, stream.name, (count, *row.shape), getattr(torch, row.dtype), domain),)
        return cls(layer_id, stream.name, views, codec_of(row), group.index, block_rows)

    @property
    def slots(self) -> int:
        """Rows of a page."""
        return self.views[0].shape[1]

    def read(self, table: IntArray, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin .. end - 1``, ``[end - begin, ...]``, a copy: as :meth:`~.codecs.Codec.decode` gives them.

        table: int32 ``[block]``, the sequence's. Raises StateError where a row has no page.
        """
        return self.codec.decode(self.load(table, begin, end))

    def write(self, table: IntArray, begin: int, rows: torch.Tensor) -> None:
        """Store rows ``begin ..``, rounded once. What has no page is left out, and what a later one of these rows
        would overwrite in a ring."""
        self.store(table, begin, self.codec.encode(rows))

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` as they will be read back."""
        return self.codec.decode(self.codec.encode(rows))

    def load(self, table: IntArray, begin: int, end: int) -> Stored:
        """As :meth:`read`, what is stored of the rows."""
        rows = np.arange(begin, end)
        pages = table[rows // self.block_rows].astype(np.int64)
        if len(pages) and pages.min() == NO_PAGE:
            block = int(rows[pages == NO_PAGE][0]) // self.block_rows
            raise StateError(f"layer {self.layer_id}: {self.name!r} of block {block} is read and has no page")
        places = self._index(pages), self._index(rows % self.slots)
        return tuple(view[places] for view in self.views)

    def store(self, table: IntArray, begin: int, stored: Stored) -> None:
        """As :meth:`write`, for what is stored of the rows."""
        end = begin + len(stored[0])
        numbers = np.arange(begin, end)
        block_end = np.minimum((numbers // self.block_rows + 1) * self.block_rows, end)
        kept = numbers + self.slots >= block_end
        pages = table[numbers // self.block_rows].astype(np.int64)
        kept &= pages != NO_PAGE
        if not kept.all():
            numbers, pages, chosen = numbers[kept], pages[kept], self._index(np.flatnonzero(kept))
            stored = tuple(part[chosen] for part in stored)
        places = self._index(pages), self._index(numbers % self.slots)
        for view, part in zip(self.views, stored, strict=True):
            view[places] = part

    def _index(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.views[0].device)
