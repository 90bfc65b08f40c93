"""The other faults of benchmarks/mutants.toml: too many for the tests, so benchmarks/kit.py tries them."""

from __future__ import annotations

from functools import partial

from kit.mutants.base import Mutant
from kit.mutants.managers import LISTED, faulty, suite
from kit.mutants.planted import listed, names

__all__ = ["MUTANTS", "NO_MANAGER_S", "suite", "untried"]

#: With the clause whose tests find it first.
_FOUND = (
    ("CM-07", "ledger: one lease less"),
    ("CM-07", "owed: takes twice"),
    ("CM-07", "extent: any block is the same"),
    ("CM-07", "extent: append overwrites"),
    ("CM-07", "match: snapshot of the open block"),
    ("CM-07", "match: one group asked"),
    ("CM-07", "match: rings inside blocks"),
    ("CM-07", "tree: first block only"),
    ("CM-07", "tree: hold stops"),
    ("CM-07", "tree: idle count"),
    ("CM-07", "publish: open blocks too"),
    ("CM-07", "publish: twins not leased"),
    ("CM-07", "publish: replaced not freed"),
    ("CM-07", "publish: keeps the given page"),
    ("CM-08", "match: gaps do not matter"),
    ("CM-09", "keeper: leaves lost"),
    ("CM-11", "ledger: cached count"),
    ("CM-11", "tree: appends to the held"),
    ("CM-16", "eviction: spare lost"),
    ("CM-16", "eviction: held pages"),
    ("CM-16", "eviction: gaps stay"),
    ("CM-16", "arena: keeps pages of lost slabs"),
    ("CM-16", "arena: not quite empty"),
    ("CM-16", "defrag: leases stay"),
    ("CM-17", "arena: slabs for all"),
    ("CM-19", "residents: parks in flight"),
    ("CM-19", "owed: forgets a step that did not run"),
    ("CM-19", "publish: open blocks of failed steps"),
    ("CM-20", "states: one scratch page short"),
    ("CM-20", "states: a state is swapped that stays where it is"),
    ("CM-21", "batch: wrong spoke"),
    ("CM-21", "commit: lengths of decode rows"),
    ("CM-21", "sequence: settles in flight"),
    ("CM-25", "eviction: parents first"),
    ("CM-25", "arena: surplus is enough"),
    ("CM-25", "publish: no end of turn"),
    ("CM-27", "disk: written after clear"),
    ("CM-28", "watches: silent files"),
    ("CM-29", "stats: peak of the present"),
    ("CM-31", "level: copies without a lease"),
    ("CM-31", "level: copies without a hold"),
    ("CM-31", "level: pages given back twice"),
    ("CM-31", "backup: evicted tips"),
    ("CM-31", "backup: one batch only"),
    ("CM-32", "level: keeps what failed"),
    ("CM-32", "level: files what failed"),
    ("CM-32", "transfer: failures unseen"),
    ("CM-33", "eviction: tells nobody of gaps"),
    ("CM-33", "keeper: parents with children"),
    ("CM-33", "manager: decided too early"),
    ("CM-33", "residents: reuse after clear"),
    ("CM-33", "owed: chains"),
    ("CM-33", "extent: split multiplies holds"),
    ("CM-33", "extent: one neighbour"),
    ("CM-33", "states: snapshots of drafts"),
    ("CM-33", "defrag: no copies"),
)
#: Of the store of the disk tier, which a manager is given and the kit has no clause for.
NO_MANAGER_S = ("disk: no budget", "disk: drops other parts", "blockfile: no checksum")
MUTANTS = tuple(Mutant(name, clause, partial(faulty, partial(listed, name))) for clause, name in _FOUND)


def untried() -> list[str]:
    """Faults of that list that nobody tries on the kit."""
    tried = {name for _, name in (*LISTED, *_FOUND)}
    return [name for name in names() if name not in tried and name not in NO_MANAGER_S]
