"""What a step that failed may have destroyed beside its own rows: pages it was to fill by copies.

A copy can be repeated only as long as its source is what it was. The step may have overwritten a source, because the
page had been given up and belongs to somebody else now, or because it is a state that the step advances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.sequence import Sequence, Tables
from kvist.step import NO_PAGE, IntArray, Step, overlaps, present

#: Per group and page, is it lost?
Marks = list[npt.NDArray[np.bool_]]


def lost_pages(layout: Layout, step: Step, tables: Tables) -> list[IntArray]:
    """Per group, destinations of the step's copies whose source the step may have overwritten. Empty list for none.

    tables: as they were when the step was committed, in what concerns its rows.
    """
    if not any(map(len, step.copies)):
        return []
    begins, ends = [], []
    for group in layout.groups:
        pages = _written(layout, step, group.index, tables.arrays[group.index]).astype(np.int64)
        begins.append(pages * group.page_bytes)
        ends.append((pages + 1) * group.page_bytes)
    begin, end = np.concatenate(begins), np.concatenate(ends)
    lost = []
    for group, pairs in zip(layout.groups, step.copies):
        at = pairs[:, 0].astype(np.int64) * group.page_bytes
        lost.append(pairs[overlaps(at, at + group.page_bytes, begin, end), 1])
    return lost if any(map(len, lost)) else []


def _written(layout: Layout, step: Step, group: int, table: IntArray) -> IntArray:
    """Pages of a group whose rows the step may overwrite. Where it goes on writing behind rows that are there, those
    stay, but for states and rings."""
    exact, block = layout.groups[group].exact, layout.block_tokens
    ring = bool(layout.groups[group].retention.ring)
    rows = [step.copies[group][:, 1], *(each[group] for each in (step.fresh,) if each)]
    if step.saves:
        rows.append(step.saves[group][:, 1])
    starts = step.lengths - step.query_lengths
    for slot, start, end in zip(step.slots.tolist(), starts.tolist(), step.lengths.tolist()):
        first, last = (0, 1 + end - start) if exact else (-(-start // block), -(-end // block))
        if ring:
            first = start // block
        rows.append(present(table[slot, first:last]))
    return np.concatenate(rows)


def give_up(
    lost: list[IntArray],
    layout: Layout,
    tree: PrefixTree,
    ledger: Ledger,
    tables: Tables,
    sequences: Iterable[Sequence],
    park: Callable[[Sequence], None],
) -> None:
    """Take lost pages from whoever has them: sequences are parked, what is cached is removed. No step in flight may
    use the pages."""
    marks: Marks = []
    for group, gone in zip(layout.groups, lost):
        # The last entry is what NO_PAGE, -1, finds.
        mark = np.zeros(layout.arena_bytes // group.page_bytes + 1, np.bool_)
        mark[gone] = True
        marks.append(mark)
    exact = [group.index for group in layout.groups if group.exact]
    for sequence in sequences:
        named = sequence.sources.pages if sequence.sources is not None else [NO_PAGE] * len(marks)
        taken = [(group, each[place]) for place, group in enumerate(exact) for each in sequence.snapshots.values()]
        if (
            any(mark[table[sequence.slot]].any() for mark, table in zip(marks, tables.arrays))
            or any(mark[page] for mark, page in zip(marks, named))
            or any(marks[group][page] for group, page in taken)
        ):
            assert not sequence.in_flight
            park(sequence)
    for extent in list(tree.extents()):
        if extent.alive:
            _clean(extent, marks, tree, ledger)


def _clean(extent: Extent, marks: Marks, tree: PrefixTree, ledger: Ledger) -> None:
    """Remove lost pages of one extent from the index; of dense groups also everything behind them."""
    keep = extent.block_count
    for group, (mark, row) in enumerate(zip(marks, extent.pages)):
        gone = np.flatnonzero(mark[row])
        if not len(gone):
            continue
        if ledger.sparse[group]:
            pages = row[gone]
            row[gone] = NO_PAGE
            ledger.unpublish(group, pages)
        else:
            keep = min(keep, int(gone[0]))
    if keep < extent.block_count:
        order = [extent]
        for above in order:
            order.extend(above.children.values())
        for each in reversed(order):
            for group, row in enumerate(tree.truncate(each, keep if each is extent else 0)):
                ledger.unpublish(group, present(row))
