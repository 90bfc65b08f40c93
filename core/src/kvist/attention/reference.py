"""Grouped-query attention over pages in the clearest form: the oracle of every faster backend."""

from __future__ import annotations

from typing import Any

import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.geometry import GQALayer, check_inputs, gqa_layer, gqa_layers, group_of
from kvist.attention.gqa import GQAInputs
from kvist.errors import StateError
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec
from kvist.step import NO_PAGE, Step


class ReferenceBackend(AttentionBackend):
    """Plain torch, one row of the step after the other, dense masked softmax in float32 (float64 for float64 inputs).

    Serves MHA, GQA and MQA with any block size, head sizes, window, sink tokens, sink logits and softcap, on any torch
    device. Rows are stored as ``[page, slot, head, element]`` in the spec's dtype and rounded to it before they
    take part in attention, so a result does not depend on how a prompt was cut into steps. A step's own rows are read
    from the inputs; they are not written where the table names no page.
    """

    name = "torch-reference"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major, for any grouped-query spec of plain floats."""
        gqa_layers(spec, cls.name)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        self._memory = context.memory
        self._layers = {layer.id: layer for layer in context.spec.layers}
        self._step: Step | None = None

    def begin(self, step: Step) -> None:
        """Keep the step; there is nothing to prepare."""
        self._step = step

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write, then attend. ``inputs`` is a :class:`GQAInputs`; the result is a new tensor.

        Raises StateError before the first ``begin``, and when a row that a query reads has no page.
        """
        assert isinstance(inputs, GQAInputs)
        layer = gqa_layer(self._layers[layer_id], self.name)
        step = check_inputs(layer, inputs, self._step, self._step.token_count if self._step else 0)
        table = step.tables[group_of(self._memory.layout, layer_id)]
        output = inputs.query.new_empty(*inputs.query.shape[:2], layer.value_size)
        starts = step.query_starts
        for row in range(step.row_count):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            pages = torch.tensor(table[step.slots[row]], dtype=torch.int64, device=self._memory.device)
            length = int(step.lengths[row])
            output[tokens] = self._row(layer, inputs, tokens, pages, length)
        return output

    def _row(self, layer: GQALayer, inputs: GQAInputs, tokens: slice, pages: torch.Tensor, length: int) -> torch.Tensor:
        """One sequence. ``pages``: int64 ``[block ordinal]``. Returns ``[queries, query heads, value size]``."""
        block_tokens = self._memory.layout.block_tokens
        query = inputs.query[tokens]
        first = length - len(query)  # position of the first query, and rows in the cache before this step
        positions = torch.arange(length, device=self._memory.device)
        queries = positions[first:]
        visible = visibility(queries, positions, inputs)
        # Rows that no query reads may have no page, or hold anything.
        read = positions[:first][visible.any(0)[:first]]
        blocks = read // block_tokens
        if bool((pages[blocks] == NO_PAGE).any()):
            missing = int(blocks[pages[blocks] == NO_PAGE][0])
            raise StateError(
                f"layer {layer.id}: a query at position {first} or later reads block {missing}, which has no page"
            )
        columns = torch.cat([read, queries])
        rows = []
        for stream, size, new in (
            ("k", layer.key_size, inputs.key[tokens]),
            ("v", layer.value_size, inputs.value[tokens]),
        ):
            dtype: torch.dtype = getattr(torch, layer.dtype)
            view = self._memory.view(layer.id, stream, (block_tokens, layer.heads, size), dtype)
            own = new.to(dtype)
            cached = view[pages[blocks], read % block_tokens]
            kept = pages[queries // block_tokens] != NO_PAGE
            view[pages[queries // block_tokens][kept], (queries % block_tokens)[kept]] = own[kept]
            rows.append(torch.cat([cached, own]))
        return dense_attention(query, rows[0], rows[1], visible[:, columns], inputs)


def visibility(queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
    """Which key positions each query position reads: bool ``[queries, keys]``."""
    query, key = queries[:, None], keys[None, :]
    visible = key <= query
    if inputs.window is not None:
        visible &= (key > query - inputs.window) | (key < inputs.sink_tokens)
    return visible


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, inputs: GQAInputs
) -> torch.Tensor:
    """Masked softmax attention of one sequence, computed in float32 (float64 for float64 queries).

    query ``[Q, query heads, E]``, key ``[K, heads, E]``, value ``[K, heads, V]``, visible bool ``[Q, K]``.
    Every key and value must be finite, read or not. Returns ``[Q, query heads, V]`` in the query's dtype.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.shape[1] // key.shape[1]
    key = key.to(dtype).repeat_interleave(group_size, dim=1)
    value = value.to(dtype).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhe,khe->hqk", query.to(dtype), key) * inputs.scale
    if inputs.softcap is not None:
        # arXiv 2408.00118, section 2: before the mask.
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if inputs.sink_logits is not None:
        # GPT-OSS: one more column, neither scaled nor capped, whose share of the softmax goes nowhere.
        column = inputs.sink_logits.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,khv->qhv", weights, value).to(query.dtype)
