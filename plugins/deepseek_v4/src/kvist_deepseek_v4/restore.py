"""Which rows a sequence needs to go on: what a transfer sends, and what may be dropped. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvist.spec import CacheSpec, Layer
from kvist_deepseek_v4.geometry import COMPRESSED, INDEX_K, KV, layers_of


@attrs.frozen
class Rows:
    """Rows ``begin .. end - 1`` of one stream; row ``i`` stands for tokens from ``i * tokens_per_row`` on."""

    layer_id: int
    stream: str
    begin: int
    end: int


def restore_rows(spec: CacheSpec, length: int) -> tuple[Rows, ...]:
    """All that resuming at ``length`` tokens reads, and nothing else. Streams of which nothing is needed are left out.

    Window rows that the next query sees beside its own; every compressed and index row; the states of a window that
    is still open, and where windows overlap those of the one before it, at its boundary too.
    """
    return tuple(rows for rows in _rows(spec, length) if rows.begin < rows.end)


def droppable_below(spec: CacheSpec, length: int, rollback: int = 0) -> tuple[Rows, ...]:
    """Rows that nothing reads again from ``length`` tokens on, nor after the last ``rollback`` of them are taken back.

    A verify step keeps at least its first token, so what is needed before it serves after it, however many drafts are
    rejected: ``rollback`` is what *earlier* steps may have to give back, and storage must not reuse these rows for
    the drafts themselves.
    """
    back = max(0, length - rollback)
    return tuple(Rows(rows.layer_id, rows.stream, 0, rows.begin) for rows in _rows(spec, back) if rows.begin)


def needs_state(spec: CacheSpec, length: int) -> frozenset[int]:
    """Ratios of the layers whose states take part in what resuming at ``length`` reads. A boundary is the cheaper the
    fewer there are: multiples of 128 need those of overlapping windows only."""
    shapes = layers_of(spec, "restore")
    streams = {rows.layer_id for rows in restore_rows(spec, length) if rows.stream not in (KV, COMPRESSED, INDEX_K)}
    return frozenset(shapes[layer_id].ratio for layer_id in streams)


def replay_bound(spec: CacheSpec, length: int) -> int:
    """The fewest tokens before ``length`` that rebuild all windows and states there exactly, from nothing but
    compressed and index rows: a layer's rows are wrong as far as a window reaches behind the first one that the layer
    below has right. All tokens, where the sequence is no longer."""
    shapes = layers_of(spec, "replay")
    window = max(shape.window for shape in shapes.values())
    opened = [length % shape.ratio + (shape.ratio if shape.overlap else 0) for shape in shapes.values() if shape.ratio]
    return min(length, (len(shapes) - 1) * (window - 1) + max(window - 1, *opened, 0))


def _rows(spec: CacheSpec, length: int) -> Iterator[Rows]:
    shapes = layers_of(spec, "restore")
    for layer in spec.layers:
        shape = shapes[layer.id]
        for name in _names(layer):
            if name == KV:
                yield Rows(layer.id, name, max(0, length - shape.window + 1), length)
            elif name in (COMPRESSED, INDEX_K):
                yield Rows(layer.id, name, 0, length // shape.ratio)
            else:
                open_window = length // shape.ratio * shape.ratio
                behind = shape.ratio if shape.overlap else 0
                yield Rows(layer.id, name, max(0, open_window - behind), length)


def _names(layer: Layer) -> list[str]:
    return [stream.name for stream in layer.streams]
