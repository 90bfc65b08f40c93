"""The deepest position at which every group can resume, found from the pages on a path of extents."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvist.layout import Layout
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.spec import Retention, Scope, Spans
from kvist.step import NO_PAGE, IntArray


@attrs.frozen(eq=False)
class Match:
    """What a prompt can reuse.

    length: tokens, the deepest restore point of all groups below the prompt's length.
    pages: int32 ``[groups, blocks]`` of the first ``ceil(length / block_tokens)`` blocks, NO_PAGE where absent.
    path: extents holding the matched tokens, root side first, with the tokens matched in each.
    """

    length: int
    pages: IntArray
    path: list[tuple[Extent, int]]


def find(
    tree: PrefixTree,
    layout: Layout,
    dropping: Sequence[int],
    scope: Scope,
    tokens: IntArray,
    *,
    whole_blocks: bool = False,
) -> Match:
    """Longest usable prefix of ``tokens``, at most ``len(tokens) - 1``: one token must remain to be computed.

    dropping: groups whose published runs may have gaps; the others can resume wherever the tokens are known.
    whole_blocks: end at a block boundary.

    Relies on what a longer length requires, among the blocks below a shorter one, being required at the shorter one
    too. Changes nothing.
    """
    block = layout.block_tokens
    path = tree.walk(scope, tokens)
    group_count = len(layout.groups)
    if not path:
        return Match(0, np.empty((group_count, 0), np.int32), path)
    known = path[-1][0].start + path[-1][1]
    length = min(known, len(tokens) - 1)
    unit = block if whole_blocks else layout.reuse_unit
    length -= length % unit
    pieces = [extent.pages[:, : -(-matched // block)] for extent, matched in path]
    # The last piece may be a closest child: it begins inside the block where the one before it ends only if that
    # one is whole, so pieces always meet at block boundaries.
    pages = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
    settled = False
    while not settled and length:
        settled = True
        for group in dropping:
            fitting = _resumable(layout.groups[group].retention, pages[group], length, block)
            if fitting < length:
                length, settled = fitting, False
    return Match(length, pages[:, : -(-length // block)], path)


def _resumable(retention: Retention, pages: IntArray, length: int, block: int) -> int:
    """The largest length up to ``length`` whose required blocks are all present in ``pages``."""
    while length:
        gap = _last_gap(pages, retention.required(length, block))
        if gap is None:
            return length
        # Whatever is longer than this requires a block of the gap too.
        length = gap * block
    return 0


def _last_gap(pages: IntArray, spans: Spans) -> int | None:
    """First block of the last run of absent blocks inside a span, ``None`` if every block is present."""
    for begin, end in reversed(spans):
        present = pages[begin:end] != NO_PAGE
        if np.count_nonzero(present) < len(present):
            last = len(present) - 1 - int(present[::-1].argmin())
            before = present[:last][::-1]
            return begin + last - (int(before.argmax()) if np.count_nonzero(before) else last)
    return None
