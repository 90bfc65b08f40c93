"""Making computed blocks findable, and keeping one physical copy of a block."""

from __future__ import annotations

import attrs
import numpy as np

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.prefix.tree import Cursor, Inserted, PrefixTree
from kvist.sequence import Sequence, Tables
from kvist.step import NO_PAGE, IntArray, present

#: Long enough that any retention that ever drops a block drops one by then.
_FAR = 1 << 30


@attrs.frozen
class RestorePolicy:
    """At which positions the groups that drop blocks keep what resuming there requires.

    Always at the end of a prompt and at the end of a turn; with ``every_blocks`` also at each multiple of so many
    blocks, as far as the token ids are known by then. Groups that never drop a block can resume anywhere and cost
    nothing more.
    """

    every_blocks: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.every_blocks is not None and self.every_blocks < 1:
            raise SpecError(f"RestorePolicy(every_blocks={self.every_blocks}) must be at least 1, or None for never")

    def points(self, begin: int, end: int, final: bool, block_tokens: int) -> list[int]:
        """Positions in ``(begin, end]`` to keep; ``final`` says that ``end`` ends a prompt or a turn.

        With the end itself comes the position before it, the last one that the same tokens can resume at.
        """
        points = []
        if self.every_blocks is not None:
            unit = self.every_blocks * block_tokens
            points = list(range((begin // unit + 1) * unit, end + 1, unit))
        if final:
            points += [position for position in (end - 1, end) if position > 0]
        return points


class Publisher:
    """Puts a sequence's computed blocks into the prefix tree. Owns nothing; mutates tree, ledger and tables."""

    def __init__(self, layout: Layout, tree: PrefixTree, ledger: Ledger, tables: Tables, policy: RestorePolicy) -> None:
        self._block = layout.block_tokens
        self._groups = layout.groups
        self._tree = tree
        self._ledger = ledger
        self._tables = tables
        self._policy = policy
        #: Per group: does it drop blocks while a sequence runs?
        self.drops = [bool(group.retention.droppable(_FAR, 0, self._block)) for group in layout.groups]
        self._any_drops = any(self.drops)
        #: Do running sequences pass restore points?
        self.at_intervals = self._any_drops and policy.every_blocks is not None

    def publish(self, sequence: Sequence, *, ended: bool) -> None:
        """Publish what is committed and new: whole blocks, and when the sequence has ``ended`` the open last one too.

        Where a whole block is known already, the sequence's table is switched to the known page. The sequence must
        not be in a step.
        """
        end = sequence.committed
        if not ended:
            end -= end % self._block
        if end <= sequence.published:
            return
        cursor = sequence.cursor
        if cursor is not None and not cursor.valid:
            cursor = None
        begin = cursor.length if cursor is not None else 0
        run = sequence.tokens_from(begin)[: end - begin]
        first = 0 if self._any_drops else begin // self._block
        own, offered = self._pages(sequence, end, ended, first)
        result = self._tree.insert(sequence.scope, run, offered[:, begin // self._block - first :], cursor)
        ledger = self._ledger
        if result.replaced is not None:
            for group, row in enumerate(result.replaced):
                ledger.unpublish(group, present(row))
                if int(row[0]) != NO_PAGE:
                    # Somebody could resume in the block that ours replaces, and still can.
                    offered[group, result.added[0] - first] = own[group, result.added[0] - first]
                    result.tip.pages[group, result.added[0] - result.tip.start // self._block] = own[
                        group, result.added[0] - first
                    ]
        added, stop = result.added
        if added < stop:
            for group, row in enumerate(offered[:, added - stop :]):
                ledger.publish(group, present(row) if self._any_drops else row)
        if self._any_drops or result.covered_blocks > sequence.published // self._block:
            self._merge(sequence, result, own, offered, first)
        sequence.published = end
        sequence.tip = result.tip
        sequence.cursor = Cursor.at(result.tip, end - end % self._block)
        self._tree.touch(result.tip, end)
        if self._any_drops:
            # Blocks may have been published without any page of this sequence.
            self._tree.offer(result.tip)

    def _pages(self, sequence: Sequence, end: int, ended: bool, first: int) -> tuple[IntArray, IntArray]:
        """The sequence's own pages from block ``first`` up to position ``end``, and those to publish: NO_PAGE where a
        dropping group does not keep a block for a restore point. int32 ``[groups, blocks]``."""
        blocks = sequence.blocks_for(end)
        if len(self._groups) == 1 and not self._any_drops:
            own = self._tables.arrays[0][sequence.slot : sequence.slot + 1, first:blocks]
            return own, own
        own = np.stack([table[sequence.slot, first:blocks] for table in self._tables.arrays])
        if not self._any_drops:
            return own, own
        offered = own.copy()
        final = ended or sequence.computed >= sequence.prompt_length > sequence.published
        points = self._policy.points(sequence.published, end, final, self._block)
        for group in self._groups:
            if self.drops[group.index]:
                keep = np.zeros(blocks, np.bool_)
                for point in points:
                    for low, high in group.retention.required(point, self._block):
                        keep[low:high] = True
                offered[group.index, ~keep[first:]] = NO_PAGE
        return own, offered

    def _merge(self, sequence: Sequence, result: Inserted, own: IntArray, offered: IntArray, base: int) -> None:
        """Fill gaps of known blocks with offered pages, and use known pages instead of own copies.

        own, offered: as from ``_pages``, from block ``base`` on.
        """
        first, covered = sequence.published // self._block, result.covered_blocks
        lowest = [first] * len(offered)
        for group, row in enumerate(offered):
            if self.drops[group]:
                kept = np.flatnonzero(row != NO_PAGE)
                lowest[group] = min(first, base + int(kept[0])) if len(kept) else covered
        if min(lowest) >= covered:
            return
        node = result.tip
        while node.parent is not None:
            node_first = node.start // self._block
            node_end = min(node_first + node.block_count, covered)
            for group in range(len(offered)):
                low = max(lowest[group], node_first)
                if low < node_end:
                    known = node.pages[group, low - node_first : node_end - node_first]
                    part = slice(low - base, node_end - base)
                    self._merge_run(sequence, group, low, known, own[group, part], offered[group, part])
            if node_first <= min(lowest):
                return
            node = node.parent

    def _merge_run(
        self, sequence: Sequence, group: int, first: int, known: IntArray, own: IntArray, offered: IntArray
    ) -> None:
        """``known`` is a writable view of the extent's pages for the blocks from ``first`` on."""
        gaps = (known == NO_PAGE) & (offered != NO_PAGE)
        if gaps.any():
            known[gaps] = offered[gaps]
            self._ledger.publish(group, offered[gaps])
        twins = (known != own) & (own != NO_PAGE) & (known != NO_PAGE)
        if twins.any():
            # Copies first: ``own`` may be a view of the table row.
            copies, originals = own[twins], known[twins]
            self._ledger.lease(group, originals)
            self._tables.arrays[group][sequence.slot, first + np.flatnonzero(twins)] = originals
            self._ledger.release(group, copies)
