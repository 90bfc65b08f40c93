"""MiniMax-M3's attention in plain torch: the oracle of the kernels, and the backend for a CPU."""

from __future__ import annotations

from typing import Any

import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.reference import ReferenceBackend as DenseBackend
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec
from kvist.step import Step
from kvist_minimax_m3.batch import Batch
from kvist_minimax_m3.blocks import block_scores, select_for_heads
from kvist_minimax_m3.geometry import check_sparse_inputs, dense_part, sparse_layers
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.rows import LayerRows, gather

#: Elements of the keys, and of the values, that are gathered at a time.
_GATHERED = 1 << 23
#: Index keys that are gathered at a time.
_SCORED = 1 << 12


class ReferenceBackend(AttentionBackend):
    """Write, score, select, gather the selected blocks, softmax. Scores of blocks are float32, attention is computed in
    float32, float64 for float64 queries.

    Dense layers (``GQAInputs``) go to the core's reference, over the same pages. Serves any sizes, any number of index
    heads that the key heads divide, every ``group_reduce``, and index keys of 8 bits, on any torch device. Rows are
    stored as ``[page, slot, head, element]`` and rounded before they take part, so a result does not depend on how a
    prompt was cut into steps. A decoded token's work beside the scores does not grow with the context.
    """

    name = "minimax-m3-reference"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major."""
        sparse_layers(spec, cls.name)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        memory, spec = context.memory, context.spec
        self._layers = sparse_layers(spec, self.name)
        self._rows = {id_: LayerRows.of(memory, layer) for id_, layer in self._layers.items()}
        dense = dense_part(spec)
        self._dense = DenseBackend(BackendContext(memory, dense)) if dense is not None else None
        group, _ = memory.layout.part(spec.layers[0].id, "k")
        self._batch = Batch(memory.device, group.index, memory.layout.block_tokens)

    def begin(self, step: Step) -> None:
        """Stage the step's tables. Raises StateError when a block that may be read has no page."""
        self._batch.stage(step)
        if self._dense is not None:
            self._dense.begin(step)

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write, then attend. ``inputs`` is a :class:`SparseInputs`, or ``GQAInputs`` in a dense layer; the result is a
        new tensor. Raises StateError before the first ``begin``, SpecError for inputs that do not fit.
        """
        if layer_id not in self._layers:
            assert self._dense is not None
            return self._dense.forward(layer_id, inputs)
        assert isinstance(inputs, SparseInputs)
        layer, rows, batch = self._layers[layer_id], self._rows[layer_id], self._batch
        check_sparse_inputs(layer, inputs, batch.step, batch.page_tokens)
        rows.write(inputs, batch)
        return attend(inputs, rows, batch, self.select(layer_id, inputs))

    def select(self, layer_id: int, inputs: SparseInputs) -> torch.Tensor:
        """The blocks that the step's queries read, once its rows are written: int32 ``[T, S, width]``, see
        :func:`~kvist_minimax_m3.blocks.select_for_heads`."""
        batch, selection = self._batch, inputs.selection
        key_heads = self._layers[layer_id].rows.heads
        parts = []
        for row in range(len(batch.lengths)):
            tokens = slice(batch.starts[row], batch.starts[row + 1])
            scores = self.scores(layer_id, inputs, row)
            parts.append(select_for_heads(scores, batch.positions[tokens], selection, key_heads))
        return torch.cat(parts) if parts else inputs.index_query.new_empty(0, key_heads, 0, dtype=torch.int32)

    def scores(self, layer_id: int, inputs: SparseInputs, row: int) -> torch.Tensor:
        """Scores of all blocks of one row for its queries, see :func:`~kvist_minimax_m3.blocks.block_scores`: the one
        part of a step that reads every index key."""
        batch, length, block_tokens = self._batch, self._batch.lengths[row], inputs.selection.block_tokens
        tokens = slice(batch.starts[row], batch.starts[row + 1])
        query, positions = inputs.index_query[tokens], batch.positions[tokens]
        # What is gathered stays in the processor's cache until it is multiplied.
        part = max(1, _SCORED // block_tokens) * block_tokens
        scores = []
        for first in range(0, length, part):
            count = min(part, length - first)
            pages = batch.pages[row, first // batch.page_tokens : -(-(first + count) // batch.page_tokens)]
            index_key = gather(self._rows[layer_id].index_key, pages, count)
            scores.append(block_scores(query, index_key, positions - first, block_tokens))
        return torch.cat(scores, dim=-1)


def attend(inputs: SparseInputs, rows: LayerRows, batch: Batch, blocks: torch.Tensor) -> torch.Tensor:
    """Attention of every token over its blocks. blocks: int32 ``[T, S, width]``, -1 for none.

    Returns ``[T, query heads, value size]`` in the query's dtype.
    """
    query = inputs.query
    output = query.new_empty(*query.shape[:2], rows.value.shape[-1])
    width = int((blocks >= 0).sum(-1).max()) if blocks.numel() else 0
    blocks = blocks[..., :width].long()
    per_token = blocks.shape[1] * width * inputs.selection.block_tokens * query.shape[2]
    part = max(1, _GATHERED // max(per_token, 1))
    for first in range(0, len(query), part):
        tokens = slice(first, first + part)
        output[tokens] = _attend(inputs, rows, batch, tokens, blocks[tokens])
    return output


def _attend(inputs: SparseInputs, rows: LayerRows, batch: Batch, tokens: slice, blocks: torch.Tensor) -> torch.Tensor:
    query, slices = inputs.query[tokens], blocks.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    pages_per_block = inputs.selection.block_tokens // batch.page_tokens
    device = query.device
    ordinals = blocks[..., None] * pages_per_block + torch.arange(pages_per_block, device=device)
    ordinals = ordinals.flatten(-2)
    key_positions = ordinals[..., None] * batch.page_tokens + torch.arange(batch.page_tokens, device=device)
    visible = (ordinals[..., None] >= 0) & (key_positions <= batch.positions[tokens, None, None, None])
    visible = visible.flatten(-2)
    # What no query reads is gathered from anywhere, and hidden below.
    there = ordinals.clamp(0, batch.pages.shape[1] - 1)
    pages = batch.pages[batch.rows[tokens, None, None], there].long()
    head = (torch.arange(slices, device=device) // (slices // rows.key.shape[2]))[None, :, None]
    key = rows.key[pages, :, head].flatten(2, 3).to(dtype)
    value = rows.value[pages, :, head].flatten(2, 3).to(dtype)
    scores = query.unflatten(1, (slices, -1)).to(dtype) @ key.transpose(-1, -2) * inputs.scale
    weights = torch.softmax(scores.masked_fill(~visible[:, :, None], float("-inf")), dim=-1)
    # Unread rows may hold anything, and 0 times NaN is NaN. The gathered rows are a copy.
    attended = weights @ value.masked_fill_(~visible[..., None], 0.0)
    return attended.flatten(1, 2).to(query.dtype)
