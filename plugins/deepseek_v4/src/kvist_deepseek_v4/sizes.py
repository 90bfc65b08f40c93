"""How much a sequence takes, by kind: what grows with it, what does not, and what a step touches at most. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvist.layout import Group, Layout
from kvist.spec import CacheSpec, History, ceil_div


def growing_bytes_per_token(spec: CacheSpec) -> Fraction:
    """Bytes of history that one more token adds in the long run, without padding."""
    return sum(
        (
            Fraction(stream.row.row_bytes, stream.tokens_per_row)
            for layer in spec.layers
            for stream in layer.streams
            if stream.retention == History()
        ),
        Fraction(0),
    )


def fixed_bytes(spec: CacheSpec) -> int:
    """Bytes of windows that a long sequence holds whatever its length: as many rows as each window has tokens, without
    what pages hold beyond."""
    return sum(
        stream.row.row_bytes * getattr(stream.retention, "tokens", 0)
        for layer in spec.layers
        for stream in layer.streams
    )


def admission_bytes(layout: Layout, length: int, new_tokens: int, drafts: int = 0) -> Mapping[str, int]:
    """Bytes of pages, by group, that a sequence with ``length`` computed tokens holds while a step computes
    ``new_tokens`` more and verifies ``drafts`` behind them, its windows' earlier blocks being dropped.

    History is charged for all tokens, a window for what is still live and for every token of the step: the peak is
    in the middle of a prefill, where each token of the chunk has a row of every kind.
    """
    end = length + new_tokens + drafts
    return {group.name: _pages(group, layout.block_tokens, length, end) * group.page_bytes for group in layout.groups}


def _pages(group: Group, block_tokens: int, length: int, end: int) -> int:
    # What would be needed after taking one token back is held, too: the same prompt sent again reuses all but its last.
    dropped = sum(high - low for low, high in group.retention.droppable(length, 1, block_tokens))
    return ceil_div(end, block_tokens) - dropped
