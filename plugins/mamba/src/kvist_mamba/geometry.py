"""What backends of recurrent layers need to know of a spec, checked once: shapes, dtypes and group of each layer."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NoReturn

import attrs

from kvist.errors import SpecError, StateError
from kvist.spec import CacheSpec, Layer, Stream
from kvist.step import Step
from kvist_mamba.inputs import (
    CHECKPOINT,
    CONV_HISTORY,
    CONV_STATE,
    GATE_HISTORY,
    RECURRENT_STATE,
    DeltaNetInputs,
    Mamba1Inputs,
    Mamba2Inputs,
    RecurrentInputs,
    ShortConvInputs,
)

#: Storage dtypes that need no scales.
PLAIN_FLOATS = ("float64", "float32", "float16", "bfloat16")


@attrs.frozen
class RecurrentLayer:
    """One layer with stream ``"conv_state"`` and perhaps ``"recurrent_state"``.

    channels, columns: shape of the convolution's state; ``columns + 1`` is the convolution's width.
    state: shape of the recurrent state, ``None`` without one.
    conv_dtype, state_dtype: of the stored states.
    history: tokens whose inputs are kept for replay, 0 where drafts have pages of their own. gates, gate_dtype: numbers
        per token in stream ``"gate_history"``, 0 without it, and what they are stored in.
    """

    id: int
    channels: int
    columns: int
    state: tuple[int, ...] | None
    conv_dtype: str
    state_dtype: str
    history: int = 0
    gates: int = 0
    gate_dtype: str = ""

    def stored(self, stream_name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the state in a stream that the layer has."""
        if stream_name == CONV_STATE:
            return (self.channels, self.columns), self.conv_dtype
        if stream_name == CONV_HISTORY:
            return (self.channels, self.history), self.conv_dtype
        if stream_name == GATE_HISTORY:
            return (self.gates, self.history), self.gate_dtype
        assert self.state is not None
        return self.state, self.state_dtype

    def refuse(self, what: str) -> NoReturn:
        """Raise SpecError about this layer."""
        raise SpecError(f"layer {self.id}: {what}")


def recurrent_layers(
    spec: CacheSpec, backend: str, dtypes: Collection[str] = PLAIN_FLOATS, *, replays: bool = False
) -> dict[int, RecurrentLayer]:
    """The layers of ``spec``, the recurrent part of a model's, by their id. ``replays``: does the backend serve states
    that take drafts back by replay?

    Raises SpecError, naming ``backend`` and the value, for one that is not as this plugin's spec factory makes it.
    """
    return {layer.id: _recurrent_layer(layer, backend, dtypes, replays) for layer in spec.layers}


def _recurrent_layer(layer: Layer, backend: str, dtypes: Collection[str], replays: bool) -> RecurrentLayer:
    where = f"backend {backend!r}: layer {layer.id}"
    streams = {stream.name: stream for stream in layer.streams}
    history, gates, gate_dtype = _take_history(streams, where, replays)
    if CONV_STATE not in streams or not set(streams) <= {CONV_STATE, RECURRENT_STATE}:
        raise SpecError(
            f"{where} has streams {sorted(streams)}, "
            f"a recurrent layer has {CONV_STATE!r} and perhaps {RECURRENT_STATE!r}",
            hint="keys and values beside them are served by another backend: give this one spec.only(...)",
        )
    for stream in streams.values():
        _check_stream(stream, where, dtypes)
    conv, state = streams[CONV_STATE], streams.get(RECURRENT_STATE)
    if len(conv.row.shape) != 2:
        raise SpecError(
            f"{where} stream {CONV_STATE!r} has rows of shape {conv.row.shape}, expected (channels, columns)"
        )
    if state is not None and len(state.row.shape) not in (2, 3):
        raise SpecError(
            f"{where} stream {RECURRENT_STATE!r} has rows of shape {state.row.shape}, expected two or three axes"
        )
    if state is not None and state.retention != conv.retention:
        raise SpecError(f"{where} keeps its two states for {conv.retention} and {state.retention}")
    return RecurrentLayer(
        layer.id,
        *conv.row.shape,
        None if state is None else state.row.shape,
        conv.row.dtype,
        conv.row.dtype if state is None else state.row.dtype,
        history,
        gates,
        gate_dtype,
    )


def _take_history(streams: dict[str, Stream], where: str, replays: bool) -> tuple[int, int, str]:
    """Remove what is kept for replay from ``streams``. Returns tokens, gates and the gates' dtype of the history."""
    found = {name: streams.pop(name) for name in (CONV_HISTORY, GATE_HISTORY, CHECKPOINT) if name in streams}
    apart = all(stream.retention.draft_pages for stream in streams.values() if stream.retention.exact)
    if apart and not found:
        return 0, 0, ""
    if not replays:
        raise SpecError(
            f"{where} takes drafts back by replay, which this backend does not serve",
            hint="make the spec with rollback='snapshots'",
        )
    if apart or not {CONV_HISTORY, CHECKPOINT} <= set(found):
        raise SpecError(f"{where} is to take drafts back by replay and has {sorted(found)} for it")
    tokens = found[CONV_HISTORY].row.shape[1]
    if GATE_HISTORY not in found:
        return tokens, 0, ""
    return tokens, found[GATE_HISTORY].row.shape[0], found[GATE_HISTORY].row.dtype


def _check_stream(stream: Stream, where: str, dtypes: Collection[str]) -> None:
    what = f"{where} stream {stream.name!r}"
    if not stream.retention.exact:
        raise SpecError(f"{what} is kept for {stream.retention}, a state has one row per sequence")
    if stream.row.dtype not in dtypes:
        raise SpecError(f"{what} is stored as {stream.row.dtype}", hint=f"use one of {', '.join(dtypes)}")
    if stream.row.scale is not None:
        raise SpecError(f"{what} has scales, rows must be plain")


def check_inputs(layer: RecurrentLayer, inputs: RecurrentInputs, step: Step | None) -> Step:
    """The step, once ``inputs`` are known to fit it and the layer: a kernel that trusts shapes reads other memory.

    Raises StateError without a step, SpecError for shapes that cannot be.
    """
    if step is None:
        raise StateError("forward() before begin(): the backend has no step")
    check_shapes(layer, inputs, step.token_count)
    return step


def check_shapes(layer: RecurrentLayer, inputs: RecurrentInputs, tokens: int) -> None:
    """Raise SpecError unless ``inputs`` are those of ``tokens`` tokens of the layer."""
    channels = layer.channels
    expected: dict[str, tuple[int, ...]] = {
        "conv_inputs": (tokens, channels),
        "conv_weight": (channels, layer.columns + 1),
    }
    if inputs.conv_bias is not None:
        expected["conv_bias"] = (channels,)
    state = layer.state
    fits: bool
    if isinstance(inputs, ShortConvInputs):
        fits = state is None
    elif isinstance(inputs, Mamba1Inputs):
        fits = state is not None and len(state) == 2 and state[0] == channels
        if fits and state is not None:
            expected |= {"a": state, "d": state[:1], "dt_bias": state[:1]}
    elif isinstance(inputs, Mamba2Inputs):
        fits = state is not None and len(state) == 3 and _halves(channels - math.prod(state[:2]), state[2])
        if fits and state is not None:
            expected |= {"dt": (tokens, state[0]), "a": state[:1], "d": state[:1], "dt_bias": state[:1]}
    elif isinstance(inputs, DeltaNetInputs):
        fits = state is not None and len(state) == 3 and _halves(channels - state[0] * state[2], state[1])
        if fits and state is not None:
            expected |= {"log_decay": (tokens, state[0]), "beta": (tokens, state[0])}
    else:
        raise TypeError(f"{type(inputs).__name__} is no kind of recurrent inputs")
    if not fits:
        layer.refuse(f"{type(inputs).__name__} do not fit {channels} channels and a state of shape {state}")
    for name, shape in expected.items():
        found = tuple(getattr(inputs, name).shape)
        if found != shape:
            layer.refuse(f"{name} {list(found)}, expected {list(shape)}")


def value_width(layer: RecurrentLayer, inputs: RecurrentInputs) -> int:
    """Elements of a token's value, for inputs that fit the layer."""
    if layer.state is None or isinstance(inputs, Mamba1Inputs):
        return layer.channels
    first, second, third = layer.state
    return first * (third if isinstance(inputs, DeltaNetInputs) else second)


def _halves(channels: int, unit: int) -> bool:
    """Are so many channels two equal parts of whole ``unit``?"""
    return channels > 0 and channels % (2 * unit) == 0
