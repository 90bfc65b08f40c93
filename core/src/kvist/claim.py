"""What a sequence holds: taking it from the prefix tree, sharing it with a fork, giving it back."""

from __future__ import annotations

import numpy as np

from kvist.keeper import Keeper
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.prefix.match import Match
from kvist.sequence import Sequence, Sources, Tables
from kvist.step import NO_PAGE, IntArray, present
from kvist.wishes import spans


class Claims:
    """Leases and holds of sequences. Owns nothing; mutates tree, ledger and tables."""

    def __init__(self, layout: Layout, keeper: Keeper, ledger: Ledger, tables: Tables) -> None:
        self._block = layout.block_tokens
        self._keeper = keeper
        self._tree = keeper.tree
        self._ledger = ledger
        self._tables = tables
        self._dense = [group.index for group in layout.groups if not group.sparse]
        self._windows = [group for group in layout.groups if group.sparse and not group.exact]
        self._states = [group.index for group in layout.groups if group.exact]

    def claim(self, sequence: Sequence, match: Match) -> None:
        """Give an empty sequence what ``match`` found, and set its lengths to it."""
        length = match.length
        if not length:
            return
        block, slot = self._block, sequence.slot
        whole = length // block
        boundary = whole * block
        self._tables.ensure_blocks(whole)
        for group in self._dense:
            self._tables.arrays[group][slot, :whole] = match.pages[group, :whole]
        for kept in self._windows:
            self._share_window(kept.index, slot, match.pages[kept.index], kept.retention.live(length, block), whole)
        source_of: Extent | None = None
        for extent, matched in match.path:
            start, end = extent.start, extent.start + matched
            if start < boundary <= end:
                # A claim that ends inside an extent splits it: who holds an extent holds all of it.
                sequence.tip = self._tree.split_at(extent, whole - start // block)
                sequence.claimed_mark = sequence.tip.mark
                if sequence.tip is not extent and self._keeper.learns:
                    self._keeper.left_behind(extent)
                self._tree.hold(sequence.tip)
            if end >= length:
                source_of = extent if length > boundary else sequence.tip
                break
        sequence.published, sequence.shared, sequence.block_count = boundary, whole, whole
        sequence.advance(length)
        if sequence.tip is not None and (sequence.wishes or self._tree.wished):
            for low, high, wish in spans(sequence.wishes, 0, whole):
                self._tree.wish(sequence.tip, low, high, wish)
        sources = self._sources(match.pages, length)
        if source_of is not None and any(page != NO_PAGE for page in sources):
            # What lies behind the block that is copied must stay evictable: the sequence may need its room.
            source_of = self._tree.split_at(source_of, -(-length // block) - source_of.start // block)
            sequence.sources = Sources(sources, source_of)
            self._tree.hold(source_of)
            self._lease_sources(sources)

    def fork(self, parent: Sequence, child: Sequence, own: list[IntArray]) -> list[list[tuple[int, int]]]:
        """Let ``child`` share what ``parent``, all of whose whole blocks are published, has published, and hold what
        its windows hold.

        own: new pages per group for the child's open block and states, as many as :meth:`fork_needs` said.
        Returns the pairs of pages ``(source, destination)`` that the next step has to copy, per group.
        """
        block, length, whole = self._block, parent.computed, parent.shared
        self._tables.ensure_blocks(whole + 1)
        for group in self._dense:
            table = self._tables.arrays[group]
            table[child.slot, :whole] = table[parent.slot, :whole]
        for kept in self._windows:
            row = self._tables.arrays[kept.index][parent.slot]
            self._share_window(kept.index, child.slot, row, kept.retention.live(length, block), whole)
        if parent.tip is not None:
            self._tree.hold(parent.tip)
        child.tip = parent.tip
        child.published, child.shared = whole * block, whole
        child.block_count = -(-length // block)
        child.state_columns = 1 if self._states and parent.state_columns else 0
        child.advance(length)
        pairs: list[list[tuple[int, int]]] = []
        for group, pages in enumerate(own):
            column = 0 if group in self._states else whole
            table = self._tables.arrays[group]
            pairs.append([(int(table[parent.slot, column]), page) for page in pages.tolist()])
            table[child.slot, column : column + len(pages)] = pages
        return pairs

    def fork_needs(self, parent: Sequence) -> list[int]:
        """Pages per group that one fork needs of its own."""
        needs = [1 if parent.computed % self._block else 0] * len(self._tables.arrays)
        for group in self._states:
            needs[group] = min(parent.state_columns, 1)
        return needs

    def vacate(self, sequence: Sequence) -> None:
        """Take every page and hold from a sequence. What is published and held by nobody else becomes idle."""
        slot, blocks = sequence.slot, sequence.block_count
        tables, ledger = self._tables.arrays, self._ledger
        ledger.note_peaks(self._tree.idle_blocks)
        if sequence.shared < blocks:
            for group in self._dense:
                ledger.release(group, tables[group][slot, sequence.shared : blocks])
        for kept in self._windows:
            ledger.release(kept.index, present(tables[kept.index][slot, :blocks]))
        for group in self._states:
            ledger.release(group, tables[group][slot, : sequence.state_columns])
        for position in list(sequence.snapshots):
            for group, page in zip(self._states, sequence.snapshots.pop(position)):
                ledger.release_one(group, page)
        self._tables.clear(slot, max(blocks, sequence.state_columns))
        self.drop_sources(sequence, used=True)
        if sequence.tip is not None:
            self.released(self._tree.release(sequence.tip))
            sequence.tip = None
        sequence.block_count = sequence.published = sequence.shared = sequence.state_columns = 0

    def drop_sources(self, sequence: Sequence, *, used: bool) -> None:
        """Give up the pages that the sequence's next step was to copy. ``used``: does that count as a use of the whole
        extent? Copying a few rows of one block does not; what was claimed and never computed does."""
        sources, sequence.sources = sequence.sources, None
        if sources is not None:
            for group, page in enumerate(sources.pages):
                if page != NO_PAGE and self._ledger.sparse[group]:
                    self._ledger.release_one(group, page)
            self.released(self._tree.release(sources.extent, used=used))

    def forget(self) -> list[int]:
        """Empty the prefix tree of all that nobody holds, and hide the rest. Returns the freed pages per group."""
        removed, kept = self._tree.forget()
        before = list(self._ledger.arena.taken_count)
        self.released(removed)
        for extent in kept:
            for group, sparse in enumerate(self._ledger.sparse):
                if sparse:
                    row = extent.pages[group]
                    self._ledger.unpublish(group, present(row))
                    row[:] = NO_PAGE
        return [then - now for now, then in zip(self._ledger.arena.taken_count, before)]

    def released(self, removed: list[IntArray]) -> None:
        """Give up pages ``[groups, n]`` that left the tree."""
        for pages in removed:
            for group, row in enumerate(pages):
                self._ledger.unpublish(group, present(row))

    def _share_window(
        self, group: int, slot: int, row: IntArray, spans: tuple[tuple[int, int], ...], whole: int
    ) -> None:
        for low, high in spans:
            # What is live may be more than what resuming requires, and then some of it may be gone.
            high = min(high, whole)
            if low < high:
                self._ledger.lease(group, present(row[low:high]))
                self._tables.arrays[group][slot, low:high] = row[low:high]

    def _sources(self, pages: IntArray, length: int) -> list[int]:
        """Pages to copy when resuming at ``length``, per group."""
        whole, inside = divmod(length, self._block)
        sources = [NO_PAGE] * len(pages)
        for group in self._states:
            sources[group] = int(pages[group, -(-length // self._block) - 1])
        if inside:
            for group in self._dense:
                sources[group] = int(pages[group, whole])
            for kept in self._windows:
                # The open block is live unless the window has not reached it, which cannot be.
                sources[kept.index] = int(pages[kept.index, whole])
        return sources

    def _lease_sources(self, sources: list[int]) -> None:
        for group, page in enumerate(sources):
            if page != NO_PAGE and self._ledger.sparse[group]:
                self._ledger.lease(group, np.array([page], np.int32))
