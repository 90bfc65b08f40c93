"""The deepest position at which every group can resume, found from the pages on a path of extents."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvist.layout import Group, Layout
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.spec import Scope, Spans
from kvist.step import NO_PAGE, IntArray


@attrs.define(eq=False)
class Match:
    """What a prompt can reuse.

    length: tokens, the deepest restore point of all groups within the limit.
    pages: int32 ``[groups, blocks]`` of the first ``ceil(length / block_tokens)`` blocks, NO_PAGE where absent.
    path: extents holding the matched tokens, root side first, with the tokens matched in each.
    known: leading tokens of the prompt that the index knows, reusable or not.
    limited_by: the group that has no restore point between ``length`` and what the others could reuse; ``None`` when
        ``length`` is all that is known, or as much as the limit and the reuse unit leave of it.
    lost: how many more tokens there were but for that group and others that lack restore points.
    """

    length: int
    pages: IntArray
    path: list[tuple[Extent, int]]
    known: int
    limited_by: Group | None
    lost: int = 0


def find(
    tree: PrefixTree,
    layout: Layout,
    sparse: Sequence[Group],
    scope: Scope,
    tokens: IntArray,
    limit: int,
    *,
    backoff: int = 0,
    whole_blocks: bool = False,
) -> Match:
    """Longest usable prefix of ``tokens``, at most ``limit``.

    sparse: groups whose published runs may have gaps; the others can resume wherever the tokens are known.
    backoff: tokens to leave out at the end of what is known, before any group chooses its restore point.
    whole_blocks: end at a block boundary.

    Changes nothing.
    """
    block = layout.block_tokens
    path = tree.walk(scope, tokens)
    if not path:
        return Match(0, tree.no_pages, path, 0, None)
    last, matched = path[-1]
    known = last.start + matched
    unit = block if whole_blocks else layout.reuse_unit
    length = max(0, min(known, limit) - backoff)
    length -= length % unit
    if not length:
        return Match(0, tree.no_pages, path, known, None)
    hoped = length
    pieces = [extent.pages[:, : -(-matched // block)] for extent, matched in path]
    # The last piece may be a closest child: it begins inside the block where the one before it ends only if that
    # one is whole, so pieces always meet at block boundaries.
    pages = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
    # A snapshot filed under an open block was made at the block's last token, whichever that is.
    open_end = known if last.is_open and matched == last.length else 0
    length, limited_by = settle(layout, sparse, pages, length, unit, open_end)
    return Match(length, pages[:, : -(-length // block)], path, known, limited_by, hoped - length)


def settle(
    layout: Layout, sparse: Sequence[Group], pages: IntArray, length: int, unit: int, open_end: int
) -> tuple[int, Group | None]:
    """The largest multiple of ``unit`` up to ``length``, itself one, at which every sparse group can resume, and the
    group without which it were larger.

    pages: int32 ``[groups, blocks]``, NO_PAGE where absent. open_end: the position at which a snapshot filed under an
    open last block was made, 0 without one.
    """
    block = layout.block_tokens
    limited_by = None
    settled = False
    while not settled and length:
        settled = True
        if layout.has_rings and length != open_end:
            # Inside a block the ring holds later rows already.
            length -= length % block
        for group in sparse:
            if group.exact:
                fitting = _last_snapshot(pages[group.index], length, block, open_end)
            else:
                fitting = _resumable(group, pages[group.index], length, block)
            if fitting < length:
                length, settled, limited_by = fitting - fitting % unit, False, group
    return length, limited_by


def _last_snapshot(pages: IntArray, length: int, block: int, open_end: int) -> int:
    """The largest position up to ``length`` at whose exact length a snapshot was made."""
    if open_end and open_end <= length and pages[(open_end - 1) // block] != NO_PAGE:
        return open_end
    there = np.flatnonzero(pages[: length // block] != NO_PAGE)
    return (int(there[-1]) + 1) * block if len(there) else 0


def _resumable(group: Group, pages: IntArray, length: int, block: int) -> int:
    """The largest length up to ``length`` whose required blocks are all present in ``pages``."""
    while length:
        gap = _last_gap(pages, group.retention.required(length, block))
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
