"""What statistics count, once and only once, and differences of them."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from cache_requests import cached, compute, manager_of
from cache_traffic import MIXES, traffic_of

from kvist.errors import CapacityError, StateError
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window
from kvist.stats import _COUNTERS, _GROUP_COUNTERS
from kvist.testing.values import make_layout, make_spec, tokens


def requests_of(manager) -> tuple[int, int, int]:
    stats = manager.stats()
    return stats.requests, stats.prompt_tokens, stats.reused_tokens


def test_a_request_that_is_refused_three_times_counts_once() -> None:
    manager = manager_of(4)
    cached(manager, range(1, 9))
    warm = manager.stats()
    other = manager.open(tokens(range(50, 58)))
    compute(manager, other)
    before = manager.stats()
    for _ in range(3):
        refused = manager.open(tokens(range(1, 10)))
        plan = manager.plan([Run(refused, 1), Run(manager.open(tokens(range(60, 69))), 9)])
        with pytest.raises(CapacityError):
            plan.commit()
        for sequence in list(manager._sequences.values()):
            if sequence is not other:
                manager.close(sequence)
    assert attrs.evolve(manager.stats(), groups=()) == attrs.evolve(before, groups=())
    manager.close(other)
    sequence = manager.open(tokens(range(1, 10)))
    # A step that is cancelled does not count either.
    manager.cancel(manager.plan([Run(sequence, 1)]).commit())
    assert manager.stats().since(before).prompt_tokens == 0
    compute(manager, sequence)
    manager.close(sequence)
    stats = manager.stats().since(warm)
    assert (stats.requests, stats.prompt_tokens, stats.reused_tokens) == (2, 8 + 9, 8)


@pytest.mark.parametrize("retentions", [(History(),), (History(), State())])
def test_resuming_is_counted_apart(retentions) -> None:
    manager = manager_of(20, *retentions)
    sequence = manager.open(tokens(range(1, 10)))
    compute(manager, sequence)
    manager.suspend(sequence)
    assert manager.resume(sequence) == 9
    # Not before it computes something.
    assert manager.stats().resumed_tokens == 0
    manager.suspend(sequence)
    manager.resume(sequence)
    sequence.extend([10])
    compute(manager, sequence)
    stats = manager.stats()
    assert requests_of(manager) == (1, 9, 0)
    assert (stats.resumes, stats.resumed_tokens, stats.computed_tokens) == (1, 9, 10)


def test_who_was_suspended_before_the_first_step_counts_with_what_it_has_then() -> None:
    manager = manager_of(6)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(range(1, 14)))
    assert sequence.reused == 8
    manager.suspend(sequence)
    cached(manager, range(50, 70))
    assert manager.resume(sequence) == 4
    compute(manager, sequence, 4)
    stats = manager.stats()
    assert (stats.resumes, stats.prompt_tokens, stats.reused_tokens) == (0, 8 + 20 + 13, 4)


def test_forks_are_counted_apart() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 9))
    parent = manager.open(tokens(range(1, 12)))
    early = manager.fork(parent)
    compute(manager, parent)
    late = manager.fork(parent)
    assert manager.stats().forks == 0
    late.extend([50])
    parent.extend([60])
    compute(manager, early)
    compute(manager, late)
    stats = manager.stats()
    assert requests_of(manager) == (2, 8 + 11, 8)
    # One began with what the cache had, the other with all that its parent had computed.
    assert (stats.forks, stats.forked_tokens) == (2, 8 + 11)


def test_warm_up_is_left_out_by_a_difference() -> None:
    manager = manager_of(4)
    for start in (100, 200):
        cached(manager, range(start, start + 12))
    warm = manager.stats()
    manager.clear()
    cached(manager, range(1, 9))
    real = manager.stats().since(warm)
    assert (real.requests, real.prompt_tokens, real.reused_tokens, real.computed_tokens, real.steps) == (1, 8, 0, 8, 1)
    assert real.groups[0].evicted == 0 < warm.groups[0].evicted
    # What is true now is no difference.
    assert real.groups[0].cached == manager.stats().groups[0].cached == 2
    nothing = manager.stats().since(manager.stats())
    assert all(getattr(nothing, name) == 0 for name in _COUNTERS)
    with pytest.raises(StateError) as caught:
        warm.since(manager.stats())
    assert str(caught.value) == (
        "since() of stats that are not earlier ones: prompt_tokens would be -8\n"
        "hint: subtract what the same manager's stats() gave before"
    )


def test_lost_tokens_name_the_group_that_made_a_hit_short() -> None:
    manager = manager_of(40, History(), Window(4))
    cached(manager, range(1, 17))
    # Branches after 8 tokens, where the window has kept nothing.
    sequence = manager.open(tokens(range(1, 9), range(50, 54)))
    assert (sequence.reused, sequence.matched, sequence.lost) == (0, 8, 8)
    assert sequence.limited_by is manager.layout.groups[1]
    assert [group.lost_tokens for group in manager.stats().groups] == [0, 0]
    compute(manager, sequence)
    assert [group.lost_tokens for group in manager.stats().groups] == [0, 8]


def test_a_prompt_that_needs_no_run_counts_all_the_same() -> None:
    """Its last token is computed in a decode batch, where nobody looks at rows."""
    manager = manager_of(8)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(range(1, 10)))
    batch = manager.decode_batch()
    batch.join(sequence)
    step = manager.plan(decode=batch).commit()
    assert requests_of(manager) == (1, 8, 0)
    manager.complete(step)
    assert requests_of(manager) == (2, 17, 8)
    manager.close(sequence)
    assert requests_of(manager) == (2, 17, 8)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(3))
def test_counters_never_decrease_and_sources_add_up(mix: str, seed: int) -> None:
    rng = np.random.default_rng([7, seed, len(mix)])
    layout = make_layout(make_spec(3, *MIXES[mix], vocab_size=4), 20 * len(MIXES[mix]))
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks=2) if seed else None)
    traffic = traffic_of(manager, rng)
    start = before = manager.stats()
    for _ in range(200):
        traffic.operate()
        now = manager.stats()
        step = now.since(before)
        assert all(getattr(step, name) >= 0 for name in _COUNTERS)
        assert all(getattr(group, name) >= 0 for group in step.groups for name in _GROUP_COUNTERS)
        assert 0 <= step.reused_tokens <= step.prompt_tokens or step.requests == 0 == step.reused_tokens
        assert sum(group.lost_tokens for group in now.groups) <= now.prompt_tokens - now.reused_tokens
        before = now
    assert before.since(start) == before
