"""Making computed blocks findable, and keeping one physical copy of a block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvist.keeper import Keeper
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence, Tables
from kvist.step import NO_PAGE, IntArray, present
from kvist.wishes import NO_WISH, Wish, spans


class Publisher:
    """Puts a sequence's computed blocks into the prefix tree. Owns nothing; mutates tree, ledger and tables."""

    def __init__(self, layout: Layout, keeper: Keeper, ledger: Ledger, tables: Tables, policy: RestorePolicy) -> None:
        self._block = layout.block_tokens
        self._keeper = keeper
        self._tree = keeper.tree
        self._ledger = ledger
        self._tables = tables
        self._dense = [group.index for group in layout.groups if not group.sparse]
        self._windows = [group for group in layout.groups if group.sparse and not group.exact]
        self._window_groups = [group.index for group in self._windows]
        self._states = [group.index for group in layout.groups if group.exact]
        self._policy = policy
        self._unit = policy.every(self._block)
        #: Do running sequences pass restore points at intervals?
        self.at_intervals = bool(self._unit) and any(group.sparse for group in layout.groups)

    def publish(self, sequence: Sequence, *, ended: bool, switch: bool = True) -> None:
        """Publish what is committed and new: whole blocks, and when the sequence has ``ended`` the open last one too.

        Where a whole block is known already, the sequence's table is changed to the known page. With ``switch`` false,
        because a step that uses the table is in flight, such a sequence waits for its next publication.
        """
        if not sequence.shares:
            return
        start, end = sequence.published, sequence.committed
        if not ended:
            end -= end % self._block
        if end > start:
            if sequence.wishes or self._tree.wished:
                self._insert_by_wish(sequence, start, end, switch)
            else:
                self._insert(sequence, start, end, switch)
        published = sequence.published
        # Of what came from elsewhere the blocks may have been published before, by others, without their windows.
        passed = published > start or (bool(sequence.points) and sequence.points[0] <= published)
        if self._windows and (passed or ended):
            # An end at a block boundary was published before, and not known to be one.
            self._keep_windows(sequence, start, published, ended=ended, switch=switch)
        if sequence.snapshots:
            self._file_snapshots(sequence, published)

    def leave(self, sequence: Sequence) -> None:
        """Publish what is sure of a sequence whose last step has failed half way: its whole blocks, to be resumed at
        their end as far as the windows are still there. The step may have written to the open block, and over states.
        """
        self.publish(sequence, ended=False)
        if self._windows and sequence.shares:
            self._keep_windows(sequence, sequence.published, sequence.published, ended=True, switch=True)

    def _insert_by_wish(self, sequence: Sequence, start: int, end: int, switch: bool) -> None:
        """One insertion for each wish, because an extent has one, and known blocks get it if theirs is weaker."""
        block = self._block
        for low, high, wish in spans(sequence.wishes, start // block, -(-end // block)):
            stop = min(end, high * block)
            self._insert(sequence, low * block, stop, switch, wish)
            if sequence.tip is not None:
                self._tree.wish(sequence.tip, low, min(high, sequence.shared), wish)
            if sequence.published < stop:
                return

    def _insert(self, sequence: Sequence, start: int, end: int, switch: bool, wish: Wish = NO_WISH) -> None:
        block, tree, tip = self._block, self._tree, sequence.tip
        run = sequence.tokens_from(start)[: end - start]
        if not switch and sum(matched for _, matched in tree.walk(sequence.scope, run, tip)) >= block:
            return
        first, stop = start // block, -(-end // block)
        tables, slot = self._tables.arrays, sequence.slot
        if len(tables) == len(self._dense) == 1:
            pages = tables[0][slot : slot + 1, first:stop]
        else:
            pages = np.empty((len(tables), stop - first), np.int32)
            # Half the time of full().
            pages.fill(NO_PAGE)
            for group in self._dense:
                pages[group] = tables[group][slot, first:stop]
        result = tree.insert(sequence.scope, run, pages, tip, wish)
        if result.added and self._keeper.learns and sequence.first_key is None:
            known = result.covered * block
            sequence.first_key = self._keeper.key_of(start + known, run[known : known + block])
        new_tip = result.tip
        if new_tip is None:
            return
        if new_tip is not tip:
            tree.hold(new_tip)
            if tip is not None:
                tree.release(tip)
            sequence.tip = new_tip
        sequence.published = published = new_tip.start + new_tip.length
        sequence.shared = -(-published // block)
        if result.covered:
            self._use_known(sequence, first, first + result.covered)
        if result.replaced is not None:
            for group, row in enumerate(result.replaced):
                self._ledger.unpublish(group, present(row))
                if row[0] != NO_PAGE and group in self._window_groups:
                    # Somebody could resume in the block that ours replaces, and still can.
                    self._file(sequence, group, first + result.covered, first + result.covered + 1, switch)

    def _use_known(self, sequence: Sequence, low: int, high: int) -> None:
        """Give up own pages of dense groups for the tree's, for blocks ``low .. high - 1``."""
        self._ledger.note_peaks(self._tree.idle_blocks)
        for _, first, known in self._above(sequence.tip, low, high):
            end = first + known.shape[1]
            for group in self._dense:
                row = self._tables.arrays[group][sequence.slot]
                self._ledger.release(group, row[first:end])
                row[first:end] = known[group]

    def _keep_windows(self, sequence: Sequence, start: int, end: int, *, ended: bool, switch: bool) -> None:
        """Publish what resuming at the restore points in ``(start, end]`` requires, as far as it is still there."""
        points = sequence.points
        due = [point for point in points if point <= end]
        if due:
            sequence.points = points[len(due) :]
        if self._unit:
            due += range((start // self._unit + 1) * self._unit, end + 1, self._unit)
        if ended:
            due += self._policy.end_points(end, self._block)
        for group in self._windows:
            spans = {span for point in due for span in group.retention.required(point, self._block)}
            for low, high in spans:
                self._file(sequence, group.index, low, min(high, sequence.shared), switch)

    def _file(self, sequence: Sequence, group: int, low: int, high: int, switch: bool) -> None:
        """Let the tree have the sequence's pages of a sparse group where it has none, and use the tree's where it has
        one and ``switch`` is true, for published blocks ``low .. high - 1``."""
        table = self._tables.arrays[group][sequence.slot]
        for extent, first, pages in self._above(sequence.tip, low, high):
            known, own = pages[group], table[first : first + pages.shape[1]]
            differs = known != own
            if not np.count_nonzero(differs):
                continue
            gaps = differs & (known == NO_PAGE)
            count = np.count_nonzero(gaps)
            if count:
                filed = own if count == len(own) else own[gaps]
                known[gaps] = filed
                self._ledger.publish(group, filed)
                if self._tree.watcher is not None:
                    offset = first - extent.start // self._block
                    self._tree.watcher.filed(extent, group, np.flatnonzero(gaps) + offset)
                if count == len(own):
                    continue
                differs ^= gaps
            twins = differs & (own != NO_PAGE)
            if switch and np.count_nonzero(twins):
                copies = own[twins]
                self._ledger.lease(group, known[twins])
                own[twins] = known[twins]
                self._ledger.release(group, copies)

    def _file_snapshots(self, sequence: Sequence, published: int) -> None:
        """Hand snapshots of states over to the tree, or free them where it has one already."""
        for position in [p for p in sequence.snapshots if p <= published]:
            taken = sequence.snapshots.pop(position)
            last = -(-position // self._block) - 1
            for extent, _, pages in self._above(sequence.tip, last, last + 1):
                for group, page in zip(self._states, taken):
                    if pages[group, 0] == NO_PAGE and (position % self._block == 0 or position == published):
                        pages[group, 0] = page
                        self._ledger.publish_one(group, page)
                        if self._tree.watcher is not None:
                            self._tree.watcher.filed(extent, group, np.array([last - extent.start // self._block]))
            self.drop_snapshot(taken)

    def drop_snapshot(self, pages: list[int]) -> None:
        """Give up the sequence's lease on a snapshot, one page for each exact group."""
        for group, page in zip(self._states, pages):
            self._ledger.release_one(group, page)

    def _above(self, tip: Extent | None, low: int, high: int) -> Iterator[tuple[Extent, int, IntArray]]:
        """Blocks ``low .. high - 1`` on the path to ``tip``: extent and first block of each piece, and a writable view
        of its pages ``[groups, n]``. Deepest piece first."""
        node = tip
        while node is not None and node.parent is not None and low < high:
            first = node.start // self._block
            begin = max(low, first)
            if begin < high:
                yield node, begin, node.pages[:, begin - first : high - first]
                high = begin
            node = node.parent
