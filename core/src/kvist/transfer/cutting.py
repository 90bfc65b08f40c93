"""Large writes in parts, so that other things get their turn between them."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from kvist.transfer.transport import Fragments


def cut(fragments: Fragments, most_bytes: int, most_fragments: int | None = None) -> Iterator[Fragments]:
    """The same copies in order, in parts of at most so many bytes and fragments; at least one part, if an empty one.
    Fragments that are longer than a part are cut, too."""
    whole = _within(fragments, most_bytes)
    count, begin, before = len(whole), 0, 0
    ends = np.cumsum(whole.byte_counts)
    while True:
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        if most_fragments is not None:
            end = min(end, begin + most_fragments)
        yield attrs.evolve(
            whole,
            sources=whole.sources[begin:end],
            destinations=whole.destinations[begin:end],
            byte_counts=whole.byte_counts[begin:end],
        )
        if end == count:
            return
        begin, before = end, int(ends[end - 1])


def _within(fragments: Fragments, most_bytes: int) -> Fragments:
    """Without fragments of more bytes than that."""
    sizes = fragments.byte_counts
    if not len(sizes) or int(sizes.max()) <= most_bytes:
        return fragments
    counts = np.maximum(1, -(-sizes // most_bytes))
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets *= most_bytes
    return attrs.evolve(
        fragments,
        sources=np.repeat(fragments.sources, counts) + offsets,
        destinations=np.repeat(fragments.destinations, counts) + offsets,
        byte_counts=np.minimum(np.repeat(sizes, counts) - offsets, most_bytes),
    )
