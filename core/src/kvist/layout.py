"""From a cache spec to groups, page bytes and offsets: pure arithmetic, no memory, no torch.

One page holds one block of one group, all layers of the group side by side. Every group's page divides the
slab, so ``page id * page_bytes`` is a byte offset into the arena for every group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import attrs

from kvist.errors import CapacityError, SpecError
from kvist.spec import CacheSpec, Layer, Retention, Stream, ceil_div

#: Pages start at multiples of this many bytes: a cache line, and a multiple of every element size.
PAGE_ALIGNMENT = 64
#: A slab of a multi-group arena aims at this part of the arena, within the bounds below.
_SLABS_PER_ARENA = 128
_SLAB_BYTES_MAX = 32 << 20
#: Sequences keep what they would need after taking back this many tokens: the same prompt sent again reuses all but its
#: last token.
KEPT_ROLLBACK = 1
#: Long enough that any retention that ever drops a block drops one by then.
_FAR = 1 << 30


class PageLayout(Protocol):
    """How an attention backend arranges one stream's rows inside its part of a page.

    The core sees bytes and the tag only: tiers store the tag in their key, peers compare it.
    """

    @property
    def tag(self) -> str:
        """Name and version of the arrangement; equal tags mean equal bytes."""

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        """Bytes that ``row_count`` rows of ``stream`` take in one page, at least ``row_count * row_bytes``."""


@attrs.frozen
class RowMajor:
    """Rows one after the other, as the spec describes them. The default arrangement."""

    tag: str = "row-major-1"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return row_count * stream.row.row_bytes


@attrs.frozen
class Part:
    """One stream of one layer inside a page: ``byte_count`` bytes from ``offset``, ``row_count`` rows."""

    layer_id: int
    stream: Stream
    offset: int
    byte_count: int
    row_count: int


@attrs.frozen
class Group:
    """All streams with one retention. Groups live and die together, page by page.

    index: position in :attr:`Layout.groups`, and in every per-group tuple of Kvist.
    content_bytes: bytes in use per page; ``page_bytes - content_bytes`` is padding.
    exact: one mutable page per sequence instead of one per block (see :attr:`Retention.exact`).
    sparse: not every block of the prefix tree has a page, because the group drops blocks while a sequence runs or
        keeps only snapshots. Groups that are not sparse are *dense*.
    """

    index: int
    domain: str
    retention: Retention
    parts: tuple[Part, ...]
    content_bytes: int
    page_bytes: int
    exact: bool
    sparse: bool

    @property
    def name(self) -> str:
        """For messages and tables, e.g. ``target/Window(tokens=512, sinks=0)``."""
        return f"{self.domain}/{self.retention!r}"


@attrs.frozen
class Layout:
    """Groups and sizes of one cache.

    slab_bytes: the unit a group takes from the arena; a multiple of every group's page_bytes.
    slab_count: slabs in the arena.
    tag: the backend's page layout tag.
    drafts: specs of further domains, e.g. a draft model's, that compute the same tokens in the same steps.
    """

    spec: CacheSpec
    groups: tuple[Group, ...]
    slab_bytes: int
    slab_count: int
    tag: str
    drafts: tuple[CacheSpec, ...] = ()

    @classmethod
    def build(
        cls,
        spec: CacheSpec,
        memory_bytes: int,
        page_layout: PageLayout | None = None,
        drafts: Sequence[CacheSpec] = (),
    ) -> Layout:
        """Lay ``spec`` and the specs of other domains out in at most ``memory_bytes`` in all.

        Domains share the arena and the sequences, so a plan covers all of them or fails as a whole.

        Raises CapacityError when not even one page of each group fits beside the reserved one, SpecError when two
        specs have one domain or different blocks.
        """
        arrangement = page_layout or RowMajor()
        specs = (spec, *drafts)
        if len({each.domain for each in specs}) < len(specs):
            raise SpecError(
                f"two specs have one domain: {[each.domain for each in specs]}", hint="name the draft model's domain"
            )
        if len({each.block_tokens for each in specs}) > 1:
            raise SpecError(f"domains differ in block_tokens: {[each.block_tokens for each in specs]}")
        contents = [(each.domain, *content) for each in specs for content in _contents(each, arrangement)]
        sizes = [_align(size) for *_, size in contents]
        slab_bytes, page_bytes = _choose_slab(sizes, memory_bytes)
        groups = tuple(
            Group(
                index,
                domain,
                retention,
                parts,
                size,
                page,
                retention.exact,
                _is_sparse(retention, spec.block_tokens),
            )
            for index, ((domain, retention, parts, size), page) in enumerate(zip(contents, page_bytes, strict=True))
        )
        layout = cls(spec, groups, slab_bytes, memory_bytes // slab_bytes, arrangement.tag, tuple(drafts))
        layout._require_room(memory_bytes)
        return layout

    @property
    def block_tokens(self) -> int:
        return self.spec.block_tokens

    @property
    def arena_bytes(self) -> int:
        return self.slab_bytes * self.slab_count

    @property
    def padding_fraction(self) -> float:
        """Share of a slab lost to padding, for the worst group."""
        return max(1 - group.content_bytes / group.page_bytes for group in self.groups)

    @cached_property
    def has_rings(self) -> bool:
        """Does any group keep only the last rows of a block, so that others can resume at block ends only?"""
        return any(group.retention.ring for group in self.groups)

    @cached_property
    def most_drafts(self) -> int | None:
        """Drafts per step and sequence that every group can take back, ``None`` for any number."""
        limits = [group.retention.most_drafts for group in self.groups]
        return min((limit for limit in limits if limit is not None), default=None)

    @cached_property
    def has_states(self) -> bool:
        """Does any group keep one state per sequence instead of a page per block?"""
        return any(group.exact for group in self.groups)

    @cached_property
    def reuse_unit(self) -> int:
        """Tokens between positions at which reuse can end: every stream has whole rows there."""
        return math.lcm(*(part.stream.tokens_per_row for group in self.groups for part in group.parts))

    def page_capacity(self, group: Group) -> int:
        """Pages ``group`` could hold if it had the whole arena. Slab 0, which holds every group's reserved page 0,
        is not counted."""
        return (self.slab_count - 1) * (self.slab_bytes // group.page_bytes)

    def part(self, layer_id: int, stream_name: str, domain: str | None = None) -> tuple[Group, Part]:
        """Where a layer's stream lies; ``domain`` is the first spec's by default. Raises SpecError when the domain has
        no such layer or stream."""
        domain = self.spec.domain if domain is None else domain
        parts = [(group, part) for group in self.groups if group.domain == domain for part in group.parts]
        for group, part in parts:
            if part.layer_id == layer_id and part.stream.name == stream_name:
                return group, part
        known = sorted({part.stream.name for _, part in parts if part.layer_id == layer_id})
        raise SpecError(f"layer {layer_id} has no stream {stream_name!r}", hint=f"it has {known or 'no streams'}")

    def fits(self, length: int) -> bool:
        """Could a sequence of ``length`` tokens run if it had the whole arena?"""
        return self._slabs_for(length) < self.slab_count

    def require_fit(self, length: int) -> None:
        """Raise CapacityError if a sequence of ``length`` tokens needs more than the whole arena."""
        if not self.fits(length):
            pages = {group.name: self._most_pages(group, length) for group in self.groups}
            raise CapacityError(
                f"{length} tokens never fit: they need {self._slabs_for(length) * self.slab_bytes} bytes ("
                + ", ".join(f"{count} pages of group {name}" for name, count in pages.items())
                + f") and the cache has {(self.slab_count - 1) * self.slab_bytes}",
                hint="shorten the request or give the cache more memory",
            )

    def _most_pages(self, group: Group, length: int) -> int:
        """Pages a sequence holds at most on its way to ``length`` tokens, computed one by one.

        The peak comes when a block is opened, and comes back unchanged once the group drops blocks, so two blocks
        beyond the first drop are far enough.
        """
        if group.exact:
            return 1
        block, droppable = self.block_tokens, group.retention.droppable
        if not group.sparse or not droppable(length, KEPT_ROLLBACK, block):
            return ceil_div(length, block)
        most, far_enough = 0, length
        for first in range(0, length, block):
            dropped = sum(end - begin for begin, end in droppable(first, KEPT_ROLLBACK, block))
            most = max(most, first // block + 1 - dropped)
            if dropped:
                far_enough = min(far_enough, first + 2 * block)
            if first > far_enough:
                break
        return most

    def _slabs_for(self, length: int) -> int:
        return sum(
            ceil_div(self._most_pages(group, length), self.slab_bytes // group.page_bytes) for group in self.groups
        )

    def _require_room(self, memory_bytes: int) -> None:
        needed = len(self.groups) + 1
        if self.slab_count < needed:
            raise CapacityError(
                f"{memory_bytes} bytes cannot hold one page of each of the {len(self.groups)} group(s) beside the "
                f"reserved page: {needed * self.slab_bytes} bytes are the least",
                hint="give the cache more memory or use smaller blocks",
            )


def _contents(spec: CacheSpec, arrangement: PageLayout) -> list[tuple[Retention, tuple[Part, ...], int]]:
    """Streams by retention, in order of first appearance, with their offsets and total bytes."""
    grouped: dict[Retention, list[Part]] = {}
    ends: dict[Retention, int] = {}
    for layer in spec.layers:
        for stream in layer.streams:
            row_count = _row_count(spec, layer, stream)
            byte_count = arrangement.part_bytes(stream, row_count)
            if byte_count < row_count * stream.row.row_bytes:
                raise SpecError(
                    f"page layout {arrangement.tag!r} gives layer {layer.id} stream {stream.name!r} {byte_count} bytes "
                    f"for {row_count} rows of {stream.row.row_bytes} bytes"
                )
            # Parts start where any element type may start.
            offset = ceil_div(ends.get(stream.retention, 0), 16) * 16
            grouped.setdefault(stream.retention, []).append(Part(layer.id, stream, offset, byte_count, row_count))
            ends[stream.retention] = offset + byte_count
    return [(retention, tuple(parts), ends[retention]) for retention, parts in grouped.items()]


def _row_count(spec: CacheSpec, layer: Layer, stream: Stream) -> int:
    """Rows of a stream in one page."""
    ring = stream.retention.ring
    if stream.retention.exact:
        return 1
    if not ring:
        return spec.block_tokens // stream.tokens_per_row
    if ring > spec.block_tokens or ring % stream.tokens_per_row:
        raise SpecError(
            f"layer {layer.id} stream {stream.name!r}: a ring of {ring} tokens does not fit blocks of "
            f"{spec.block_tokens} tokens with {stream.tokens_per_row} token(s) per row",
            hint="leave the ring out: whole blocks are as small",
        )
    return ring // stream.tokens_per_row


def _is_sparse(retention: Retention, block_tokens: int) -> bool:
    if retention.exact:
        return True
    return not retention.ring and bool(retention.droppable(_FAR, 0, block_tokens))


def _align(size: int) -> int:
    return ceil_div(size, PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def _choose_slab(sizes: Sequence[int], memory_bytes: int) -> tuple[int, list[int]]:
    """Slab bytes and padded page bytes that leave the largest part of the memory usable; of equals the smallest slab.

    Lost are the reserved slab, what is left over at the end, and the padding of the worst group.
    """
    largest = max(sizes)
    if len(set(sizes)) == 1:
        # Every group has the same page: a slab of one page splits the arena without waste.
        return largest, list(sizes)
    # Small slabs lose little to the reserved one, slabs of the target size little to padding. Trying all in between
    # takes a quarter of a second where pages are tiny.
    target = min(max(memory_bytes // _SLABS_PER_ARENA, largest), _SLAB_BYTES_MAX) // largest
    candidates = {largest * count for first in (1, target) for count in range(first, first + 64)}
    exact = math.lcm(*sizes)
    candidates.update(exact * count for count in (1, 2, 3, 4) if exact * count <= _SLAB_BYTES_MAX)
    best = (-1.0, largest, [_padded(size, largest) for size in sizes])
    for slab in sorted(candidates):
        slab_count = memory_bytes // slab
        if slab_count <= len(sizes):
            continue
        pages = [_padded(size, slab) for size in sizes]
        filled = min(size / page for size, page in zip(sizes, pages, strict=True))
        usable = (slab_count - 1) * slab * filled / memory_bytes
        if usable > best[0] + 1e-9:
            best = (usable, slab, pages)
    return best[1], best[2]


def _padded(size: int, slab_bytes: int) -> int:
    """The smallest aligned divisor of ``slab_bytes`` that is at least ``size``."""
    units = slab_bytes // PAGE_ALIGNMENT
    count = slab_bytes // size
    while units % count:
        count -= 1
    return slab_bytes // count
