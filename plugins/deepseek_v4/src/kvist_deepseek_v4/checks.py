"""Whether a layer's inputs fit its geometry and the step: a backend that trusts shapes reads other memory."""

from __future__ import annotations

from kvist.errors import SpecError, StateError
from kvist.step import Step
from kvist_deepseek_v4.geometry import LayerGeometry
from kvist_deepseek_v4.inputs import DeepseekV4Inputs


def check_inputs(layer: LayerGeometry, inputs: DeepseekV4Inputs, step: Step | None) -> Step:
    """The step, once ``inputs`` are known to fit. Raises StateError without a step, SpecError for shapes that cannot
    be, and for parts of the inputs that are missing or that the layer has no streams for."""
    if step is None:
        raise StateError("forward() before begin(): the backend has no step")
    tokens = step.token_count
    heads = inputs.query.shape[1] if inputs.query.ndim == 3 else 0
    wanted: dict[str, tuple[int, ...] | None] = {
        "query": (tokens, heads, layer.head_dim),
        "kv": (tokens, layer.head_dim),
        "sinks": (heads,),
    }
    wide, index_wide = layer.series * layer.head_dim, layer.series * layer.index_dim
    compressed, indexed = layer.ratio > 0, layer.index_dim > 0
    wanted["state"] = (tokens, 2, wide) if compressed else None
    wanted["position_bias"] = (layer.ratio, wide) if compressed else None
    wanted["norm"] = (layer.head_dim,) if compressed else None
    index_heads = inputs.index_query.shape[1] if inputs.index_query is not None and inputs.index_query.ndim == 3 else 0
    wanted["index_query"] = (tokens, index_heads, layer.index_dim) if indexed else None
    wanted["index_weights"] = (tokens, index_heads) if indexed else None
    wanted["index_state"] = (tokens, 2, index_wide) if indexed else None
    wanted["index_position_bias"] = (layer.ratio, index_wide) if indexed else None
    wanted["index_norm"] = (layer.index_dim,) if indexed else None
    for name, shape in wanted.items():
        tensor = getattr(inputs, name)
        given = None if tensor is None else tuple(tensor.shape)
        if given != shape:
            raise SpecError(f"layer {layer.id}: {name} is {_shown(given)}, expected {_shown(shape)}")
    if not heads or (indexed and not index_heads):
        raise SpecError(f"layer {layer.id}: {'queries' if not heads else 'index queries'} have no heads")
    smallest = min(layer.head_dim, layer.index_dim or layer.head_dim)
    pairs = inputs.frequencies.shape if inputs.frequencies is not None else (0,)
    if compressed and (len(pairs) != 1 or not 0 < 2 * pairs[0] <= smallest):
        raise SpecError(
            f"layer {layer.id}: frequencies are {_shown(tuple(pairs))}, expected 1 to {smallest // 2} of them"
        )
    if indexed and inputs.topk < 1:
        raise SpecError(f"layer {layer.id}: topk={inputs.topk} must be at least 1")
    return step


def _shown(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))
