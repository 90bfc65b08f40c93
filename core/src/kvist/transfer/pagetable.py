"""Where the bytes of a cache lie and how they are split, as peers tell each other. Knows no model."""

from __future__ import annotations

import attrs
import msgspec

from kvist.errors import SpecError, TransferError
from kvist.layout import Group, Layout, Part
from kvist.spec import Replicated
from kvist.transfer.sharding import sections_of, shard_count
from kvist.transfer.transport import WIRE_VERSION


@attrs.frozen
class Placement:
    """Which part of a model's cache a process keeps.

    tensor_rank, tensor_count: of the ranks that split rows. context_rank, context_count: of the ranks that take turns
        with blocks; rank ``i`` keeps the blocks with ``ordinal % context_count == i``. Ranks that split layers say so
        by the layers of their spec.
    """

    tensor_rank: int = 0
    tensor_count: int = 1
    context_rank: int = 0
    context_count: int = 1

    def __attrs_post_init__(self) -> None:
        if not (0 <= self.tensor_rank < self.tensor_count and 0 <= self.context_rank < self.context_count):
            raise SpecError(f"{self} is no place", hint="ranks count from 0 and are below their count")


class PartTable(msgspec.Struct, frozen=True, array_like=True):
    """One stream of one layer in a page: ``byte_count`` bytes from ``offset``.

    sections: units of the model's whole row, by section. shards: distinct shares of a row, of which this is the one
    numbered ``shard``; ``replicas``: ranks that have the same one, of which this is the one numbered ``replica``.
    unit_bytes: of one unit; a row here has ``sum(sections) / shards`` of them, and ``row_bytes``.
    by_unit, run_rows: as :class:`kvist.layout.Order`; ``run_rows`` is 0 where the order is not known.
    """

    domain: str
    layer: int
    stream: str
    dtype: str
    tokens_per_row: int
    offset: int
    byte_count: int
    row_count: int
    row_bytes: int
    unit_bytes: int
    sections: tuple[int, ...]
    shards: int
    shard: int
    replicas: int
    replica: int
    by_unit: bool
    run_rows: int

    @property
    def key(self) -> tuple[str, int, str]:
        """What parts of two tables are paired by."""
        return self.domain, self.layer, self.stream

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.domain} layer {self.layer} stream {self.stream!r}"

    @property
    def intervals(self) -> list[tuple[int, int, int]]:
        """Units that are here: ``(begin, end)`` among all of the model's row, and where they begin in a row here."""
        found, total, here = [], 0, 0
        for size in self.sections:
            share = size // self.shards
            begin = total + self.shard * share
            found.append((begin, begin + share, here))
            total += size
            here += share
        return found


class GroupTable(msgspec.Struct, frozen=True, array_like=True):
    """One group. retention: in words, equal words mean equal retention. single: one page per sequence instead of one
    per block. ring: as of the retention, 0 where pages have the rows of whole blocks."""

    domain: str
    retention: str
    single: bool
    ring: int
    page_bytes: int
    parts: tuple[PartTable, ...]

    @property
    def name(self) -> str:
        """For messages and for pairing."""
        return f"{self.domain}/{self.retention}"


class PageTable(msgspec.Struct, frozen=True, array_like=True):
    """What one process keeps. Page ``p`` of a group begins at byte ``p * page_bytes`` of the arena.

    fingerprints: of the models, by domain. tag: of the page layout. arena_bytes: of the memory that has the pages.
    """

    version: int
    fingerprints: dict[str, str]
    tag: str
    block_tokens: int
    arena_bytes: int
    context_rank: int
    context_count: int
    groups: tuple[GroupTable, ...]

    def encode(self) -> bytes:
        """For the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> PageTable:
        """From the wire. Raises TransferError for anything else."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise TransferError(
                f"this is no page table: {error}", hint="run the same version of kvist on both sides"
            ) from error


def describe(layout: Layout, placement: Placement = Placement()) -> PageTable:
    """The page table of ``layout``, whose spec is that of one rank, as :func:`~kvist.transfer.sharding.rank_spec` makes
    it. Raises SpecError when the spec's rows are not what a rank at ``placement`` keeps."""
    specs = (layout.spec, *layout.drafts)
    return PageTable(
        version=WIRE_VERSION,
        fingerprints={spec.domain: spec.fingerprint for spec in specs},
        tag=layout.tag,
        block_tokens=layout.block_tokens,
        arena_bytes=layout.arena_bytes,
        context_rank=placement.context_rank,
        context_count=placement.context_count,
        groups=tuple(_group(group, placement) for group in layout.groups),
    )


def _group(group: Group, placement: Placement) -> GroupTable:
    return GroupTable(
        domain=group.domain,
        retention=repr(group.retention),
        single=group.exact,
        ring=group.retention.ring,
        page_bytes=group.page_bytes,
        parts=tuple(_part(group, part, placement) for part in group.parts),
    )


def _part(group: Group, part: Part, placement: Placement) -> PartTable:
    stream, order = part.stream, part.order
    shards = shard_count(stream, placement.tensor_count)
    replicas = placement.tensor_count // shards
    sections, units = _units(part, shards, placement.tensor_count)
    row_bytes = stream.row.row_bytes
    # Scales are part of a row and belong to no unit.
    ordered = order is not None and not (order.by_unit and stream.row.scale is not None)
    return PartTable(
        domain=group.domain,
        layer=part.layer_id,
        stream=stream.name,
        dtype=stream.row.dtype,
        tokens_per_row=stream.tokens_per_row,
        offset=part.offset,
        byte_count=part.byte_count,
        row_count=part.row_count,
        row_bytes=row_bytes,
        unit_bytes=row_bytes // units,
        sections=sections,
        shards=shards,
        shard=placement.tensor_rank // replicas,
        replicas=replicas,
        replica=placement.tensor_rank % replicas,
        by_unit=order is not None and order.by_unit,
        run_rows=order.run_rows if ordered and order is not None else 0,
    )


def _units(part: Part, shards: int, rank_count: int) -> tuple[tuple[int, ...], int]:
    """Sections of the model's row, and how many units of it are in a row here."""
    stream, shape = part.stream, part.stream.row.shape
    if stream.row.scale is not None:
        return (1,), 1
    if isinstance(stream.sharding, Replicated):
        # Row after row, nobody has to know what a row consists of.
        count = shape[0] if part.order is not None and part.order.by_unit and shape else 1
        return (count,), count
    sections = sections_of(stream)
    units = sum(sections) // shards
    if shape[:1] != (units,):
        raise SpecError(
            f"layer {part.layer_id} stream {stream.name!r}: each of {rank_count} tensor-parallel ranks keeps {units} "
            f"of {sum(sections)} units, and the rows have the shape {shape}",
            hint="build the layout from rank_spec() of the model's spec",
        )
    return sections, units
