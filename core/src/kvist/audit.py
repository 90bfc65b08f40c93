"""Recounting everything from scratch: what ``manager.check()`` compares the books with."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.sequence import Partial, Sequence, Tables
from kvist.step import NO_PAGE, IntArray, present


def faults_of(
    ledger: Ledger,
    tree: PrefixTree,
    tables: Tables,
    sequences: SequenceOf[Sequence],
    partials: SequenceOf[Partial],
) -> list[str]:
    """Violated invariants in words; empty when all is well. Changes nothing."""
    leases, published = [], []
    extents = list(tree.extents())
    for group, table in enumerate(tables.arrays):
        rows = [table[sequence.slot, : sequence.block_count] for sequence in sequences]
        rows.append(np.array([holder.pages[group] for holder in partials], np.int32))
        leases.append(_present(rows))
        published.append(_present([extent.pages[group] for extent in extents]))
    faults = ledger.check(leases, published)
    faults += _table_faults(tables, sequences)
    faults += _tree_faults(tree, extents)
    faults += _candidate_faults(ledger, tree, extents)
    return faults


def _present(rows: list[IntArray]) -> IntArray:
    return present(np.concatenate(rows)) if rows else np.empty(0, np.int32)


def _table_faults(tables: Tables, sequences: SequenceOf[Sequence]) -> list[str]:
    faults = []
    used = {sequence.slot: sequence.block_count for sequence in sequences}
    for table in tables.arrays:
        for slot, row in enumerate(table):
            if (row[used.get(slot, 0) :] != NO_PAGE).any():
                faults.append(f"table row {slot} names a page beyond its sequence's blocks")
    for sequence in sequences:
        if not sequence.committed <= sequence.computed <= sequence.reserved:
            faults.append(f"slot {sequence.slot}: committed <= computed <= reserved does not hold")
    return faults


def _tree_faults(tree: PrefixTree, extents: list[Extent]) -> list[str]:
    faults = []
    if len(extents) != tree.extent_count:
        faults.append(f"the prefix tree has {len(extents)} extents and counts {tree.extent_count}")
    for node in [*tree.roots.values(), *extents]:
        if sorted(node.children) != node.order:
            faults.append(f"extent at {node.start}: the order of its children is wrong")
        if node.parent is not None and not node.length:
            faults.append(f"extent at {node.start} is empty")
        if node.parent is None and not node.children:
            faults.append("an empty root was left behind")
        if node.children and node.is_open:
            faults.append(f"extent at {node.start} has children behind an open block")
        for key, child in node.children.items():
            if child.parent is not node or child.key != key or child.start != node.end or not child.alive:
                faults.append(f"extent at {child.start}: key, parent or start does not fit its place")
    return faults


def _candidate_faults(ledger: Ledger, tree: PrefixTree, extents: list[Extent]) -> list[str]:
    """Every leaf whose last block nobody holds can be found for eviction."""
    offered = {id(extent) for _, _, extent in tree.candidates} | {id(extent) for extent in tree.set_aside}
    faults = []
    for extent in extents:
        if not extent.children and id(extent) not in offered:
            last = extent.pages[:, -1]
            if not any(page != NO_PAGE and ledger.leases[group][page] for group, page in enumerate(last)):
                faults.append(f"extent at {extent.start} is idle and cannot be found for eviction")
    return faults
