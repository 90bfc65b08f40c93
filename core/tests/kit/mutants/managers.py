"""Cache managers with a fault each: Kvist's own with one text replaced, and strangers that mean well.

``make()`` gives a context manager: while it is entered, the suite that it returns meets the fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
from kit.mutants import specs
from kit.mutants.base import Mutant
from kit.mutants.planted import listed, planted

from kvist.manager import PagedCacheManager
from kvist.spec import Scope
from kvist.testing.builtin import TestPagedCacheManager
from kvist.testing.manager import CacheManagerTests

Fault = contextlib.AbstractContextManager[Any]


class OneCacheForAll(PagedCacheManager):
    """Takes tenants for a matter of the engine."""

    def open(self, tokens, scope=Scope(), **options):  # noqa: B008
        return super().open(tokens, attrs.evolve(scope, salt=""), **options)

    def probe(self, tokens, scope=Scope()):  # noqa: B008
        return super().probe(tokens, attrs.evolve(scope, salt=""))


class PlansAtOnce(PagedCacheManager):
    """Makes room as soon as it knows what is lacking."""

    def plan(self, runs=(), decode=None):
        plan = super().plan(list(runs), decode)
        if plan.fits:
            self._evict(plan.eviction)
        return plan


class HoldsWhatItFinds(PagedCacheManager):
    """Protects what a probe has found, for the request that will surely come."""

    def probe(self, tokens, scope=Scope()):  # noqa: B008
        sequence = self.open(tokens, scope)
        return sequence.reused


class ChecksAfterwards(PagedCacheManager):
    """Gives pages up before it looks at the length."""

    def truncate(self, sequence, length):
        self.suspend(sequence)
        return super().truncate(sequence, length)


class GuessesCapacity(PagedCacheManager):
    """Takes every cached and free page for room of a whole block."""

    def capacity(self, chunk_tokens=None):
        return _Optimist(super().capacity(chunk_tokens))


class _Optimist:
    def __init__(self, capacity):
        self._capacity = capacity

    def __getattr__(self, name):
        return getattr(self._capacity, name)

    def requests(self, length):
        return self._capacity.requests(length) + 1


@contextlib.contextmanager
def _stranger(manager: Callable[..., Any]) -> Iterator[type[CacheManagerTests]]:
    yield type("Mutated", (CacheManagerTests,), {"manager": lambda _, layout, **options: manager(layout, **options)})


@contextlib.contextmanager
def faulty(fault: Callable[[], Fault]) -> Iterator[type[CacheManagerTests]]:
    with fault():
        yield TestPagedCacheManager


@contextlib.contextmanager
def _factory(make: Callable[[], type]) -> Iterator[type]:
    yield make()


#: Of the list that benchmarks/fuzz.py plants too.
LISTED = (
    ("CM-07", "commit: copies one block early"),
    ("CM-07", "match: snapshot ahead"),
    ("CM-07", "match: any unit"),
    ("CM-08", "match: no limit"),
    ("CM-08", "restore: no branch point"),
    ("CM-08", "restore: end of the prompt"),
    ("CM-08", "publish: end known before"),
    ("CM-10", "ledger: frees the published"),
    ("CM-11", "claim: no split"),
    ("CM-11", "claim: window not leased"),
    ("CM-11", "claim: windows not released"),
    ("CM-11", "extent: cut loses a page"),
    ("CM-12", "books: nothing dropped"),
    ("CM-12", "books: no rollback kept"),
    ("CM-16", "manager: stale plans"),
    ("CM-16", "residents: plans behind a close"),
    ("CM-16", "arena: fungible sums"),
    ("CM-16", "books: tight prompts"),
    ("CM-17", "eviction: one too many"),
    ("CM-17", "claim: no hold"),
    ("CM-17", "claim: sources not leased"),
    ("CM-17", "tree: replaces the held"),
    ("CM-17", "arena: floors are given away"),
    ("CM-18", "publish: switches in flight"),
    ("CM-18", "publish: windows switch in flight"),
    ("CM-18", "defrag: moves what a step names"),
    ("CM-18", "defrag: sources keep their names"),
    ("CM-19", "manager: copies not repeated"),
    ("CM-19", "residents: lost with the step"),
    ("CM-19", "manager: copies always repeated"),
    ("CM-19", "owed: zeros and copies"),
    ("CM-20", "commit: drafts are decided"),
    ("CM-20", "states: wrong draft"),
    ("CM-20", "states: scratch pages stay"),
    ("CM-20", "states: a page per draft for everybody"),
    ("CM-21", "batch: leaves too early"),
    ("CM-21", "batch: joined too late"),
    ("CM-21", "commit: block not counted"),
    ("CM-21", "batch: regular again"),
    ("CM-21", "batch: left and back"),
    ("CM-22", "commit: no zeros"),
    ("CM-22", "publish: snapshot one block late"),
    ("CM-23", "claim: fork without a state"),
    ("CM-23", "claim: fork copies the block before"),
    ("CM-23", "residents: fork without publishing"),
    ("CM-24", "residents: truncate forward"),
    ("CM-27", "tree: stale stays"),
    ("CM-27", "claim: hidden, not unpublished"),
    ("CM-27", "ledger: frees the held"),
    ("CM-27", "lower: backups after clear"),
    ("CM-27", "lower: loads after clear"),
    ("CM-27", "lower: no new generation"),
    ("CM-28", "publish: tells nobody of windows"),
    ("CM-28", "watches: silent disk"),
    ("CM-29", "ledger: peak"),
    ("CM-29", "stats: reuse counted twice"),
    ("CM-31", "level: part of an open block"),
    ("CM-31", "level: no tokens behind"),
    ("CM-31", "backup: forgets who waits"),
    ("CM-31", "lower: waits for ever"),
    ("CM-31", "search: no backoff"),
    ("CM-31", "search: ends too early"),
    ("CM-31", "search: no limit"),
    ("CM-31", "plan: runs while loading"),
    ("CM-32", "books: writes under a step"),
    ("CM-32", "backup: copies before the step"),
    ("CM-32", "content: gaps on disk"),
    ("CM-33", "sequence: unknown tokens"),
    ("CM-33", "arena: one page twice"),
)
#: Name, clause, file of the core, what is replaced, by what.
_PLANTED = (
    (
        "a probe promises the last token",
        "CM-09",
        "residents.py",
        "return self._match(prompt, scope, len(prompt) - 1).length",
        "return self._match(prompt, scope, len(prompt)).length",
    ),
    (
        "page 0 is a page like others",
        "CM-10",
        "memory/arena.py",
        "np.arange(layout.slab_count - 1, 0, -1, dtype=np.int32)",
        "np.arange(layout.slab_count - 2, -1, -1, dtype=np.int32)",
    ),
    (
        "publishes for who opted out",
        "CM-14",
        "residents.py",
        "        else:\n            sequence.shares = False\n        self._sequences[slot] = sequence",
        "        self._sequences[slot] = sequence",
    ),
    (
        "a suspended sequence keeps its pages",
        "CM-25",
        "residents.py",
        "        self._claims.vacate(sequence)\n        sequence.rebase(0)",
        "        sequence.rebase(0)",
    ),
    (
        "closing throws away",
        "CM-26",
        "residents.py",
        "        self._publish_all(sequence)\n        self._end(sequence)",
        "        self._end(sequence)",
    ),
    (
        "closes under a step in flight",
        "CM-26",
        "residents.py",
        "        if sequence.in_flight:\n            if not sequence.closing:",
        "        if sequence.in_flight and batch is not None:\n            if not sequence.closing:",
    ),
    (
        "one group goes down",
        "CM-31",
        "tiers/backup.py",
        "        missing: Cells = known.pages != NO_PAGE\n",
        "        missing: Cells = known.pages != NO_PAGE\n        missing[1:] = False\n",
    ),
    (
        "what failed counts as arrived",
        "CM-32",
        "tiers/level.py",
        "        gaps = ordinals[(arrival.lost & self.dense[:, None]).any(axis=0)]\n",
        "        arrival.lost[:] = False\n        gaps = ordinals[:0]\n",
    ),
)
_STRANGERS = (
    ("plans evict", "CM-09", PlansAtOnce),
    ("probes hold", "CM-09", HoldsWhatItFinds),
    ("tenants share", "CM-13", OneCacheForAll),
    ("parks, then looks at the length", "CM-15", ChecksAfterwards),
    ("one request too many", "CM-30", GuessesCapacity),
)
MUTANTS = (
    *(Mutant(each.name, each.clause, partial(_factory, each.make)) for each in specs.MUTANTS),
    *(Mutant(name, clause, partial(faulty, partial(planted, *text))) for name, clause, *text in _PLANTED),
    *(Mutant(name, clause, partial(_stranger, manager)) for name, clause, manager in _STRANGERS),
    *(Mutant(name, clause, partial(faulty, partial(listed, name))) for clause, name in LISTED),
)


def suite(made: contextlib.AbstractContextManager[type]) -> contextlib.AbstractContextManager[type]:
    """The suite for what ``make()`` gave."""
    return made
