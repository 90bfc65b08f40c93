"""Recounting everything from scratch: what ``manager.check()`` compares the books with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

import numpy as np

from kvist.ledger import Ledger
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.sequence import Sequence, Tables
from kvist.step import NO_PAGE, IntArray, present
from kvist.tiers.level import Pin
from kvist.tiers.lower import LowerTiers


def faults_of(
    ledger: Ledger, tree: PrefixTree, tables: Tables, sequences: SequenceOf[Sequence], pins: SequenceOf[Pin] = ()
) -> list[str]:
    """Violated invariants in words; empty when all is well. Changes nothing. pins: what copies in progress keep."""
    held = _held(sequences) + [pin.extent for pin in pins if pin.extent is not None]
    extents = _extents(tree, held)
    owned, leased, published = [], [], []
    exact = [group.index for group in ledger.layout.groups if group.exact]
    for group, table in enumerate(tables.arrays):
        mine = [table[each.slot, each.shared : each.block_count] for each in sequences]
        rows = [table[each.slot, : each.state_columns if group in exact else each.block_count] for each in sequences]
        rows += [np.array(each.sources.pages[group : group + 1], np.int32) for each in sequences if each.sources]
        if group in exact:
            taken = [pages[exact.index(group)] for each in sequences for pages in each.snapshots.values()]
            rows.append(np.array(taken, np.int32))
        (rows if ledger.sparse[group] else mine).extend(pin.pages[group] for pin in pins)
        owned.append(_present(mine))
        leased.append(_present(rows))
        published.append(_present([extent.pages[group] for extent in extents]))
    faults = ledger.check(owned, leased, published)
    faults += _table_faults(tables, sequences, exact)
    faults += _tree_faults(tree, extents)
    faults += _hold_faults(tree, extents, held)
    return faults


def tier_faults(lower: LowerTiers) -> list[str]:
    """As :func:`faults_of`, for the tiers below the device."""
    faults = [f"disk: {fault}" for fault in lower.check_disk()]
    host = lower.host
    if host is not None:
        nobody = Tables(len(host.ledger.sparse))
        found = faults_of(host.ledger, host.tree, nobody, [], list(host.pins.values()))
        faults += [f"host: {fault}" for fault in found]
    if not lower.copying and any(level.pins for level in (lower.device, host) if level is not None):
        faults.append("nothing is being copied, and pages are kept for it")
    return faults


def _extents(tree: PrefixTree, held: list[Extent]) -> list[Extent]:
    """Every extent, those too that are kept by a hold only and cannot be found any more."""
    found = {id(extent): extent for extent in tree.extents()}
    for node in held:
        above: Extent | None = node
        while above is not None and above.parent is not None:
            found[id(above)] = above
            above = above.parent
    return list(found.values())


def _held(sequences: SequenceOf[Sequence]) -> list[Extent]:
    tips = [sequence.tip for sequence in sequences if sequence.tip is not None]
    return tips + [sequence.sources.extent for sequence in sequences if sequence.sources is not None]


def _present(rows: list[IntArray]) -> IntArray:
    return present(np.concatenate(rows)) if rows else np.empty(0, np.int32)


def _table_faults(tables: Tables, sequences: SequenceOf[Sequence], exact: list[int]) -> list[str]:
    faults = []
    slots = [sequence.slot for sequence in sequences]
    for group, table in enumerate(tables.arrays):
        counts = np.zeros((len(table), 1), np.int32)
        counts[slots, 0] = [s.state_columns if group in exact else s.block_count for s in sequences]
        beyond = (table != NO_PAGE) & (np.arange(table.shape[1]) >= counts)
        faults += [
            f"table row {slot} names a page beyond its sequence's blocks" for slot in np.flatnonzero(beyond.any(1))
        ]
    for sequence in sequences:
        if not sequence.committed <= sequence.computed <= sequence.reserved:
            faults.append(f"slot {sequence.slot}: committed <= computed <= reserved does not hold")
        tip = sequence.tip
        if sequence.published != (0 if tip is None else tip.end):
            faults.append(f"slot {sequence.slot}: what is published does not end where its extent ends")
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


def _hold_faults(tree: PrefixTree, extents: list[Extent], held: list[Extent]) -> list[str]:
    """Holds are those of sequences, copies and held children; every idle leaf can be found for eviction."""
    direct = Counter(id(extent) for extent in held)
    offered = {id(extent) for _, _, extent in tree.candidates} | {id(extent) for extent in tree.set_aside}
    faults = []
    idle = 0
    for extent in extents:
        holds = direct[id(extent)] + sum(1 for child in extent.children.values() if child.holds)
        if holds != extent.holds:
            faults.append(f"extent at {extent.start}: {holds} holds, the count says {extent.holds}")
        if not extent.holds:
            idle += extent.block_count
            if extent.stale:
                faults.append(f"extent at {extent.start} is stale, idle and still there")
            if not extent.children and id(extent) not in offered:
                faults.append(f"extent at {extent.start} is idle and cannot be found for eviction")
    if idle != tree.idle_blocks:
        faults.append(f"{idle} blocks are idle, the count says {tree.idle_blocks}")
    return faults
