"""Views of a layer's streams, and how rows get into them and out."""

from __future__ import annotations

import attrs
import torch

from kvist.memory.device import DeviceMemory
from kvist_minimax_m3.batch import Batch
from kvist_minimax_m3.dtypes import FP8_MAX
from kvist_minimax_m3.geometry import SparseLayer
from kvist_minimax_m3.inputs import SparseInputs


@attrs.frozen(eq=False)
class LayerRows:
    """One layer's pages, sharing memory with the arena: ``[page, slot, ...]``.

    key, value: ``[..., head, element]``. index_key: ``[..., element]``.
    """

    key: torch.Tensor
    value: torch.Tensor
    index_key: torch.Tensor

    @classmethod
    def of(cls, memory: DeviceMemory, layer: SparseLayer) -> LayerRows:
        """Views of a sparse layer's three streams."""
        slots, rows = memory.layout.block_tokens, layer.rows
        dtype: torch.dtype = getattr(torch, rows.dtype)
        return cls(
            memory.view(layer.id, "k", (slots, rows.heads, rows.key_size), dtype),
            memory.view(layer.id, "v", (slots, rows.heads, rows.value_size), dtype),
            memory.view(layer.id, "index_k", (slots, layer.index_size), getattr(torch, layer.index_dtype)),
        )

    def write(self, inputs: SparseInputs, batch: Batch) -> None:
        """Store the step's own rows. Changes no other byte."""
        for view, rows in ((self.key, inputs.key), (self.value, inputs.value), (self.index_key, inputs.index_key)):
            store(view, batch.write_pages, batch.write_slots, rows)


def store(view: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """``view[pages[t], slots[t]] = rows[t]``, rounded once from the dtype of ``rows`` to the nearest, ties to even.

    8-bit floats saturate at their largest value; what is not a number stays so.
    """
    if view.dtype == torch.float8_e4m3fn:
        rows = rows.float().clamp(-FP8_MAX, FP8_MAX).to(view.dtype)
        # torch has no indexed writes for 8-bit floats.
        view, rows = view.view(torch.uint8), rows.view(torch.uint8)
    view[pages, slots] = rows.to(view.dtype)


def gather(view: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows of ``pages``, one after the other, as float32: ``[count, element]``."""
    if view.dtype == torch.float8_e4m3fn:
        rows = view.view(torch.uint8)[pages].view(view.dtype)
    else:
        rows = view[pages]
    return rows.flatten(0, 1)[:count].float()
