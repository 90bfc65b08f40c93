"""From two page tables and two lists of pages to runs of bytes: which bytes of the sender go where. Pure functions.

Blocks are positional: a list of pages has one entry for each block ordinal, NO_PAGE for "not here". What both sides
have is copied, so reuse on the receiver, windows, chunks and interleaved blocks need no other rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import TransferError
from kvist.step import NO_PAGE, IntArray
from kvist.transfer.compatibility import differences, shared_parts
from kvist.transfer.pagetable import GroupTable, PageTable, PartTable
from kvist.transfer.transport import Fragments, IncompatibleError, Int64Array


@attrs.frozen(eq=False)
class _Pattern:
    """Runs of bytes to copy for one piece of a block. All int64 ``[n]``: offsets in the sender's and the receiver's
    page for its first piece, how much further those of the next piece are, and the bytes."""

    sources: Int64Array
    destinations: Int64Array
    source_steps: Int64Array
    destination_steps: Int64Array
    byte_counts: Int64Array


@attrs.frozen(eq=False)
class _GroupMapping:
    """One group on both sides. pairs: parts of the sender and the receiver."""

    source: int
    destination: int
    sender: GroupTable
    receiver: GroupTable
    pairs: list[tuple[PartTable, PartTable]]


def interleave(pages: IntArray, rank: int, count: int, block_count: int) -> IntArray:
    """The positional list of ``block_count`` blocks of a rank that keeps every ``count``-th one from ``rank`` on, from
    its own list of pages."""
    made: IntArray = np.full(block_count, NO_PAGE, np.int32)
    places = made[rank::count]
    places[: len(pages)] = pages[: len(places)]
    return made


class Mapping:
    """How ``sender``'s pages become ``receiver``'s. Made once per pair of peers; raises IncompatibleError with every
    difference that forbids it."""

    def __init__(self, sender: PageTable, receiver: PageTable) -> None:
        if found := differences(sender, receiver):
            raise IncompatibleError(
                "the caches do not fit together: " + "; ".join(found),
                hint="build both from the same model, dtype and page layout",
            )
        self._sender, self._receiver = sender, receiver
        #: Tokens of a piece: the longest run that is whole on both sides.
        self._piece_tokens = math.gcd(sender.block_tokens, receiver.block_tokens)
        self._groups: dict[tuple[int, int], _GroupMapping] = {}
        sources = {id(group): index for index, group in enumerate(sender.groups)}
        destinations = {id(group): index for index, group in enumerate(receiver.groups)}
        for theirs, group, other, part in shared_parts(sender, receiver):
            key = sources[id(theirs)], destinations[id(group)]
            made = self._groups.setdefault(key, _GroupMapping(*key, theirs, group, []))
            made.pairs.append((other, part))
        self._patterns: dict[tuple[tuple[int, int], int], _Pattern] = {}
        #: Choices of a sender among replicas repeat after so many.
        replicas = (part.replicas for group in self._groups.values() for part, _ in group.pairs)
        self._turns = math.lcm(sender.context_count, *replicas) * sender.context_count

    def fragments(
        self,
        source_pages: Sequence[IntArray | None],
        destination_pages: Sequence[IntArray],
        turn: int = 0,
        span: tuple[int, int] | None = None,
    ) -> Fragments:
        """What to copy, in bytes of the two arenas.

        source_pages, destination_pages: per group of the sender and the receiver int32 ``[blocks]``, positional; of
            groups with a single page, that page. ``None`` leaves a group of the sender out.
        turn: which of the ranks that have the same bytes sends them; any number, the same for all senders of one
            request.
        span: token positions ``(begin, end)``, the first at a block of both sides; all by default. Does not concern
            groups with a single page.
        Raises TransferError when the receiver has a page for a block that this sender ought to have and does not.
        """
        made = []
        for group in self._groups.values():
            pages = source_pages[group.source]
            if pages is not None:
                made.append(self._copy(group, pages, destination_pages[group.destination], turn, span))
        sources, destinations, counts = (
            np.concatenate([each[index] for each in made]) if made else np.empty(0, np.int64) for index in range(3)
        )
        sources, destinations, counts = merged(sources, destinations, counts)
        return Fragments(sources, destinations, counts)

    def _copy(
        self,
        group: _GroupMapping,
        source_pages: IntArray,
        destination_pages: IntArray,
        turn: int,
        span: tuple[int, int] | None,
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        sender, receiver = group.sender, group.receiver
        if sender.single:
            sources, source_at = source_pages[:1], np.zeros(1, np.int64)
            destinations, destination_at = destination_pages[:1], np.zeros(1, np.int64)
            ours = np.ones(1, np.bool_)
        else:
            sources, source_at = _pieces(source_pages, self._sender.block_tokens // self._piece_tokens)
            destinations, destination_at = _pieces(destination_pages, self._receiver.block_tokens // self._piece_tokens)
            count = self._sender.context_count
            per_block = self._sender.block_tokens // self._piece_tokens
            ours = np.arange(len(destinations)) // per_block % count == self._sender.context_rank
            if span is not None:
                ours[: span[0] // self._piece_tokens] = False
                ours[-(-span[1] // self._piece_tokens) :] = False
        length = min(len(sources), len(destinations))
        wanted = (destinations != NO_PAGE) & ours
        there = np.zeros(len(destinations), np.bool_)
        there[:length] = sources[:length] != NO_PAGE
        missing = np.flatnonzero(wanted & ~there)
        if len(missing):
            per_block = 1 if sender.single else self._receiver.block_tokens // self._piece_tokens
            raise TransferError(
                f"group {receiver.name}: block {int(missing[0]) // per_block} is wanted and not here",
                hint="ask for no more blocks than the sender has computed",
            )
        chosen = np.flatnonzero(wanted)
        pattern = self._pattern(group, turn)
        begin = sources[chosen].astype(np.int64) * sender.page_bytes
        to = destinations[chosen].astype(np.int64) * receiver.page_bytes
        return (
            (begin[:, None] + pattern.sources + source_at[chosen, None] * pattern.source_steps).ravel(),
            (to[:, None] + pattern.destinations + destination_at[chosen, None] * pattern.destination_steps).ravel(),
            np.broadcast_to(pattern.byte_counts, (len(chosen), len(pattern.byte_counts))).ravel(),
        )

    def _pattern(self, group: _GroupMapping, turn: int) -> _Pattern:
        key = (group.source, group.destination), turn % self._turns
        if key not in self._patterns:
            runs = [run for part, other in group.pairs for run in self._runs(group, part, other, turn)]
            runs.sort(key=lambda run: run[1])
            columns = np.array(runs, np.int64).reshape(-1, 5).T
            if self._sender.block_tokens == self._receiver.block_tokens:
                # There is no second piece, and no step to differ.
                columns[2:4] = 0
            self._patterns[key] = _Pattern(*_joined(columns))
        return self._patterns[key]

    def _runs(
        self, group: _GroupMapping, part: PartTable, other: PartTable, turn: int
    ) -> list[tuple[int, int, int, int, int]]:
        """Runs of one pair of parts, as the rows of a pattern. The sender's is ``part``."""
        replicas, replica = part.replicas, part.replica
        if group.sender.single:
            # Blocks are split over context-parallel ranks, what is kept once per sequence is not.
            replicas *= self._sender.context_count
            replica = replica * self._sender.context_count + self._sender.context_rank
        if (other.replica + turn) % replicas != replica:
            return []
        offset, other_offset = part.offset, other.offset
        if not part.run_rows:
            return [(offset, other_offset, 0, 0, part.byte_count)] if part.shard == other.shard else []
        rows = part.row_count
        if not group.sender.single:
            # The rows of a piece; of a ring all, because pieces are then blocks.
            rows = min(part.row_count, other.row_count)
        unit = part.unit_bytes
        if part.by_unit:
            # Unit after unit: a unit's rows of one piece are one run.
            steps = rows * unit, rows * unit
            strides, count = (part.row_count * unit, other.row_count * unit), 1
            length = rows * unit
        else:
            steps = rows * part.row_bytes, rows * other.row_bytes
            strides, count = (unit, unit), rows
            length = unit
        made = []
        for begin, end, here in part.intervals:
            for other_begin, other_end, there in other.intervals:
                low, high = max(begin, other_begin), min(end, other_end)
                for at in range(low, high) if part.by_unit else (low,) if low < high else ():
                    source = offset + (here + at - begin) * strides[0]
                    destination = other_offset + (there + at - other_begin) * strides[1]
                    size = length if part.by_unit else (high - low) * length
                    for row in range(count):
                        made.append((source + row * part.row_bytes, destination + row * other.row_bytes, *steps, size))
        return made


def merged(
    sources: Int64Array, destinations: Int64Array, counts: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same copies, with runs that follow each other on both sides made one."""
    if not len(counts):
        return sources, destinations, counts
    apart = (sources[:-1] + counts[:-1] != sources[1:]) | (destinations[:-1] + counts[:-1] != destinations[1:])
    begins = np.concatenate(([0], np.flatnonzero(apart) + 1))
    if len(begins) == len(counts):
        return sources, destinations, counts
    return sources[begins], destinations[begins], np.add.reduceat(counts, begins)


def _joined(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Runs of a pattern that follow each other in every piece made one; ``columns`` as a pattern's fields."""
    sources, destinations, _, _, counts = columns
    if not len(counts):
        return columns
    same = (columns[2:4, :-1] == columns[2:4, 1:]).all(axis=0)
    follows = (sources[:-1] + counts[:-1] == sources[1:]) & (destinations[:-1] + counts[:-1] == destinations[1:])
    begins = np.concatenate(([0], np.flatnonzero(~(same & follows)) + 1))
    made = columns[:, begins].copy()
    made[4] = np.add.reduceat(counts, begins)
    return made


def _pieces(pages: IntArray, per_block: int) -> tuple[IntArray, Int64Array]:
    """The page of each piece, and which piece of its block it is."""
    if per_block == 1:
        return pages, np.zeros(len(pages), np.int64)
    return np.repeat(pages, per_block), np.tile(np.arange(per_block), len(pages))


def wanted_bytes(
    receiver: PageTable, senders: Sequence[PageTable], pages: Sequence[IntArray], length: int | None = None
) -> int:
    """Bytes that all ``senders`` together write to the receiver's ``pages``, as far as they hold ``length`` tokens:
    what the sum of their reports is compared with."""
    known = {part.key for sender in senders for group in sender.groups for part in group.parts}
    piece_tokens = math.gcd(receiver.block_tokens, *(sender.block_tokens for sender in senders))
    total = 0
    for group, ids in zip(receiver.groups, pages):
        count, per_block = int(np.count_nonzero(ids != NO_PAGE)), 1
        if not group.single:
            per_block = receiver.block_tokens // piece_tokens
            there = np.repeat(ids, per_block) != NO_PAGE
            count = int(np.count_nonzero(there if length is None else there[: -(-length // piece_tokens)]))
        for part in group.parts:
            if part.key in known:
                whole = part.row_count * part.row_bytes if part.run_rows else part.byte_count
                total += count * (whole // per_block)
    return total
