"""Scenarios of area I: numbers."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from cache_requests import manager_of

from kvist.manager import Run
from kvist.testing.engine import MIXES, Engine


def test_a_refused_request_is_counted_once_it_runs() -> None:
    """50 (a): refused three times, then admitted: 9 asked, 8 hit, once."""
    engine = Engine(manager_of(4))
    engine.turn(range(1, 9))
    holder = engine.open(range(50, 58))
    engine.prefill(holder)
    before = engine.manager.stats()
    request = engine.open(range(1, 9), 90)
    for _ in range(3):
        assert not engine.manager.plan([Run(request, 1)]).fits
        engine.close(request)
        request = engine.open(range(1, 9), 90)
    now = engine.manager.stats()
    assert (now.requests, now.prompt_tokens, now.reused_tokens) == (1 + 1, 16, 0)
    engine.close(holder)
    engine.prefill(request)
    now = engine.manager.stats()
    assert (now.requests - before.requests, now.prompt_tokens - before.prompt_tokens) == (1, 9)
    assert now.reused_tokens - before.reused_tokens == 8
    engine.close(request)


@pytest.mark.parametrize("mix", MIXES)
def test_resumed_tokens_are_no_hits(mix: str) -> None:
    """50 (b): what a preempted request finds of its own is counted apart; so are forks, which ask for nothing."""
    engine = Engine(manager_of(40 * len(MIXES[mix]), *MIXES[mix]))
    engine.turn(range(1, 9))
    sequence = engine.open(range(1, 9), 9)
    engine.prefill(sequence)
    before = engine.manager.stats()
    for number in range(3):
        engine.suspend(sequence)
        assert engine.resume(sequence) == 9 + number
        # Counted when its first step afterwards is completed, like a request.
        engine.decode(sequence, 1)
    child = engine.fork(sequence)
    engine.decode(child, 1)
    now = engine.manager.stats()
    assert (now.requests, now.prompt_tokens, now.reused_tokens) == (
        before.requests,
        before.prompt_tokens,
        before.reused_tokens,
    )
    assert (now.resumes, now.resumed_tokens) == (3, 9 + 10 + 11)
    assert (now.forks, now.forked_tokens) == (1, 12)
    engine.close(sequence, child)
    assert engine.manager.stats().requests == before.requests


def test_warm_up_is_what_was_counted_before() -> None:
    """50 (c): counters never go back; the totals of real traffic are the difference to the end of warm-up, and warm-up
    prompts opened with ``reuse=False`` leave nothing that a real prompt could hit."""
    engine = Engine(manager_of(40))
    for _ in range(2):
        engine.turn(range(12), reuse=False)
    warm = engine.manager.stats()
    assert engine.turn(range(12)) == 0
    now = engine.manager.stats()
    real = [getattr(now, name) - getattr(warm, name) for name in ("requests", "prompt_tokens", "reused_tokens")]
    assert real == [1, 12, 0]
    assert [group.cached for group in warm.groups] == [0]


def test_capacity_is_the_device_tiers() -> None:
    """50 (d): the capacity of this arena only; other tiers have numbers of their own."""
    stats = manager_of(4).stats()
    assert [(group.capacity, group.free, group.cached, group.held) for group in stats.groups] == [(4, 4, 0, 0)]


@pytest.mark.parametrize("mix", MIXES)
def test_counters_never_decrease_and_hits_never_exceed_queries(mix: str) -> None:
    """50, over random traffic: against a count kept by hand."""
    rng = np.random.default_rng(len(mix))
    engine = Engine(manager_of(20 * len(MIXES[mix]), *MIXES[mix]))
    last = engine.manager.stats()
    requests = prompt_tokens = reused = computed = steps = 0
    monotone = [f.name for f in attrs.fields(type(last)) if f.name not in ("open_sequences", "extents", "groups")]
    for _ in range(40):
        start = int(rng.integers(0, 3)) * 50
        sequence = engine.open(range(start, start + int(rng.integers(1, 20))))
        fate = rng.random()
        if fate < 0.2:
            # Opened, planned, cancelled or refused, closed: never happened.
            plan = engine.manager.plan([Run(sequence, 1)])
            if plan.fits and fate < 0.1:
                engine.manager.cancel(plan.commit(), ran=False)
            engine.close(sequence)
        else:
            left = sequence.known - sequence.computed
            count = int(rng.integers(1, left + 1))
            engine.run(Run(sequence, count))
            requests, steps = requests + 1, steps + 1
            prompt_tokens, reused = prompt_tokens + sequence.prompt_length, reused + sequence.reused
            computed += count
            if count == left:
                engine.learn(sequence)
                engine.run(Run(sequence, 1, 2), accepted={sequence: 2})
                computed, steps = computed + 2, steps + 1
            engine.close(sequence)
        now = engine.manager.stats()
        assert all(getattr(now, name) >= getattr(last, name) for name in monotone)
        assert all(a.evicted >= b.evicted and a.held_peak >= b.held_peak for a, b in zip(now.groups, last.groups))
        assert (now.requests, now.prompt_tokens, now.reused_tokens) == (requests, prompt_tokens, reused)
        assert (now.computed_tokens, now.steps) == (computed, steps)
        assert 0 <= now.reused_tokens <= now.prompt_tokens
        assert 0.0 <= now.hit_rate <= 1.0
        last = now


def test_peaks_see_what_happens_between_two_looks() -> None:
    """sx-09: the most that was ever held, also when it was given up before anybody asked; never reset."""
    engine = Engine(manager_of(20))
    sequence = engine.open(range(40))
    engine.prefill(sequence)
    engine.close(sequence)
    assert [(group.held, group.held_peak) for group in engine.manager.stats().groups] == [(0, 10)]
    engine.turn(7)
    assert engine.manager.stats().groups[0].held_peak == 10
