"""What the backends need to know of a spec, checked once, and whether a layer's inputs fit it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvist.attention.geometry import GQALayer, check_inputs, gqa_layer
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError
from kvist.spec import CacheSpec, History, Layer
from kvist.step import Step
from kvist_minimax_m3.dtypes import INDEX_DTYPES
from kvist_minimax_m3.inputs import SparseInputs


@attrs.frozen
class SparseLayer:
    """One layer with streams ``"k"``, ``"v"`` and ``"index_k"``.

    rows: its keys and values. index_size: elements of an index key. index_dtype: of the stored index keys.
    """

    rows: GQALayer
    index_size: int
    index_dtype: str

    @property
    def id(self) -> int:
        return self.rows.id


def sparse_layers(spec: CacheSpec, backend: str) -> Mapping[int, SparseLayer]:
    """The layers of ``spec`` that select blocks, by id, after a check of all layers.

    Raises SpecError, naming ``backend``, the layer and the value, for one that MiniMax-M3 does not have.
    """
    found = {}
    for layer in spec.layers:
        for stream in layer.streams:
            if stream.retention != History():
                raise SpecError(
                    f"backend {backend!r}: layer {layer.id} keeps {stream.name!r} for {stream.retention}",
                    hint="any block may be selected later, so rows are kept for History()",
                )
        index = [stream for stream in layer.streams if stream.name == "index_k"]
        rows = gqa_layer(
            Layer(layer.id, [each for each in layer.streams if each not in index] or layer.streams), backend
        )
        if index:
            found[layer.id] = SparseLayer(rows, *_index_row(layer, backend))
    return found


def dense_part(spec: CacheSpec) -> CacheSpec | None:
    """The spec of the layers that do not select, None when all do."""
    layers = [layer for layer in spec.layers if all(stream.name != "index_k" for stream in layer.streams)]
    return attrs.evolve(spec, layers=layers) if layers else None


def _index_row(layer: Layer, backend: str) -> tuple[int, str]:
    [stream] = [stream for stream in layer.streams if stream.name == "index_k"]
    what = f"backend {backend!r}: layer {layer.id} stream 'index_k'"
    if len(stream.row.shape) != 1:
        raise SpecError(f"{what} has rows of shape {stream.row.shape}, expected (index size,)")
    if stream.row.dtype not in INDEX_DTYPES:
        raise SpecError(f"{what} is stored as {stream.row.dtype}", hint=f"use one of {', '.join(INDEX_DTYPES)}")
    if stream.row.scale is not None:
        raise SpecError(f"{what} has scales, rows must be plain")
    if stream.tokens_per_row != 1:
        raise SpecError(f"{what} has {stream.tokens_per_row} tokens per row, expected 1")
    return stream.row.shape[0], stream.row.dtype


def check_sparse_inputs(layer: SparseLayer, inputs: SparseInputs, step: Step | None, page_tokens: int) -> Step:
    """The step, once ``inputs`` are known to fit it and the layer.

    Raises StateError without a step, SpecError for shapes that cannot be and for pages that divide no block.
    """
    rows = layer.rows
    token_count = step.token_count if step else 0
    step = check_inputs(rows, GQAInputs(inputs.query, inputs.key, inputs.value, inputs.scale), step, token_count)
    query, key = tuple(inputs.index_query.shape), tuple(inputs.index_key.shape)
    if key != (token_count, layer.index_size):
        raise SpecError(f"layer {layer.id}: index keys {list(key)}, expected {[token_count, layer.index_size]}")
    heads = query[1] if len(query) == 3 else 0
    if query != (token_count, heads, layer.index_size) or not heads:
        raise SpecError(
            f"layer {layer.id}: index queries {list(query)}, expected [{token_count}, index heads, {layer.index_size}]"
        )
    if heads % rows.heads or inputs.query.shape[1] % heads:
        raise SpecError(
            f"layer {layer.id}: {heads} index heads, expected a multiple of {rows.heads} key heads that divides "
            f"{inputs.query.shape[1]} query heads"
        )
    inputs.selection.require_pages(page_tokens)
    return step
