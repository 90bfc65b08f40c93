"""A step's tables on the device: made once per step, read by every layer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist.errors import StateError
from kvist.step import NO_PAGE, Step


class Batch:
    """Where the tokens of the current step stand, as tensors at addresses that stay.

    Buffers grow when a step is larger than all before it, and are otherwise written in place, so a captured graph that
    reads them sees the next step's tables.

    pages: int32 ``[rows, blocks]``, the page of every block of every row; 0 behind a row's end.
    rows: int64 ``[T]``, the row of each token. positions: int64 ``[T]``, of each token in its sequence.
    write_pages, write_slots: int64 ``[T]``, where each token's own rows go.
    starts: first token of each row, and the end. lengths: tokens of each row in the cache, this step's included.
    """

    pages: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    write_pages: torch.Tensor
    write_slots: torch.Tensor
    starts: list[int]
    lengths: list[int]

    def __init__(self, device: torch.device, group_index: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._device = device
        self._group_index = group_index
        self._buffers: dict[str, torch.Tensor] = {}
        self._tiles: dict[int, torch.Tensor] = {}
        self.step: Step | None = None

    def stage(self, step: Step) -> None:
        """Take over a step. Raises StateError when a block below a row's length has no page."""
        block = np.arange(-(-int(step.lengths.max(initial=0)) // self.page_tokens))
        pages = step.tables[self._group_index][step.slots, : len(block)]
        used = block < -(-step.lengths[:, None] // self.page_tokens)
        missing = used & (pages == NO_PAGE)
        if missing.any():
            row, ordinal = np.argwhere(missing)[0]
            raise StateError(f"step {step.id}: row {row} has no page for block {ordinal} of {int(used[row].sum())}")
        positions = step.positions
        rows = np.repeat(np.arange(step.row_count), step.query_lengths)
        self.pages = self._put("pages", np.where(used, pages, 0).astype(np.int32))
        self.rows = self._put("rows", rows)
        self.positions = self._put("positions", positions)
        self.write_pages = self._put("write_pages", pages[rows, positions // self.page_tokens].astype(np.int64))
        self.write_slots = self._put("write_slots", positions % self.page_tokens)
        self.starts, self.lengths = step.query_starts.tolist(), step.lengths.tolist()
        self._tiles = {}
        self.step = step

    def tiles(self, queries: int) -> torch.Tensor:
        """The step's tokens in tiles of at most ``queries`` tokens of one row: int32 ``[tiles, 3]``, row, first token
        and number of tokens. Made when a step is first asked for them."""
        if queries not in self._tiles:
            found = [
                (row, at, min(queries, end - at))
                for row, (begin, end) in enumerate(pairwise(self.starts))
                for at in range(begin, end, queries)
            ]
            self._tiles[queries] = self._put(f"tiles of {queries}", np.array(found, np.int32).reshape(-1, 3))
        return self._tiles[queries]

    def _put(self, name: str, values: npt.NDArray[Any]) -> torch.Tensor:
        """The values in the buffer of that name, which keeps its address and strides while they fit."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        buffer = self._buffers.get(name)
        if buffer is None or any(have < need for have, need in zip(buffer.shape, source.shape)):
            old = buffer.shape if buffer is not None else source.shape
            # Half as much again: growing sequences must not allocate at every step.
            shape = [have if have >= need else need + need // 2 for have, need in zip(old, source.shape)]
            buffer = torch.zeros(shape if buffer is not None else source.shape, dtype=source.dtype, device=self._device)
            self._buffers[name] = buffer
        target = buffer[tuple(slice(size) for size in source.shape)]
        target.copy_(source)
        return target
