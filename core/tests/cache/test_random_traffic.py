"""Random traffic against a value oracle: what a sequence reads is always its own, and the books always balance."""

from __future__ import annotations

import numpy as np
import pytest
from cache_traffic import Traffic
from cache_values import make_layout, make_spec

from kvist.manager import PagedCacheManager
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window

MIXES = {
    "history": (History(),),
    "window": (Window(5),),
    "state": (State(),),
    "history+window": (History(), Window(6)),
    "history+state": (History(), State()),
    "wide history+window": (History(), History(), History(), Window(9)),
    "history+sinks+window": (History(), Window(7, sinks=3), Window(4)),
    "history+window+state": (History(), Window(6), State()),
    "history+ring": (History(), Window(2, ring=3)),
}


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
    manager = PagedCacheManager(layout, policy, backoff_tokens=2 if seed == 2 else 0)
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
    assert (1 if mix == "history" else 0) <= stats.reused_tokens <= stats.prompt_tokens
