"""Rows that take drafts back by replay: what of a page's history counts is read on the device, and nobody waits for it.

A row of ``n`` tokens is computed as one of ``history + n``: the valid tokens of its history stand right before its own,
and what is before those is passed over. So everything that the host lays out is known without looking into pages.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvist.errors import StateError
from kvist.step import NO_PAGE, Step
from kvist_mamba.kernels.rows import CHUNKED_FROM, PADDING, Rows

#: Channels of one program.
_CHANNELS = 128


class ReplayRows(Rows):
    """As :class:`Rows`, over the joined tokens of histories and step: ``J = T + rows * history`` of them.

    history: tokens that a page's history has room for.
    own: int32 ``[T]``, the joined token that each of the step's is. blame: float32 ``[T, 1]``, NaN in rows whose page
        belongs to another position, 0 in all others.
    """

    own: torch.Tensor
    blame: torch.Tensor

    def __init__(self, device: torch.device, history: int) -> None:
        super().__init__(device)
        self._history = history

    def stage(self, step: Step, group_index: int) -> None:
        """Take over a step, but for what :meth:`turn` finds in pages. Raises StateError for a row without a page."""
        counts = step.query_lengths
        table = step.tables[group_index][step.slots]
        pages = np.where(counts > 0, table[:, 0] if table.size else counts, PADDING)
        missing = np.flatnonzero(pages == NO_PAGE)
        if len(missing):
            raise StateError(f"row {missing[0]} of the step has no page for its state")
        drafts = step.drafts if len(step.drafts) else np.zeros_like(counts)
        starts = step.query_starts + self._history * np.arange(len(counts) + 1)
        # Rows with drafts are as short as their histories, and write their states who knows where.
        is_long = (counts >= CHUNKED_FROM) & (drafts == 0)
        self._put_lengths(starts, is_long, pages, np.zeros(int(starts[-1]), bool))
        self._put_bounds(starts)
        self._starts = self.begins
        self._pages, self._counts = self._put("pages", pages), self._put("counts", counts)
        self._positions, self._drafts = self._put("positions", step.lengths - counts), self._put("drafts", drafts)
        row = np.repeat(np.arange(len(counts)), counts)
        self.own = self._put("own", np.arange(len(row)) + self._history * (row + 1))
        self._own_starts = self._put("own_starts", step.query_starts)
        self._token_rows = self._put("token_rows", np.repeat(np.arange(len(counts)), np.diff(starts)))

    def turn(self, checkpoints: torch.Tensor) -> None:
        """Find out what each row does with its page: :func:`kvist_mamba.reference.turn`, on the device.

        checkpoints: int64 ``[page, 1]``, the positions in any layer of the group, before the step.
        """
        rows, joined = len(self._pages), len(self._token_rows)
        self.begins, self.sources = self._take("begins", (rows,)), self._take("sources", (rows,))
        self.written, self._done = self._take("written", (rows,)), self._take("done", (rows,))
        self.targets = self._take("targets", (joined,))
        self.token_starts, self.token_sources = (
            self._take("token_starts", (joined,)),
            self._take("token_sources", (joined,)),
        )
        self.blame = self._take("blame", (len(self.own), 1), torch.float32)
        if rows:
            _turn[(rows,)](
                checkpoints,
                self._pages,
                self._positions,
                self._counts,
                self._drafts,
                self._starts,
                self._own_starts,
                self.begins,
                self.sources,
                self.written,
                self._done,
                self.targets,
                self.token_starts,
                self.token_sources,
                self.blame,
                checkpoints.stride(0),
                history=self._history,
                block=32,
            )

    def join(self, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """kept ``[page, channels, history]``, new ``[T, channels]``. Returns ``[J, channels]`` in the dtype of ``new``;
        what is passed over is not filled in."""
        joined = new.new_empty(len(self._token_rows), new.shape[1])
        if len(joined):
            _join[(len(joined), triton.cdiv(new.shape[1], _CHANNELS))](
                kept,
                new,
                joined,
                self._token_rows,
                self._starts,
                self._own_starts,
                self.begins,
                self.sources,
                new.shape[1],
                kept.stride(0),
                new.stride(0),
                history=self._history,
                block=min(_CHANNELS, triton.next_power_of_2(new.shape[1])),
            )
        return joined

    def keep(self, kept: torch.Tensor, joined: torch.Tensor) -> None:
        """Write what is behind each row's checkpoint from now on to the histories."""
        if len(self._pages):
            _keep[(len(self._pages), triton.cdiv(joined.shape[1], _CHANNELS))](
                kept,
                joined,
                self.begins,
                self.ends,
                self.sources,
                self._done,
                joined.shape[1],
                kept.stride(0),
                joined.stride(0),
                history=self._history,
                slots=triton.next_power_of_2(self._history),
                block=min(_CHANNELS, triton.next_power_of_2(joined.shape[1])),
            )

    def move(self, checkpoints: torch.Tensor) -> None:
        """Bring the positions of a layer's checkpoints up to date."""
        if len(self._pages):
            _move[(len(self._pages),)](checkpoints, self.sources, self._done, checkpoints.stride(0))

    def values(self, joined: torch.Tensor) -> torch.Tensor:
        """``[T, width]``: the step's own of the joined tokens' values ``[J, width]``."""
        return joined.index_select(0, self.own).add_(self.blame)


@triton.jit
def _turn(
    checkpoints,
    pages,
    positions,
    counts,
    drafts,
    starts,
    own_starts,
    begins,
    sources,
    written,
    dones,
    targets,
    token_starts,
    token_sources,
    blame,
    page_stride,
    history: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    page, count = tl.load(pages + row), tl.load(counts + row)
    checkpoint = tl.load(checkpoints + page.to(tl.int64) * page_stride, mask=page > 0, other=0)
    valid = tl.load(positions + row) - checkpoint
    wrong = (page > 0) & ((valid < 0) | (valid > history))
    source = tl.where(wrong, 0, page)
    valid = tl.where(source > 0, valid, 0).to(tl.int32)
    # Without drafts all stays; with them the checkpoint moves when the history is full, and no further than is sure.
    sure = tl.where(valid + count <= history, 0, valid + tl.maximum(count - history, 0))
    done = tl.where(source > 0, tl.where(tl.load(drafts + row) > 0, sure, valid + count), 0)
    start, own = tl.load(starts + row), tl.load(own_starts + row)
    begin = start + history - valid
    last = tl.where(done > 0, begin + done - 1, start)
    tl.store(begins + row, begin)
    tl.store(sources + row, source)
    tl.store(dones + row, done)
    tl.store(written + row, last)
    for first in range(0, history + count, block):
        nth = first + tl.arange(0, block)
        token, inside = start + nth, nth < history + count
        tl.store(token_starts + token, tl.zeros((block,), tl.int32) + begin, mask=inside)
        tl.store(token_sources + token, tl.where(token >= begin, source, 0), mask=inside)
        tl.store(targets + token, tl.where((token == last) & (done > 0), source, -1), mask=inside)
        spoilt = tl.where(wrong, float("nan"), 0.0) + tl.zeros((block,), tl.float32)
        tl.store(blame + own + nth - history, spoilt, mask=inside & (nth >= history))


@triton.jit
def _join(
    kept,
    new,
    joined,
    token_rows,
    starts,
    own_starts,
    begins,
    sources,
    channels,
    page_stride,
    new_stride,
    history: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    row = tl.load(token_rows + token)
    source, begin = tl.load(sources + row), tl.load(begins + row)
    if (source <= 0) | (token < begin):
        return
    channel = tl.program_id(1) * block + tl.arange(0, block)
    known = channel < channels
    nth = token - tl.load(starts + row)
    if nth < history:
        values = tl.load(
            kept + source.to(tl.int64) * page_stride + channel * history + token - begin, mask=known, other=0.0
        ).to(joined.dtype.element_ty)
    else:
        own = (tl.load(own_starts + row) + nth - history).to(tl.int64)
        values = tl.load(new + own * new_stride + channel, mask=known, other=0.0)
    tl.store(joined + token.to(tl.int64) * channels + channel, values, mask=known)


@triton.jit
def _keep(
    kept,
    joined,
    begins,
    ends,
    sources,
    dones,
    channels,
    page_stride,
    joined_stride,
    history: tl.constexpr,
    slots: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(sources + row)
    if source <= 0:
        return
    first, end = tl.load(begins + row) + tl.load(dones + row), tl.load(ends + row)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    slot = tl.arange(0, slots)
    mask = (channel < channels)[:, None] & (slot < end - first)[None, :]
    values = tl.load(joined + (first + slot).to(tl.int64)[None, :] * joined_stride + channel[:, None], mask=mask)
    own = kept + source.to(tl.int64) * page_stride + channel[:, None] * history + slot[None, :]
    tl.store(own, values.to(kept.dtype.element_ty), mask=mask)


@triton.jit
def _move(checkpoints, sources, dones, page_stride):
    row = tl.program_id(0)
    source = tl.load(sources + row)
    if source > 0:
        place = checkpoints + source.to(tl.int64) * page_stride
        tl.store(place, tl.load(place) + tl.load(dones + row))
