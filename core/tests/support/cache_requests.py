"""Short ways to make a manager and to run sequences through it, ``P = 4`` tokens per block."""

from __future__ import annotations

from kvist.manager import PagedCacheManager, Run
from kvist.policies import EvictionPolicy
from kvist.restore import RestorePolicy
from kvist.spec import History, Retention, Scope
from kvist.testing.values import make_layout, make_spec, tokens
from kvist.wishes import Wishes

P = 4
DEFAULT = Scope()


def manager_of(
    pages: int,
    *retentions: Retention,
    restore: RestorePolicy | None = None,
    block_tokens: int = P,
    backoff_tokens: int = 0,
    eviction: EvictionPolicy | None = None,
    **options: object,
) -> PagedCacheManager:
    """A manager whose groups have equal pages, ``pages`` of them in all; full attention unless said otherwise."""
    spec = make_spec(block_tokens, *(retentions or (History(),)), **options)
    return PagedCacheManager(make_layout(spec, pages), restore, backoff_tokens, eviction)


def compute(manager: PagedCacheManager, sequence, count: int | None = None):
    """Run the next ``count`` tokens (all known ones by default) of one sequence."""
    left = sequence.known - sequence.computed
    step = manager.plan([Run(sequence, left if count is None else count)]).commit()
    manager.complete(step)
    manager.check()
    return step


def cached(
    manager: PagedCacheManager, *parts: int | range, scope: Scope = DEFAULT, wishes: Wishes | None = None
) -> None:
    """Compute a prompt and close it, so that only the cache holds it."""
    sequence = manager.open(tokens(*parts), scope, wishes=wishes)
    compute(manager, sequence)
    manager.close(sequence)
    manager.check()


def counts(manager: PagedCacheManager, group: int = 0) -> tuple[int, int, int]:
    """Free, cached and held pages."""
    stats = manager.stats().groups[group]
    return stats.free, stats.cached, stats.held
