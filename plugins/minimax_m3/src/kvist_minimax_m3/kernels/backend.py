"""MiniMax-M3's attention in Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.geometry import GQALayer, check_inputs, gqa_layers
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec
from kvist.step import Step
from kvist_minimax_m3.batch import Batch
from kvist_minimax_m3.geometry import check_sparse_inputs, dense_part, sparse_layers
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.kernels.score import block_scores
from kvist_minimax_m3.kernels.select import select_blocks
from kvist_minimax_m3.kernels.split import attend_split
from kvist_minimax_m3.kernels.transposed import attend_transposed
from kvist_minimax_m3.rows import LayerRows, store

#: What the tensor cores' tiles allow.
_SIZES = (16, 32, 64, 128, 256)
#: Keys that a program of a dense layer takes at a time.
_DENSE_BLOCK_TOKENS = 64


class TritonBackend(AttentionBackend):
    """Scores, selection and attention over pages in kernels; rows are written by torch, which rounds as documented.

    Rows of one query split their selected blocks over programs; in longer rows each block is loaded once for all
    queries that read it. Serves the published model and its like: one index head per key head, head and index sizes and
    sparse blocks that are powers of two from 16 to 256; rows of float32, bfloat16 or float16. Pages are arranged as the
    reference arranges them.
    """

    name = "minimax-m3-triton"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major. Raises SpecError for sizes that the kernels have no tiles for."""
        sparse = sparse_layers(spec, cls.name)
        for rows in (*_dense_layers(spec, cls.name).values(), *(layer.rows for layer in sparse.values())):
            sizes = {"head size": rows.key_size, "value size": rows.value_size}
            if rows.id in sparse:
                sizes["index size"] = sparse[rows.id].index_size
            for what, size in sizes.items():
                if size not in _SIZES:
                    raise _size_error(cls.name, f"layer {rows.id} has {what} {size}")
            if rows.dtype == "float64":
                raise SpecError(
                    f"backend {cls.name!r}: layer {rows.id} stores rows as float64",
                    hint="use float32, bfloat16 or float16",
                )
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        memory, spec = context.memory, context.spec
        self._layers = sparse_layers(spec, self.name)
        self._dense = _dense_layers(spec, self.name)
        self._rows = {id_: LayerRows.of(memory, layer) for id_, layer in self._layers.items()}
        slots = memory.layout.block_tokens
        self._dense_rows = {
            id_: tuple(
                memory.view(id_, name, (slots, layer.heads, size), getattr(torch, layer.dtype))
                for name, size in (("k", layer.key_size), ("v", layer.value_size))
            )
            for id_, layer in self._dense.items()
        }
        group, _ = memory.layout.part(spec.layers[0].id, "k")
        self._batch = Batch(memory.device, group.index, slots)

    def begin(self, step: Step) -> None:
        """Stage the step's tables. Raises StateError when a block that may be read has no page."""
        self._batch.stage(step)

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write, then attend. ``inputs`` is a :class:`SparseInputs`, or ``GQAInputs`` in a dense layer; the result is a
        new tensor. Raises StateError before the first ``begin``, SpecError for inputs that do not fit.
        """
        if layer_id in self._dense:
            return self._dense_layer(layer_id, inputs)
        assert isinstance(inputs, SparseInputs)
        layer, rows, batch = self._layers[layer_id], self._rows[layer_id], self._batch
        step = check_sparse_inputs(layer, inputs, batch.step, batch.page_tokens)
        heads, selection = inputs.index_query.shape[1], inputs.selection
        if heads != layer.rows.heads:
            raise SpecError(
                f"backend {self.name!r}: layer {layer_id} has {heads} index heads for {layer.rows.heads} key heads",
                hint="use the backend 'minimax-m3-reference'",
            )
        if selection.block_tokens not in _SIZES:
            raise _size_error(self.name, f"sparse blocks have {selection.block_tokens} tokens")
        rows.write(inputs, batch)
        blocks = self.select(layer_id, inputs)
        query = inputs.query
        output = query.new_empty(*query.shape[:2], layer.rows.value_size)
        shared = (rows.key, rows.value, batch, inputs.scale, selection.block_tokens)
        decoded = step.decode_rows
        attend_split(query[:decoded], *shared, blocks[:decoded], output[:decoded])
        attend_transposed(query[decoded:], *shared, blocks[decoded:], decoded, output[decoded:])
        return output

    def select(self, layer_id: int, inputs: SparseInputs) -> torch.Tensor:
        """The blocks that the step's queries read, once its rows are written: int32 ``[T, key heads, topk]``,
        ascending, then -1."""
        scores = block_scores(
            inputs.index_query, self._rows[layer_id].index_key, self._batch, inputs.selection.block_tokens
        )
        return select_blocks(scores, self._batch.positions, inputs.selection)

    def _dense_layer(self, layer_id: int, inputs: Any) -> torch.Tensor:
        assert isinstance(inputs, GQAInputs)
        layer, (key, value), batch = self._dense[layer_id], self._dense_rows[layer_id], self._batch
        check_inputs(layer, inputs, batch.step, batch.step.token_count if batch.step else 0)
        if inputs.window is not None or inputs.sink_logits is not None or inputs.softcap is not None:
            raise SpecError(
                f"backend {self.name!r}: layer {layer_id} asks for a window, sinks or a softcap",
                hint="MiniMax-M3's dense layers have none; use a backend of the family 'gqa'",
            )
        for view, rows in ((key, inputs.key), (value, inputs.value)):
            store(view, batch.write_pages, batch.write_slots, rows)
        output = inputs.query.new_empty(*inputs.query.shape[:2], layer.value_size)
        attend_split(inputs.query, key, value, batch, inputs.scale, _DENSE_BLOCK_TOKENS, None, output)
        return output


def _dense_layers(spec: CacheSpec, backend: str) -> dict[int, GQALayer]:
    dense = dense_part(spec)
    return {layer.id: layer for layer in gqa_layers(dense, backend)} if dense is not None else {}


def _size_error(backend: str, what: str) -> SpecError:
    return SpecError(
        f"backend {backend!r}: {what}; the kernels have tiles of {', '.join(map(str, _SIZES))}",
        hint="use the backend 'minimax-m3-reference'",
    )
