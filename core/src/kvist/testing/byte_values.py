"""The value oracle down to bytes: every stream of every layer in its own part of a page, rows that stand for several
tokens, junk everywhere else."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from kvist.layout import Group, Part
from kvist.step import IntArray
from kvist.testing.reads import reads
from kvist.testing.values import Array, Values, state_rows

_JUNK_BYTE = 0xEE


class ByteValues(Values):
    """Plays the owner of one flat arena. A row of a stream is filled with a value of its own for that layer and
    stream, so that a row read from the wrong place is noticed, and bytes between the parts must never change."""

    junk = _JUNK_BYTE

    def allocate(self) -> None:
        arena = np.full(self.layout.arena_bytes, _JUNK_BYTE, np.uint8)
        self.arena = arena
        #: Views ``[page, byte]`` of the one arena.
        self.pages = [arena[: len(arena) // g.page_bytes * g.page_bytes].reshape(-1, g.page_bytes) for g in self.groups]
        self.whole = self.pages

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.layout.groups

    def _write(self, group: Group, table: IntArray, start: int, values: Array) -> None:
        block = self.layout.block_tokens
        assert (table[start // block : -(-len(values) // block)] > 0).all(), f"{group.name}: no page to write to"
        for part in group.parts:
            ratio = part.stream.tokens_per_row
            # A row is written when its last token is computed.
            for row in range(start // ratio, len(values) // ratio):
                last = row * ratio + ratio - 1
                if last >= start:
                    self._row(group, part, table, row)[:] = _bytes_of(part, values[last])

    def _read(self, group: Group, table: IntArray, query: int, truth: Array) -> None:
        spans = reads(group.retention, query)
        for part in group.parts:
            ratio = part.stream.tokens_per_row
            # A row is read when any of its tokens is.
            touched = {position // ratio for low, high in spans for position in range(low, high)}
            for row in sorted(row for row in touched if row < (query + 1) // ratio):
                last = row * ratio + ratio - 1
                found = self._row(group, part, table, row)
                assert np.array_equal(found, _bytes_of(part, truth[last])), (
                    f"{group.name}: layer {part.layer_id} {part.stream.name}: position {query} reads a wrong row {row}"
                )

    def _turn_ring(self, group: Group, table: IntArray, start: int, truth: Array, written: Array) -> None:
        ring, block = group.retention.ring, self.layout.block_tokens
        for part in group.parts:
            assert part.stream.tokens_per_row == 1, f"{group.name}: a ring has rows of single tokens"
            size = part.stream.row.row_bytes

            def row_of(position: int, part: Part = part, size: int = size) -> Array:
                page = table[position // block]
                assert page > 0, f"{group.name}: position {position} has no page"
                begin = part.offset + position % ring * size
                row: Array = self.pages[group.index][page, begin : begin + size]
                return row

            for position in range(reads(group.retention, start)[-1][0], start):
                assert np.array_equal(row_of(position), _bytes_of(part, truth[position])), (
                    f"{group.name}: the ring of layer {part.layer_id} {part.stream.name} has lost position {position}"
                )
            for position in range(start, len(written)):
                row_of(position)[:] = _bytes_of(part, written[position])

    def _advance(self, group: Group, table: IntArray, start: int, before: int, values: Array, drafts: int) -> None:
        pages = self.pages[group.index]
        if not group.retention.draft_pages:
            numbers = state_rows(group.retention)
            # What a page remembers is its own affair: each part that has the room stands for all of it.
            for part in group.parts:
                if part.byte_count < 8 * numbers:
                    continue
                page = pages[table[0], part.offset : part.offset + 8 * numbers].view(np.int64)
                own = np.array([_mixed(part, value) for value in values], np.int64)
                self._replay(group, page, start, _mixed(part, before) if start else 0, own, drafts)
            return
        for part in group.parts:
            found = pages[table[0]][part.offset : part.offset + part.byte_count]
            expected = _bytes_of(part, before) if start else np.zeros(part.byte_count, np.uint8)
            assert np.array_equal(found, expected), f"{group.name}: {part.stream.name} before {start} is wrong"
            columns = range(1, len(values) + 1) if drafts else [0]
            for column, value in zip(columns, values if drafts else values[-1:]):
                assert table[column] > 0
                pages[table[column]][part.offset : part.offset + part.byte_count] = _bytes_of(part, value)

    def _row(self, group: Group, part: Part, table: IntArray, row: int) -> Array:
        per_block = self.layout.block_tokens // part.stream.tokens_per_row
        page, size = table[row // per_block], part.stream.row.row_bytes
        assert page > 0, f"{group.name}: row {row} is gone"
        begin = part.offset + row % per_block * size
        row_bytes: Array = self.pages[group.index][page, begin : begin + size]
        return row_bytes


def _bytes_of(part: Part, value: int) -> Array:
    """The row of one layer's stream that stands for ``value``; junk stays junk."""
    size = part.stream.row.row_bytes
    pattern = _mixed(part, value).to_bytes(8, "little", signed=True) * (size // 8 + 1)
    return np.frombuffer(pattern, np.uint8, size)


def _mixed(part: Part, value: int) -> int:
    """Another number for each layer and stream, but for junk."""
    mixed = int(value)
    if mixed < 0:
        return mixed
    return (mixed * 1009 + 31 * part.layer_id + crc32(part.stream.name.encode())) & 0x7FFFFFFFFFFFFFFF
