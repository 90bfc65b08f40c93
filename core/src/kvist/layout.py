"""From a cache spec to groups, page bytes and offsets: pure arithmetic, no memory, no torch.

One page holds one block of one group, all layers of the group side by side. Every group's page divides the
slab, so ``page id * page_bytes`` is a byte offset into the arena for every group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import attrs

from kvist.errors import CapacityError, SpecError
from kvist.slabs import align, choose_slab
from kvist.spec import CacheSpec, Layer, Retention, Stream, ceil_div

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
class Order:
    """Where rows, and the units of a row, lie in a part. A unit is an element of a row's axis 0, e.g. a head.

    by_unit: ``True``: unit after unit, each with all its rows, arranged alike however many units there are. ``False``:
        row after row, as the spec describes them.
    run_rows: rows that only make sense together; a part's rows are runs of so many, one after the other.
    """

    by_unit: bool
    run_rows: int = 1


@runtime_checkable
class OrderedPageLayout(PageLayout, Protocol):
    """A page layout that says where units and rows lie, so that caches of other tensor-parallel sizes and other blocks
    can be transferred. Those of a layout that does not say it move as whole pages only."""

    def order(self, stream: Stream, row_count: int) -> Order | None:
        """The order in a part of ``row_count`` rows of ``stream``, which begins with the first of them; ``None`` for a
        stream whose order is nobody's business."""


def order_of(page_layout: PageLayout, stream: Stream, row_count: int) -> Order | None:
    """What ``page_layout`` says about the order of a part, ``None`` if it says nothing."""
    return page_layout.order(stream, row_count) if isinstance(page_layout, OrderedPageLayout) else None


@attrs.frozen
class RowMajor:
    """Rows one after the other, as the spec describes them. The default arrangement."""

    tag: str = "row-major-1"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return row_count * stream.row.row_bytes

    def order(self, stream: Stream, row_count: int) -> Order:
        return Order(by_unit=False)


@attrs.frozen
class Part:
    """One stream of one layer inside a page: ``byte_count`` bytes from ``offset``, ``row_count`` rows.

    order: how they lie there; ``None`` where the page layout does not say.
    """

    layer_id: int
    stream: Stream
    offset: int
    byte_count: int
    row_count: int
    order: Order | None = None


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

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that hold nothing, so that pages divide a slab."""
        return self.page_bytes - self.content_bytes

    @property
    def padding_fraction(self) -> float:
        """Share of a page that holds nothing."""
        return self.padding_bytes / self.page_bytes


@attrs.frozen
class Layout:
    """Groups and sizes of one cache.

    slab_bytes: the unit a group takes from the arena; a multiple of every group's page_bytes.
    slab_count: slabs in the arena.
    tag: the backend's page layout tag.
    drafts: specs of further domains, e.g. a draft model's, that compute the same tokens in the same steps.
    floors: pages of each group that no other group can take; empty for none. Made by :meth:`with_floors`.
    """

    spec: CacheSpec
    groups: tuple[Group, ...]
    slab_bytes: int
    slab_count: int
    tag: str
    drafts: tuple[CacheSpec, ...] = ()
    floors: tuple[int, ...] = ()

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
        sizes = [align(size) for *_, size in contents]
        slab_bytes, page_bytes = choose_slab(sizes, memory_bytes)
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
        return max(group.padding_fraction for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """Bytes of rows that one more token adds to the history in the long run."""
        streams = [part.stream for group in self.groups if not group.sparse for part in group.parts]
        return sum(stream.row.row_bytes / stream.tokens_per_row for stream in streams)

    @property
    def token_padding_bytes(self) -> float:
        """Bytes that pages of the history have beyond that, per token: what fills up rows, parts and pages."""
        pages = sum(group.page_bytes for group in self.groups if not group.sparse)
        return pages / self.block_tokens - self.token_bytes

    @cached_property
    def sequence_bytes(self) -> int:
        """Bytes of pages of windows and states that a sequence of any length holds at most, token by token."""
        return sum(self.most_pages(group, _FAR) * group.page_bytes for group in self.groups if group.sparse)

    @cached_property
    def floor_slabs(self) -> tuple[int, ...]:
        """Slabs that hold each group's floor."""
        return tuple(
            ceil_div(pages, self.slab_bytes // group.page_bytes)
            for group, pages in zip(self.groups, self.floors or (0,) * len(self.groups))
        )

    @property
    def shared_bytes(self) -> int:
        """Bytes that are no group's floor: whoever needs them takes them."""
        return (self.slab_count - 1 - sum(self.floor_slabs)) * self.slab_bytes

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
        """Tokens between positions at which reuse can end: every stream has whole rows there, or can go on."""
        streams = [part.stream for group in self.groups for part in group.parts]
        return math.lcm(*(stream.tokens_per_row for stream in streams if not stream.continued))

    def page_capacity(self, group: Group) -> int:
        """Pages ``group`` could hold if it had the whole arena but the floors of others. Slab 0, which holds every
        group's reserved page 0, is not counted."""
        others = sum(self.floor_slabs) - self.floor_slabs[group.index]
        return (self.slab_count - 1 - others) * (self.slab_bytes // group.page_bytes)

    def floors_for(self, batch: Iterable[tuple[int, int]]) -> dict[str, int]:
        """Floors, by group, that let ``batch`` run at any time: pairs of a length in tokens and how many sequences of
        that length run at once. What the sequences share is counted for each of them, and so is the page that a
        sequence which resumes inside a block, or from a state, starts from.
        """
        pairs = list(batch)
        return {
            group.name: sum(count * (self.most_pages(group, length) + 1) for length, count in pairs)
            for group in self.groups
        }

    def with_floors(self, floors: Mapping[str, int]) -> Layout:
        """The same layout with pages that no other group can take, by the group's name; rounded up to whole slabs when
        the arena is made. Groups that are not named have no floor.

        A floor is a promise to the group, not to a request: the group's other sequences can use it too.

        Raises SpecError for unknown names and negative numbers, CapacityError when the floors do not fit, or when a
        group without a floor could not get a single page.
        """
        names = [group.name for group in self.groups]
        for name, pages in floors.items():
            if name not in names:
                raise SpecError(f"a floor for {name!r}, which is no group", hint=f"the groups are {', '.join(names)}")
            if pages < 0:
                raise SpecError(f"a floor of {pages} pages for group {name}", hint="a floor is zero or more pages")
        made = attrs.evolve(self, floors=tuple(floors.get(name, 0) for name in names))
        available = self.slab_count - 1
        wanted = sum(made.floor_slabs)
        if wanted > available:
            parts = ", ".join(f"{pages} pages of group {name}" for name, pages in floors.items() if pages)
            raise CapacityError(
                f"the floors do not fit: they need {wanted * self.slab_bytes} bytes ({parts}) and the cache has "
                f"{available * self.slab_bytes}",
                hint="lower the floors or give the cache more memory",
            )
        without = [name for name, slabs in zip(names, made.floor_slabs) if not slabs]
        if wanted + len(without) > available:
            raise CapacityError(
                f"the floors leave {available - wanted} of {available} slabs, and no page is sure for "
                f"{', '.join(without)}",
                hint="lower the floors, or give the cache more memory",
            )
        return made

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

    def most_pages(self, group: Group, length: int) -> int:
        """Pages of ``group`` that a sequence holds at most on its way to ``length`` tokens, computed one by one.

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

    def fits(self, length: int, spare_pages: int = 0) -> bool:
        """Could a sequence of ``length`` tokens run, token by token, if it had the whole arena, with so many pages more
        in each group?"""
        return self._slabs_for(length, spare_pages) < self.slab_count

    def require_fit(self, length: int) -> None:
        """Raise CapacityError if a sequence of ``length`` tokens needs more than the whole arena."""
        if not self.fits(length):
            pages = {group.name: self.most_pages(group, length) for group in self.groups}
            reserved = ", floors included" if any(self.floors) else ""
            raise CapacityError(
                f"{length} tokens never fit: they need {self._slabs_for(length) * self.slab_bytes} bytes ("
                + ", ".join(f"{count} pages of group {name}" for name, count in pages.items())
                + f"{reserved}) and the cache has {(self.slab_count - 1) * self.slab_bytes}",
                hint="shorten the request or give the cache more memory",
            )

    def _slabs_for(self, length: int, spare_pages: int = 0) -> int:
        return sum(
            max(floor, ceil_div(self.most_pages(group, length) + spare_pages, self.slab_bytes // group.page_bytes))
            for group, floor in zip(self.groups, self.floor_slabs)
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
            order = order_of(arrangement, stream, row_count)
            part = Part(layer.id, stream, offset, byte_count, row_count, order)
            grouped.setdefault(stream.retention, []).append(part)
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
    return bool(retention.droppable(_FAR, 0, block_tokens))
