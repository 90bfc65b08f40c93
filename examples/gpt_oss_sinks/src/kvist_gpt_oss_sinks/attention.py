"""Attention with one learned sink logit per query head, over pages, in plain torch."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from kvist import CacheSpec, History, Layer, SpecError, Step, Window
from kvist.attention.base import AttentionBackend, BackendContext
from kvist.errors import StateError
from kvist.layout import PageLayout, RowMajor

_DTYPES = ("float32", "bfloat16", "float16")


@attrs.frozen(eq=False)
class SinkInputs:
    """One layer's inputs, flattened over the rows of a step.

    query: ``[tokens, query heads, size]``, rotated. key, value: ``[tokens, key heads, size]``, keys rotated.
    sinks: ``[query heads]``, learned.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor


@attrs.frozen(eq=False)
class _Row:
    """tokens: the row's tokens in the batch. positions: where they stand. pages: by group, its page ids by block."""

    tokens: slice
    positions: torch.Tensor
    pages: list[torch.Tensor]


@attrs.frozen(eq=False)
class _Layer:
    """key, value: ``[page, row of the block, head, element]``, views of the memory. window: in tokens, 0 for all."""

    key: torch.Tensor
    value: torch.Tensor
    group: int
    window: int


class SinkBackend(AttentionBackend):
    """Row by row: write the new keys and values, gather what the queries read, one softmax with the sink in it."""

    name = "gpt-oss-sinks-torch"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Rows as the spec describes them. Raises SpecError for layers that are not GPT-OSS's."""
        for layer in spec.layers:
            _check(layer)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        memory = context.memory
        self._device = memory.device
        self._block_tokens = memory.layout.block_tokens
        self._layers = {}
        for layer in context.spec.layers:
            key, _ = layer.streams
            shape, dtype = (self._block_tokens, *key.row.shape), getattr(torch, key.row.dtype)
            views = [memory.view(layer.id, name, shape, dtype) for name in ("k", "v")]
            window = key.retention.tokens if isinstance(key.retention, Window) else 0
            self._layers[layer.id] = _Layer(*views, memory.layout.part(layer.id, "k")[0].index, window)
        self._rows: list[_Row] | None = None

    def begin(self, step: Step) -> None:
        """Positions and page ids of every row, once for all layers."""
        starts, rows = step.query_starts.tolist(), []
        tables = [torch.from_numpy(table[step.slots].astype(np.int64)).to(self._device) for table in step.tables]
        for row, length in enumerate(step.lengths.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            positions = torch.arange(length - (tokens.stop - tokens.start), length, device=self._device)
            rows.append(_Row(tokens, positions, [table[row] for table in tables]))
        self._rows = rows

    def forward(self, layer_id: int, inputs: SinkInputs) -> torch.Tensor:
        """``[tokens, query heads, size]`` in the query's dtype, a new tensor."""
        if self._rows is None:
            raise StateError("forward() before begin()")
        layer = self._layers[layer_id]
        output = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
        for row in self._rows:
            pages, block = row.pages[layer.group], self._block_tokens
            where = (pages[row.positions // block], row.positions % block)
            layer.key[where] = inputs.key[row.tokens].to(layer.key.dtype)
            layer.value[where] = inputs.value[row.tokens].to(layer.value.dtype)
            # From the first position that any query reads: what is before may have no page any more.
            first = max(0, int(row.positions[0]) - layer.window + 1) if layer.window else 0
            read = torch.arange(first, int(row.positions[-1]) + 1, device=self._device)
            where = (pages[read // block], read % block)
            distance = row.positions[:, None] - read[None, :]
            hidden = (distance < 0) | (distance >= layer.window) if layer.window else distance < 0
            output[row.tokens] = _attend(
                inputs.query[row.tokens], layer.key[where], layer.value[where], hidden, inputs.sinks
            ).to(output.dtype)
        return output


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """In float32. query ``[queries, heads, size]``, key and value ``[rows, key heads, size]``, hidden ``[queries,
    rows]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (rows.float().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("qhe,khe->hqk", query.float(), key) * query.shape[2] ** -0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    column = sinks.float()[:, None, None].expand(-1, len(query), 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hqk,khe->qhe", weights, value)


def _check(layer: Layer) -> None:
    """Raise SpecError unless the layer has keys and values as GPT-OSS has them."""
    names = [stream.name for stream in layer.streams]
    if names != ["k", "v"]:
        raise SpecError(f"layer {layer.id} has streams {names}, expected ['k', 'v']")
    key, value = layer.streams
    if key.row != value.row or key.retention != value.retention:
        raise SpecError(f"layer {layer.id}: keys and values differ in their rows or retention")
    if len(key.row.shape) != 2 or key.row.dtype not in _DTYPES or key.row.scale is not None or key.tokens_per_row != 1:
        raise SpecError(f"layer {layer.id} stores {key.row}, expected (heads, size) in one of {', '.join(_DTYPES)}")
    plain = isinstance(key.retention, History) or (
        isinstance(key.retention, Window) and not key.retention.sinks and not key.retention.ring
    )
    if not plain:
        raise SpecError(f"layer {layer.id} keeps {key.retention}, expected a history or a plain window")
