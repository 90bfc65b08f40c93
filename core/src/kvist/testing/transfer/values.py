"""Caches of ranks as plain bytes, filled by the written rules of each page layout: the oracle of transfers.

Nothing here is shared with the code that computes what to copy, beside the layouts' groups, parts and offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from kvist.layout import Layout, Order, PageLayout, RowMajor
from kvist.spec import CacheSpec, Heads, Replicated, Stream, ceil_div
from kvist.step import IntArray
from kvist.transfer.pagetable import Placement, describe
from kvist.transfer.sharding import rank_spec
from kvist.transfer.transport import Fragments

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: A rank that keeps everything.
ALONE = Placement()
#: What memory holds that nobody wrote.
JUNK = 0xA5


@attrs.frozen
class UnitMajor:
    """``[unit, row, rest]``, without runs."""

    tag: str = "unit-major-test"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return row_count * stream.row.row_bytes

    def order(self, stream: Stream, row_count: int) -> Order | None:
        return Order(by_unit=True)


@attrs.frozen
class KeyTiles:
    """Keys ``[unit, tile, element, 16 rows]``, one tile as wide as the block where 16 does not divide it; all else
    ``[unit, row, rest]``."""

    tag: str = "key-tiles-test"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return row_count * stream.row.row_bytes

    def order(self, stream: Stream, row_count: int) -> Order | None:
        tile = row_count if row_count % 16 else 16
        return Order(by_unit=True, run_rows=tile if stream.name == "k" else 1)


@attrs.frozen
class Opaque:
    """Row-major in truth, and does not say so."""

    tag: str = "opaque-test"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return row_count * stream.row.row_bytes


def arranged(page_layout: PageLayout, stream: Stream, rows: Bytes) -> Bytes:
    """Bytes of a part with these rows, uint8 ``[rows, units, bytes of a unit]``."""
    if isinstance(page_layout, RowMajor | Opaque):
        return rows.reshape(-1)
    by_unit = rows.transpose(1, 0, 2)
    if isinstance(page_layout, KeyTiles) and stream.name == "k":
        width = 16 if len(rows) % 16 == 0 else len(rows)
        elements = by_unit.reshape(by_unit.shape[0], len(rows) // width, width, -1, stream.row.element_bytes)
        return elements.transpose(0, 1, 3, 2, 4).reshape(-1)
    return by_unit.reshape(-1)


class Model:
    """Random rows of a whole model's cache for one request of ``length`` tokens: per domain, layer and stream uint8
    ``[rows, units, bytes of a unit]``; rows that do not exist are random too."""

    def __init__(self, *specs: CacheSpec, length: int, seed: int = 0) -> None:
        self.specs, self.length = specs, length
        rng = np.random.default_rng(seed)
        self.rows: dict[tuple[str, int, str], Bytes] = {}
        for spec in specs:
            for layer in spec.layers:
                for stream in layer.streams:
                    count = 1 if stream.retention.exact else ceil_div(length, 64) * 64 // stream.tokens_per_row + 64
                    units = stream.row.shape[0] if stream.row.scale is None else 1
                    shape = (count, units, stream.row.row_bytes // units)
                    self.rows[spec.domain, layer.id, stream.name] = rng.integers(0, 256, shape, np.uint8)

    def units(self, stream: Stream, tensor_rank: int, tensor_count: int) -> Any:
        """Indices of the model's units that a rank keeps, one section after the other, as ranks in the same shard
        group follow each other: with 2 heads, ranks 0 and 1 of 4 have head 0."""
        if isinstance(stream.sharding, Replicated):
            return np.arange(stream.row.shape[0] if stream.row.scale is None else 1)
        sizes = (stream.sharding.count,) if isinstance(stream.sharding, Heads) else stream.sharding.sizes
        shards = int(np.gcd.reduce([tensor_count, *sizes]))
        shard = tensor_rank // (tensor_count // shards)
        found, first = [], 0
        for size in sizes:
            share = size // shards
            found.append(first + shard * share + np.arange(share))
            first += size
        return np.concatenate(found)


class Rank:
    """One process's cache of a model: an arena full of junk, and a page for each block that it has.

    layers: the ids of those that it keeps, all by default. drafts: does it keep the models after the first? memory:
        gives uint8 memory of so many bytes, by default the process's own.
    """

    def __init__(
        self,
        model: Model,
        *,
        placement: Placement = ALONE,
        page_layout: PageLayout | None = None,
        block_tokens: int | None = None,
        layers: list[int] | None = None,
        pages: int = 200,
        seed: int = 1,
        drafts: bool = True,
        memory: Callable[[int], Bytes] | None = None,
    ) -> None:
        self.model, self.placement = model, placement
        self.page_layout: PageLayout = page_layout or RowMajor()
        specs = []
        for spec in model.specs if drafts else model.specs[:1]:
            kept = [layer for layer in spec.layers if layers is None or layer.id in layers]
            spec = attrs.evolve(spec, layers=kept, block_tokens=block_tokens or spec.block_tokens)
            specs.append(rank_spec(spec, placement.tensor_count))
        unpadded = Layout.build(specs[0], 1 << 26, self.page_layout, specs[1:])
        self.layout = Layout.build(specs[0], unpadded.slab_bytes * pages, self.page_layout, specs[1:])
        self.memory = np.empty(self.layout.arena_bytes, np.uint8) if memory is None else memory(self.layout.arena_bytes)
        self.memory[:] = JUNK
        self.counts = np.zeros(self.layout.arena_bytes, np.uint8)
        self.table = describe(self.layout, placement)
        rng = np.random.default_rng(seed)
        # Page ids in no order, and of all groups apart from each other: each group has slabs of its own.
        slabs = rng.permutation(np.arange(1, self.layout.slab_count))
        self.pages: list[IntArray] = []
        for index, group in enumerate(self.layout.groups):
            mine = slabs[index :: len(self.layout.groups)]
            per_slab = self.layout.slab_bytes // group.page_bytes
            ids = rng.permutation((mine[:, None] * per_slab + np.arange(per_slab)).ravel()).astype(np.int32)
            blocks = 1 if group.exact else ceil_div(model.length, self.layout.block_tokens)
            row = np.full(blocks, -1, np.int32)
            for ordinal in range(blocks):
                if group.exact or ordinal % placement.context_count == placement.context_rank:
                    row[ordinal] = ids[ordinal]
            self.pages.append(row)

    def drop(self, group_index: int, ordinals: Iterable[int]) -> None:
        """Have no pages for these blocks."""
        self.pages[group_index][list(ordinals)] = -1

    def parts(self) -> Iterator[tuple[int, Bytes]]:
        """Per part of every page: its begin in the arena, and the bytes that belong there."""
        for index, group in enumerate(self.layout.groups):
            for ordinal, page in enumerate(self.pages[index].tolist()):
                if page < 0:
                    continue
                for part in group.parts:
                    rows = self.model.rows[group.domain, part.layer_id, part.stream.name]
                    units = self.model.units(part.stream, self.placement.tensor_rank, self.placement.tensor_count)
                    first = ordinal * part.row_count
                    piece = rows[first : first + part.row_count][:, units]
                    yield page * group.page_bytes + part.offset, arranged(self.page_layout, part.stream, piece)

    def fill(self) -> Rank:
        """Write everything where it belongs."""
        for begin, content in self.parts():
            self.memory[begin : begin + len(content)] = content
        return self

    def receive(self, sender: Rank, fragments: Fragments) -> None:
        """Do the copies from ``sender``'s memory, and count them."""
        for source, destination, size in zip(
            fragments.sources.tolist(), fragments.destinations.tolist(), fragments.byte_counts.tolist()
        ):
            assert size > 0
            self.memory[destination : destination + size] = sender.memory[source : source + size]
            self.counts[destination : destination + size] += 1

    def verify(self) -> None:
        """Every byte of every page is right and was written once, and nothing else was touched."""
        expected = np.full_like(self.memory, JUNK)
        counts = np.zeros_like(self.counts)
        for begin, content in self.parts():
            expected[begin : begin + len(content)] = content
            counts[begin : begin + len(content)] += 1
        assert int(counts.max(initial=0)) <= 1, "the oracle's own pages overlap"
        assert np.array_equal(self.counts, counts), "not every byte was written exactly once"
        assert np.array_equal(self.memory, expected)
