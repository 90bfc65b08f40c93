"""A step's rows on the device, as kernels see them: made once per step, read by every layer. Needs no triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist.errors import StateError
from kvist.step import NO_PAGE, Step
from kvist_mamba.reference.chunks import chunks

#: Page 0 of every group is nobody's: rows that name it are padding, and kernels pass them over.
PADDING = 0
#: Tokens of a chunk: with twice as many, what a program holds does not fit into a GPU's registers.
CHUNK_TOKENS = 16
#: Tokens for each state to write from which on a row is computed in chunks.
CHUNKED_FROM = 16


class Rows:
    """Where the rows of the current step begin, and where they read and write their states.

    All tensors are int32. They are parts of buffers that keep their addresses as long as steps fit into them, so a
    captured graph that reads them sees the next step's rows.

    begins, ends: ``[rows]``, first token of each row, and the one behind its last. sources: ``[rows]``, the page that
        its state is read from, 0 for padding and rows without tokens. every: ``[rows]``, all rows by number.
    targets: ``[T]``, the page for the state after each token, -1 where it is not kept. written: the tokens to look at
        for targets; of padding rows, too, whose targets are -1.
    token_starts, token_sources: ``[T]``, the same of each token's row.
    short: the rows to compute token by token. long ``[n, 3]``: the others, row, first chunk and end of its chunks.
    chunks ``[n, 2]``: first token and number of tokens; a chunk ends with its row, and at every state to write.
    """

    begins: torch.Tensor
    ends: torch.Tensor
    sources: torch.Tensor
    every: torch.Tensor
    targets: torch.Tensor
    written: torch.Tensor
    token_starts: torch.Tensor
    token_sources: torch.Tensor
    short: torch.Tensor
    long: torch.Tensor
    chunks: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, step: Step, group_index: int) -> None:
        """Take over a step. Raises StateError for a row without a page."""
        counts, starts = step.query_lengths, step.query_starts
        table = step.tables[group_index][step.slots]
        sources = np.where(counts > 0, table[:, 0] if table.size else counts, PADDING)
        row = np.repeat(np.arange(step.row_count), counts)
        nth = np.arange(len(row)) - starts[row] + 1
        drafts = step.drafts[row] > 0 if len(step.drafts) else np.zeros(len(row), bool)
        written = drafts | (nth == counts[row])
        pages = table[row, np.where(drafts, nth, 0)] if len(row) else row
        missing = (sources[row] == NO_PAGE) | (written & (pages == NO_PAGE))
        missing &= sources[row] != PADDING
        if missing.any():
            raise StateError(f"row {row[missing.argmax()]} of the step has no page for its state")
        targets = np.where(written & (sources[row] != PADDING), pages, NO_PAGE)
        self.put(starts, sources, targets, written)

    def put(
        self,
        starts: npt.NDArray[Any],
        sources: npt.NDArray[Any],
        targets: npt.NDArray[Any],
        written: npt.NDArray[np.bool_],
    ) -> None:
        """As :meth:`stage`, for rows that write states wherever the caller likes. written: ``[T]``."""
        counts = np.diff(starts)
        row = np.repeat(np.arange(len(counts)), counts)
        states = np.bincount(row[written], minlength=len(counts))
        is_long = counts >= CHUNKED_FROM * np.maximum(states, 1)
        self._put_lengths(starts, is_long, sources, written)
        self._put_bounds(starts)
        self.sources = self._put("sources", sources)
        self.targets, self.written = self._put("targets", targets), self._put("written", np.flatnonzero(written))
        self.token_starts = self._put("token_starts", starts[row])
        self.token_sources = self._put("token_sources", sources[row])

    def _put_bounds(self, starts: npt.NDArray[Any]) -> None:
        """starts: ``[rows + 1]``, of each row's first token."""
        bounds = self._put("starts", starts)
        self.begins, self.ends = bounds[:-1], bounds[1:]
        self.every = self._put("every", np.arange(len(starts) - 1))

    def _put_lengths(
        self,
        starts: npt.NDArray[Any],
        is_long: npt.NDArray[np.bool_],
        sources: npt.NDArray[Any],
        written: npt.NDArray[np.bool_],
    ) -> None:
        """Which rows are short, and the chunks of the others."""
        long, parts = [], []
        for index in np.flatnonzero(is_long & (sources != PADDING)):
            begin, end = starts[index], starts[index + 1]
            after = (np.flatnonzero(written[begin:end]) + 1).tolist()
            own = [(begin + part.start, part.stop - part.start) for part in chunks(end - begin, CHUNK_TOKENS, after)]
            long.append((index, len(parts), len(parts) + len(own)))
            parts += own
        self.short = self._put("short", np.flatnonzero(~is_long))
        self.long = self._put("long", np.array(long).reshape(-1, 3))
        self.chunks = self._put("chunks", np.array(parts).reshape(-1, 2))

    def _put(self, name: str, values: npt.NDArray[Any]) -> torch.Tensor:
        """The values in the buffer of that name."""
        source = torch.from_numpy(np.array(values, np.int32))
        return self._take(name, tuple(source.shape)).copy_(source)

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A part of the buffer of that name, which is replaced when it is too small."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < shape[0]:
            # Half as much again: growing batches must not allocate at every step.
            larger = (shape[0] + shape[0] // 2 + 1, *shape[1:])
            buffer = self._buffers[name] = torch.zeros(larger, dtype=dtype, device=self._device)
        return buffer[: shape[0]]
