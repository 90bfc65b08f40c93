"""What the grouped-query backends need to know of a spec, checked once: shapes, dtype and group of each layer."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError, StateError
from kvist.layout import Layout
from kvist.spec import CacheSpec, Layer
from kvist.step import Step

#: Storage dtypes that need no scales.
PLAIN_FLOATS = ("float64", "float32", "float16", "bfloat16")


@attrs.frozen
class GQALayer:
    """One layer with streams ``"k"`` and ``"v"``.

    heads: key heads. key_size, value_size: elements of one head's key and value. dtype: of the stored rows.
    """

    id: int
    heads: int
    key_size: int
    value_size: int
    dtype: str


def gqa_layer(layer: Layer, backend: str, dtypes: Collection[str] = PLAIN_FLOATS) -> GQALayer:
    """Check one layer. Raises SpecError, naming ``backend`` and the value, for one that is not grouped-query."""
    streams = {stream.name: stream for stream in layer.streams}
    where = f"backend {backend!r}: layer {layer.id}"
    if set(streams) != {"k", "v"}:
        raise SpecError(f"{where} has streams {sorted(streams)}, grouped-query attention needs exactly ['k', 'v']")
    for stream in layer.streams:
        what = f"{where} stream {stream.name!r}"
        if len(stream.row.shape) != 2:
            raise SpecError(f"{what} has rows of shape {stream.row.shape}, expected (heads, head size)")
        if stream.row.dtype not in dtypes:
            raise SpecError(f"{what} is stored as {stream.row.dtype}", hint=f"use one of {', '.join(dtypes)}")
        if stream.row.scale is not None:
            raise SpecError(f"{what} has scales, rows must be plain")
        if stream.tokens_per_row != 1:
            raise SpecError(f"{what} has {stream.tokens_per_row} tokens per row, expected 1")
    key, value = streams["k"], streams["v"]
    if key.row.shape[0] != value.row.shape[0]:
        raise SpecError(f"{where} has {key.row.shape[0]} key heads and {value.row.shape[0]} value heads")
    if key.row.dtype != value.row.dtype:
        raise SpecError(f"{where} stores keys as {key.row.dtype} and values as {value.row.dtype}")
    if key.retention != value.retention:
        raise SpecError(f"{where} keeps keys for {key.retention} and values for {value.retention}")
    return GQALayer(layer.id, key.row.shape[0], key.row.shape[1], value.row.shape[1], key.row.dtype)


def gqa_layers(spec: CacheSpec, backend: str, dtypes: Collection[str] = PLAIN_FLOATS) -> tuple[GQALayer, ...]:
    """Check every layer of ``spec``; see :func:`gqa_layer`."""
    return tuple(gqa_layer(layer, backend, dtypes) for layer in spec.layers)


def group_of(layout: Layout, layer_id: int) -> int:
    """Index of the group, and so of the step's table, that a layer's keys and values are in."""
    group, _ = layout.part(layer_id, "k")
    return group.index


def check_inputs(layer: GQALayer, inputs: GQAInputs, step: Step | None, token_count: int) -> Step:
    """The step, once ``inputs`` are known to fit it and the layer: a kernel that trusts shapes reads other memory.

    token_count: the step's. Raises StateError without a step, SpecError for shapes or a window that cannot be.
    """
    if step is None:
        raise StateError("forward() before begin(): the backend has no step")
    query = inputs.query.shape
    key, value = (token_count, layer.heads, layer.key_size), (token_count, layer.heads, layer.value_size)
    if inputs.key.shape != key or inputs.value.shape != value:
        raise SpecError(
            f"layer {layer.id}: keys {list(inputs.key.shape)} and values {list(inputs.value.shape)}, "
            f"expected {list(key)} and {list(value)}"
        )
    if (
        len(query) != 3
        or query[0] != token_count
        or query[2] != layer.key_size
        or query[1] % layer.heads
        or not query[1]
    ):
        raise SpecError(
            f"layer {layer.id}: queries {list(query)}, "
            f"expected [{token_count}, a multiple of {layer.heads}, {layer.key_size}]"
        )
    if inputs.window is not None and inputs.window < 1:
        raise SpecError(f"layer {layer.id}: window={inputs.window} must be at least 1, or None for all")
    if inputs.sink_logits is not None and inputs.sink_logits.shape != query[1:2]:
        raise SpecError(f"layer {layer.id}: sink logits {list(inputs.sink_logits.shape)}, expected [{query[1]}]")
    return step
