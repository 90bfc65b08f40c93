"""Grouped-query attention for a CPU without a C compiler: gather each row's pages into scratch, then torch SDPA."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.geometry import GQALayer, check_inputs, gqa_layer, gqa_layers, group_of
from kvist.attention.gqa import GQAInputs
from kvist.attention.reference import dense_attention
from kvist.errors import StateError
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec
from kvist.step import NO_PAGE, IntArray, Step


@attrs.frozen(eq=False)
class _Row:
    """What one row of a step reads, for one window.

    first_token, query_count: its queries in the flattened batch. pages: int64, the pages to gather, in order.
    begin, end: rows of the gathered pages that take part. hidden: those of them that no query reads (between the sinks
    and the window), or None. visible: bool ``[queries, end - begin]``; None when every query reads every row, or when
    ``causal`` says it all.
    """

    first_token: int
    query_count: int
    pages: torch.Tensor
    begin: int
    end: int
    hidden: torch.Tensor | None
    visible: torch.Tensor | None
    causal: bool


@attrs.frozen(eq=False)
class _Views:
    layer: GQALayer
    group_index: int
    key: torch.Tensor
    value: torch.Tensor


class TorchCpuBackend(AttentionBackend):
    """Per-sequence gather into preallocated scratch and ``scaled_dot_product_attention``.

    Rows are stored as ``[page, slot, head, element]``, as by the reference. Sink logits and softcap take the
    reference's dense path. Owns its scratch, which grows to the longest sequence and is never given back.
    """

    name = "cpu-torch"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major, for any grouped-query spec of plain floats."""
        gqa_layers(spec, cls.name)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        memory = context.memory
        self._block_tokens = memory.layout.block_tokens
        self._views: dict[int, _Views] = {}
        for spec_layer in context.spec.layers:
            layer = gqa_layer(spec_layer, self.name)
            dtype: torch.dtype = getattr(torch, layer.dtype)
            key, value = (
                memory.view(layer.id, stream, (self._block_tokens, layer.heads, size), dtype)
                for stream, size in (("k", layer.key_size), ("v", layer.value_size))
            )
            self._views[layer.id] = _Views(layer, group_of(memory.layout, layer.id), key, value)
        # Never allocate the gather buffer per call: fresh pages of memory cost more than the attention itself.
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._step: Step | None = None
        self._token_count = 0
        self._rows: dict[tuple[int, int | None, int], list[_Row]] = {}
        self._writes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, step: Step) -> None:
        """Find where every new row goes. Raises StateError when a new row has no page."""
        self._step = step
        self._rows = {}
        positions = step.positions
        self._token_count = len(positions)
        rows = np.repeat(step.slots, step.query_lengths)
        slots = torch.from_numpy(positions % self._block_tokens)
        for group_index in {views.group_index for views in self._views.values()}:
            pages = step.tables[group_index][rows, positions // self._block_tokens].astype(np.int64)
            if pages.min(initial=0) == NO_PAGE:
                raise StateError(f"step {step.id}: the table of group {group_index} has no page for a new row")
            self._writes[group_index] = (torch.from_numpy(pages), slots)

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write all new rows, then attend row by row. ``inputs`` is a :class:`GQAInputs`. Returns a new tensor."""
        assert isinstance(inputs, GQAInputs)
        views = self._views[layer_id]
        check_inputs(views.layer, inputs, self._step, self._token_count)
        where = self._writes[views.group_index]
        views.key[where] = inputs.key.to(views.key.dtype)
        views.value[where] = inputs.value.to(views.value.dtype)
        rows_of = (views.group_index, inputs.window, inputs.sink_tokens)
        if rows_of not in self._rows:
            self._rows[rows_of] = self._plan(*rows_of)
        output = inputs.query.new_empty(*inputs.query.shape[:2], views.layer.value_size)
        for row in self._rows[rows_of]:
            tokens = slice(row.first_token, row.first_token + row.query_count)
            key = self._gather("k", views.key, row, inputs.query.dtype)
            value = self._gather("v", views.value, row, inputs.query.dtype)
            output[tokens] = self._attend(inputs.query[tokens], key, value, row, inputs)
        return output

    @staticmethod
    def _attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: _Row, inputs: GQAInputs
    ) -> torch.Tensor:
        """One row. key, value: ``[rows, heads, size]`` in the query's dtype. Returns ``[queries, heads, size]``."""
        if inputs.sink_logits is not None or inputs.softcap is not None:
            visible = row.visible
            if visible is None:
                visible = torch.ones(len(query), len(key), dtype=torch.bool)
                visible = visible.tril() if row.causal else visible
            return dense_attention(query, key, value, visible, inputs)
        if len(query) == 1:
            # The query heads of a group as queries of one head: SDPA then reads its keys and values once.
            attended = F.scaled_dot_product_attention(
                query.reshape(1, key.shape[1], -1, query.shape[2]),
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=row.visible,
                scale=inputs.scale,
            )
            return attended.reshape(1, query.shape[1], -1)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=row.visible,
            is_causal=row.causal,
            scale=inputs.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[0].transpose(0, 1)

    def _gather(self, name: str, view: torch.Tensor, row: _Row, dtype: torch.dtype) -> torch.Tensor:
        """The row's pages of one stream as ``[end - begin, heads, size]`` of ``dtype``, in scratch."""
        pages = self._buffer(name, view.dtype, (len(row.pages), *view.shape[1:]))
        torch.index_select(view, 0, row.pages, out=pages)
        rows = pages.view(-1, *view.shape[2:])[row.begin : row.end]
        if row.hidden is not None:
            rows.index_fill_(0, row.hidden, 0.0)
        if view.dtype != dtype:
            rows = self._buffer(name + " cast", dtype, tuple(rows.shape)).copy_(rows)
        return rows

    def _buffer(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = int(np.prod(shape))
        flat = self._scratch.get((name, dtype))
        if flat is None or flat.numel() < count:
            # Half as much again: growing sequences must not allocate at every step.
            flat = self._scratch[name, dtype] = torch.empty(count + count // 2, dtype=dtype)
        return flat[:count].view(shape)

    def _plan(self, group_index: int, window: int | None, sink_tokens: int) -> list[_Row]:
        assert self._step is not None
        step, starts = self._step, self._step.query_starts
        tables, lengths, counts = (
            step.tables[group_index][step.slots],
            step.lengths.tolist(),
            step.query_lengths.tolist(),
        )
        return [
            self._plan_row(table, start, count, length, window, sink_tokens)
            for table, start, count, length in zip(tables, starts.tolist(), counts, lengths)
        ]

    def _plan_row(
        self, table: IntArray, first_token: int, query_count: int, length: int, window: int | None, sink_tokens: int
    ) -> _Row:
        block_tokens = self._block_tokens
        first = length - query_count
        begin = 0 if window is None else max(0, first - window + 1)
        sinks = min(sink_tokens, begin)
        blocks: npt.NDArray[np.int64] = np.arange(begin // block_tokens, -(-length // block_tokens))
        sink_blocks = np.arange(min(-(-sinks // block_tokens), begin // block_tokens))
        blocks = np.concatenate([sink_blocks, blocks])
        pages = table[blocks].astype(np.int64)
        if pages.min(initial=0) == NO_PAGE:
            missing = int(blocks[pages == NO_PAGE][0])
            raise StateError(f"a query at position {first} or later reads block {missing}, which has no page")
        skipped = 0 if sinks else int(begin % block_tokens)
        positions = (blocks[:, None] * block_tokens + np.arange(block_tokens)).ravel()[skipped:]
        positions = positions[positions < length]
        queries = np.arange(first, length)[:, None]
        causal = first == 0 and query_count > 1 and (window is None or window >= length)
        visible = hidden = None
        if not causal:
            reads = positions <= queries
            if window is not None:
                reads &= (positions > queries - window) | (positions < sink_tokens)
            if not reads.all():
                visible = torch.from_numpy(reads)
                unread = np.flatnonzero(~reads.any(0))
                hidden = torch.from_numpy(unread) if len(unread) else None
        return _Row(
            first_token,
            query_count,
            torch.from_numpy(pages),
            skipped,
            skipped + len(positions),
            hidden,
            visible,
            causal,
        )
