"""A step's rows on the device, as kernels see them: made once per step, read by every layer. Needs no triton."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvist.errors import StateError
from kvist.layout import Group, Layout
from kvist.spec import ceil_div
from kvist.step import NO_PAGE, Step


@attrs.frozen(eq=False)
class Tiles:
    """Tokens of the step, some of one row at a time. on_device: int32 ``[n, 3]``, row, first token and number of
    tokens; on_host: the same."""

    on_device: torch.Tensor
    on_host: npt.NDArray[np.int32]


class Batch:
    """Where the tokens of the current step stand. All tensors are int32.

    token_rows, positions: ``[T]``, the row of each token, and its position in its sequence.
    firsts, begins, ends: ``[rows]``, the first token of each row, its position, and the row's length after the step.
    longest: the largest of these lengths.
    """

    token_rows: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    longest: int

    def __init__(self, device: torch.device, layout: Layout, groups: set[int]) -> None:
        self.block_tokens = layout.block_tokens
        self._device = device
        self._groups: list[Group] = [layout.groups[index] for index in sorted(groups)]
        self._tables: dict[int, torch.Tensor] = {}
        self._closed: dict[int, torch.Tensor] = {}
        self._tiles: dict[int, Tiles] = {}
        self.step: Step | None = None

    def stage(self, step: Step) -> None:
        """Take over a step. Raises StateError when a block that may be read has no page."""
        begins = step.lengths - step.query_lengths
        self._tables = {group.index: self._put(self._table(group, step, begins)) for group in self._groups}
        self.token_rows = self._put(np.repeat(np.arange(step.row_count), step.query_lengths))
        self.positions = self._put(step.positions)
        self.firsts, self.begins = self._put(step.query_starts[:-1]), self._put(begins)
        self.ends = self._put(step.lengths)
        self.longest = int(step.lengths.max(initial=0))
        self._closed, self._tiles = {}, {}
        self.step = step

    def table(self, group: int) -> torch.Tensor:
        """``[rows, blocks]``, the page of every block of every row, -1 where there is none."""
        return self._tables[group]

    def closed(self, ratio: int) -> torch.Tensor:
        """``[n, 2]``, row and number of each window of ``ratio`` tokens whose last token is in the step."""
        if ratio not in self._closed:
            assert self.step is not None
            ends = self.step.lengths // ratio
            firsts = (self.step.lengths - self.step.query_lengths) // ratio
            counts = ends - firsts
            rows = np.repeat(np.arange(len(counts)), counts)
            windows = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[rows]
            self._closed[ratio] = self._put(np.stack((rows, windows), axis=1))
        return self._closed[ratio]

    def tiles(self, queries: int) -> Tiles:
        """The step's tokens, at most so many at a time."""
        if queries not in self._tiles:
            assert self.step is not None
            found = [
                (row, at, min(queries, end - at))
                for row, (begin, end) in enumerate(pairwise(self.step.query_starts.tolist()))
                for at in range(begin, end, queries)
            ]
            on_host = np.array(found, np.int32).reshape(-1, 3)
            self._tiles[queries] = Tiles(self._put(on_host), on_host)
        return self._tiles[queries]

    def _table(self, group: Group, step: Step, begins: npt.NDArray[Any]) -> npt.NDArray[Any]:
        block = np.arange(ceil_div(int(step.lengths.max(initial=0)), self.block_tokens))
        used = block < -(-step.lengths[:, None] // self.block_tokens)
        pages = np.where(used, step.tables[group.index][step.slots, : len(block)], NO_PAGE)
        # What a window drops is not read again; history is, what the step itself writes included.
        tokens = getattr(group.retention, "tokens", None)
        if tokens is None:
            read = used
        else:
            read = block >= np.maximum(0, begins[:, None] + 1 - tokens) // self.block_tokens
            read &= block < -(-begins[:, None] // self.block_tokens)
        missing = read & (pages == NO_PAGE)
        if missing.any():
            row, ordinal = np.argwhere(missing)[0]
            raise StateError(f"step {step.id}: block {ordinal} of row {row} is read and has no page in {group.name}")
        return pages

    def _put(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(self._device)
