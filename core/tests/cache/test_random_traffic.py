"""Random traffic against a value oracle: what a sequence reads is always its own, and the books always balance."""

from __future__ import annotations

import numpy as np
import pytest
from cache_traffic import MIXES, Traffic
from cache_values import make_layout, make_spec

from kvist.manager import PagedCacheManager
from kvist.policies import ReuseRate
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window

#: Row widths that make the groups' pages unequal, and pages of the largest group that the arena has: few, so that slabs
#: change hands and pages move all the time.
UNEQUAL = {
    "wide history+window": ((History(), Window(6)), (48, 8)),
    "history+wide window": ((History(), Window(6)), (8, 48)),
    "history+huge state": ((History(), State()), (8, 200)),
    "history+window+state": ((History(), Window(6), State()), (8, 24, 120)),
    "history+sinks+window": ((History(), Window(7, sinks=3), Window(4)), (24, 8, 8)),
}


@pytest.mark.parametrize("mix", UNEQUAL)
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_pages_of_unequal_size_move_and_nobody_notices(mix: str, block: int, seed: int) -> None:
    rng = np.random.default_rng([seed, block, len(mix)])
    retentions, widths = UNEQUAL[mix]
    spec = make_spec(block, *retentions, widths=widths, vocab_size=4)
    layout = make_layout(spec, max(5, int(rng.integers(14, 30)) // block))
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks=1 if seed else None))
    manager.shuffle_free_pages(rng)
    traffic = Traffic(manager, rng)
    for _ in range(250):
        traffic.operate()
        manager.check()
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    manager.check()
    assert all(group.held == 0 for group in manager.stats().groups)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_read_is_clean_and_every_page_is_accounted_for(mix: str, block: int, seed: int) -> None:
    rng = np.random.default_rng([seed, block, len(mix)])
    retentions = MIXES[mix]
    if mix == "history+ring" and block < 3:
        retentions = (History(), Window(1, ring=1))
    spec = make_spec(block, *retentions, vocab_size=4)
    policy = RestorePolicy(every_blocks=2) if seed == 1 else RestorePolicy()
    layout = make_layout(spec, int(rng.integers(40, 90)) * len(MIXES[mix]) // block)
    backoff, eviction = (2 if seed == 2 else 0), (ReuseRate(64) if seed == 3 else None)
    manager = PagedCacheManager(layout, policy, backoff_tokens=backoff, eviction=eviction)
    manager.shuffle_free_pages(rng)
    traffic = Traffic(manager, rng)
    for _ in range(250):
        traffic.operate()
        manager.check()
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    manager.check()
    stats = manager.stats()
    assert all(group.held == 0 for group in stats.groups)
    assert stats.open_sequences == 0
    assert 0 <= stats.reused_tokens <= stats.prompt_tokens
    assert mix != "history" or stats.reused_tokens + stats.resumed_tokens + stats.forked_tokens > 0
