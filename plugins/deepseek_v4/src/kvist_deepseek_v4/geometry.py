"""What a spec says of a DeepSeek-V4 layer, checked once. No torch."""

from __future__ import annotations

import attrs

from kvist.errors import SpecError
from kvist.spec import CacheSpec, History, Layer, Stream, Window
from kvist_deepseek_v4.formats import INDEX_FP8, INDEX_MXFP4, PACKED, EncodedRow, elements_of

#: Names of the streams: the window's rows; compressed rows and what they are made from; the same of the index.
KV, COMPRESSED, STATE, INDEX_K, INDEX_STATE = "kv", "compressed", "state", "index_k", "index_state"
#: What rows of ``kv``, ``compressed`` and ``index_k`` are stored as, if they are plain. States are float32.
FLOATS = ("float32", "bfloat16", "float16")
_ENCODINGS = {KV: (PACKED,), COMPRESSED: (PACKED,), INDEX_K: (INDEX_FP8, INDEX_MXFP4)}


@attrs.frozen
class LayerGeometry:
    """One layer. Sizes in elements, window in tokens.

    ratio: tokens of a compressed row, 0 for a layer without. overlap: are there two series, the first of which
    is pooled with the window behind it? index_dim: of an index row, 0 for a layer without an index.
    """

    id: int
    head_dim: int
    window: int
    ratio: int = 0
    overlap: bool = False
    index_dim: int = 0

    @property
    def series(self) -> int:
        """How often a state row has its width."""
        return 2 if self.overlap else 1


def layers_of(spec: CacheSpec, backend: str) -> dict[int, LayerGeometry]:
    """All layers of ``spec`` by id. Raises SpecError, naming ``backend``, the layer and the value, for one that
    DeepSeek-V4 does not have."""
    return {layer.id: _geometry(layer, f"backend {backend!r}: layer {layer.id}") for layer in spec.layers}


def _geometry(layer: Layer, where: str) -> LayerGeometry:
    streams = {stream.name: stream for stream in layer.streams}
    if set(streams) not in ({KV}, {KV, COMPRESSED, STATE}, {KV, COMPRESSED, STATE, INDEX_K, INDEX_STATE}):
        raise SpecError(
            f"{where} has streams {sorted(streams)}",
            hint="DeepSeek-V4 has 'kv' in each layer, with it 'compressed' and 'state', with these 'index_k' and "
            "'index_state'",
        )
    head_dim = _row(streams[KV], where, 1)
    window = _window(streams[KV], where)
    if len(streams) == 1:
        return LayerGeometry(layer.id, head_dim, window)
    ratio = streams[COMPRESSED].tokens_per_row
    series = _compressor(streams[COMPRESSED], streams[STATE], head_dim, ratio, where)
    index_dim = 0
    if INDEX_K in streams:
        index_dim = elements_of(streams[INDEX_K].row)
        if _compressor(streams[INDEX_K], streams[INDEX_STATE], index_dim, ratio, where) != series:
            raise SpecError(f"{where}: the index's windows overlap and the others do not, or the other way round")
    return LayerGeometry(layer.id, head_dim, window, ratio, series == 2, index_dim)


def _compressor(rows: Stream, state: Stream, size: int, ratio: int, where: str) -> int:
    """Check compressed rows and their states. Returns the number of series in a state."""
    elements = _row(rows, where, ratio)
    if elements != size or rows.retention != History():
        raise SpecError(
            f"{where} stream {rows.name!r} keeps rows of ({elements},) for {rows.retention}, expected rows of "
            f"({size},) for History()"
        )
    if ratio < 2:
        raise SpecError(f"{where} stream {rows.name!r} has {ratio} token(s) per row, expected at least 2")
    shape, window = state.row.shape, _window(state, where)
    series = window // ratio
    if state.row.dtype != "float32" or state.row.scale is not None or state.tokens_per_row != 1:
        raise SpecError(f"{where} stream {state.name!r} holds sums to be: plain float32, one row per token")
    if series not in (1, 2) or window != series * ratio or shape != (2, series * size):
        raise SpecError(
            f"{where} stream {state.name!r} has rows of {shape} for {state.retention}, expected (2, {size}) for "
            f"Window({ratio}), or (2, {2 * size}) for Window({2 * ratio}) where windows overlap"
        )
    return series


def _row(stream: Stream, where: str, tokens_per_row: int) -> int:
    what = f"{where} stream {stream.name!r}"
    if len(stream.row.shape) != 1:
        raise SpecError(f"{what} has rows of shape {stream.row.shape}, expected (size,)")
    if isinstance(stream.row, EncodedRow):
        if stream.row.encoding not in _ENCODINGS[stream.name]:
            raise SpecError(
                f"{what} is stored as {stream.row.encoding}", hint=f"use {' or '.join(_ENCODINGS[stream.name])}"
            )
    elif stream.row.dtype not in FLOATS:
        raise SpecError(f"{what} is stored as {stream.row.dtype}", hint=f"use one of {', '.join(FLOATS)}")
    if stream.row.scale is not None:
        raise SpecError(f"{what} has scales, rows must be plain")
    if stream.tokens_per_row != tokens_per_row:
        raise SpecError(f"{what} has {stream.tokens_per_row} tokens per row, expected {tokens_per_row}")
    return elements_of(stream.row)


def _window(stream: Stream, where: str) -> int:
    """How far back the stream is read, the query's own token included."""
    retention = stream.retention
    if not isinstance(retention, Window) or retention.sinks:
        raise SpecError(
            f"{where} stream {stream.name!r} is kept for {stream.retention}, expected a Window without sinks"
        )
    return retention.tokens
