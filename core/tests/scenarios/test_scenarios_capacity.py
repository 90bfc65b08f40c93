"""Scenarios of area F: what fits and what is refused.

Order, preemption and retries are the scheduler's. Here is what it needs from the manager: typed refusals with numbers,
no change on refusal, and an arithmetic that says what can ever fit.
"""

from __future__ import annotations

import pytest
from cache_requests import P, manager_of

from kvist.errors import CapacityError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.engine import MIXES, Engine
from kvist.testing.values import make_layout, make_spec, tokens

# 31. A request larger than the pool


def test_the_queue_of_the_scenario_by_hand() -> None:
    """31: R needs 5 pages of 4: refused at once, with the numbers, and S behind it runs. R2's output outgrows the pool:
    its plan is refused and it can be ended; nothing else is disturbed. R3 waits for pages that S2 does not need."""
    manager = manager_of(4, width=2)
    engine = Engine(manager)
    with pytest.raises(CapacityError) as caught:
        manager.open(tokens(range(20)))
    assert str(caught.value) == (
        "20 tokens never fit: they need 320 bytes (5 pages of group target/History()) and the cache has 256\n"
        "hint: shorten the request or give the cache more memory"
    )
    engine.audit()
    assert engine.turn(range(50, 54)) == 0
    # The limit that a server should compare with its longest request can be read.
    assert [manager.layout.fits(n) for n in (16, 17, 64)] == [True, False, False]
    growing = engine.open(range(100, 112))
    engine.prefill(growing)
    engine.decode(growing, 4)
    engine.learn(growing)
    before = manager.stats()
    for _ in range(5):
        plan = manager.plan([Run(growing, 1)])
        assert [(each.needed, each.available) for each in plan.shortages] == [(1, 0)]
        with pytest.raises(CapacityError):
            plan.commit()
    assert manager.stats() == before
    engine.close(growing)
    holder = engine.open(range(200, 212))
    engine.prefill(holder)
    large, small = engine.open(range(300, 312)), engine.open(range(400, 404))
    assert not manager.plan([Run(large, 12)]).fits
    engine.prefill(small)
    engine.close(small, holder)
    engine.prefill(large)
    engine.close(large)
    engine.drained()


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("pages", [3, 8])
@pytest.mark.parametrize("mix", MIXES)
def test_what_is_accepted_is_exactly_what_can_run_alone(mix: str, pages: int, block: int, every: int | None) -> None:
    """31, sz-09: growing token by token in an empty cache, a request gets just as far as the arithmetic says."""
    retentions = MIXES[mix]
    engine = Engine(
        manager_of(pages + len(retentions), *retentions, block_tokens=block, restore=RestorePolicy(every_blocks=every))
    )
    layout = engine.manager.layout
    if not layout.fits(1):
        return
    sequence = engine.open(0)
    reached = 0
    while reached < 50:
        if sequence.known == sequence.computed:
            engine.learn(sequence)
        if not engine.manager.plan([Run(sequence, 1)]).fits:
            break
        engine.run(Run(sequence, 1))
        reached += 1
    assert [layout.fits(n) for n in range(1, 51)] == [n <= reached for n in range(1, 51)]
    engine.close(sequence)
    if reached < 50:
        with pytest.raises(CapacityError, match=f"^{reached + 1} tokens never fit"):
            engine.manager.open(tokens(range(reached + 1)))


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_a_longest_request_runs_in_a_full_cache_too(mix: str, block: int) -> None:
    """31, sz-03: whatever is cached gives way, a hit on its own beginning included."""
    retentions = MIXES[mix]
    engine = Engine(manager_of(9 * len(retentions), *retentions, block_tokens=block))
    length = max(n for n in range(1, 40) if engine.manager.layout.fits(n))
    for number in range(4):
        engine.turn(range(100 * number, 100 * number + max(1, length // 3)), chunk=1)
    for keep in (0, length // 3, length - 1, length // 3):
        sequence = engine.open(range(keep), range(7000, 7000 + length - keep))
        while sequence.computed < length:
            engine.run(Run(sequence, 1))
        engine.close(sequence)
    engine.drained()


# 33. Preemption


@pytest.mark.parametrize("mix", ["history", "history+window", "history+state"])
def test_two_requests_that_do_not_fit_together_both_finish(mix: str) -> None:
    """33, the manager's part: the younger one is suspended once, its pages go to the older one as that grows, and it
    comes back when the older one has ended; tokens computed twice are what was evicted meanwhile."""
    groups = len(MIXES[mix])
    engine = Engine(manager_of(6 + (0 if groups == 1 else 5), *MIXES[mix]))
    old, young = engine.open(range(8)), engine.open(range(50, 58))
    suspended = thrown_away = before = 0
    while not young.closed:
        runs = []
        for sequence in (old, young):
            if sequence.closed or sequence.suspended:
                continue
            if sequence.known == sequence.computed and sequence.known < 24:
                engine.learn(sequence)
            left = sequence.known - sequence.computed
            if left:
                runs.append(Run(sequence, min(4, left)))
            else:
                engine.close(sequence)
        if old.closed and young.suspended:
            thrown_away += before - engine.resume(young)
            continue
        if not runs:
            continue
        plan = engine.manager.plan(runs)
        if not plan.fits:
            assert len(runs) == 2
            before, suspended = young.computed, suspended + 1
            engine.suspend(young)
            continue
        engine.run(*runs)
    assert suspended == 1
    assert thrown_away <= 24
    stats = engine.manager.stats()
    assert stats.computed_tokens == 48 + thrown_away
    engine.drained()


def test_a_pool_in_which_neither_can_ever_finish_says_so() -> None:
    """33: 24 tokens are 6 blocks; with 5 the arithmetic tells before anything is computed."""
    layout = manager_of(5).layout
    assert not layout.fits(24)
    with pytest.raises(CapacityError, match="24 tokens never fit"):
        layout.require_fit(24)


# 34. A draft model beside the target


def kv(heads: int) -> tuple[Stream, Stream]:
    row = RowFormat((heads, 16), "int8")
    return Stream("k", row, History(), sharding=Heads(heads)), Stream("v", row, History(), sharding=Heads(heads))


@pytest.mark.parametrize(("target_heads", "draft_heads", "layers"), [(4, 1, 2), (4, 8, 1), (2, 2, 1), (1, 3, 5)])
@pytest.mark.parametrize("budget", [50_000, 100_000, 123_456])
def test_target_and_draft_share_one_budget(target_heads: int, draft_heads: int, layers: int, budget: int) -> None:
    """34 (a), (b): both keep the same tokens; the draft costs what its own shape says; together they stay below the
    budget and above nine tenths of what a perfect split would hold."""
    block = 8
    target = CacheSpec([Layer(n, kv(target_heads)) for n in range(layers)], block, "t")
    draft = CacheSpec([Layer(0, kv(draft_heads))], block, "d", "draft")
    layout = Layout.build(target, budget, drafts=(draft,))
    assert layout.arena_bytes <= budget
    token_bytes = 32 * (target_heads * layers + draft_heads)
    assert [group.content_bytes for group in layout.groups] == [
        32 * block * target_heads * layers,
        32 * block * draft_heads,
    ]
    longest = max(n for n in range(0, budget // 8, block) if n == 0 or layout.fits(n))
    assert longest * token_bytes <= budget
    assert longest * token_bytes >= 0.9 * budget - token_bytes * block
    engine = Engine(PagedCacheManager(layout))
    sequence = engine.open(range(longest))
    engine.prefill(sequence)
    assert [held for _, held in engine.used()] == [longest // block] * 2
    assert not engine.manager.plan([Run(sequence, block)]).fits
    engine.close(sequence)
    engine.drained()


def test_a_budget_that_leaves_a_group_nothing_names_the_least() -> None:
    """34 (d): there are no shares to divide; a group without room for one page is an error when the cache is built."""
    spec = make_spec(P, History(), Window(4), State())
    least = make_layout(spec, 3).arena_bytes
    assert Layout.build(spec, least).slab_count == 4
    with pytest.raises(CapacityError) as caught:
        Layout.build(spec, least - 1)
    assert str(caught.value) == (
        f"{least - 1} bytes cannot hold one page of each of the 3 group(s) beside the reserved page: {least} bytes are "
        "the least\nhint: give the cache more memory or use smaller blocks"
    )


def test_equal_budgets_give_equal_layouts() -> None:
    """34 (c): ranks agree on the smallest budget and on nothing else; the layout is a pure function of it."""
    spec = make_spec(P, History(), Window(4))
    assert Layout.build(spec, 90_000) == Layout.build(make_spec(P, History(), Window(4)), 90_000)
    first, second = (PagedCacheManager(Layout.build(spec, 90_000)) for _ in range(2))
    steps = []
    for manager in (first, second):
        sequence = manager.open(tokens(range(30)))
        steps.append(manager.plan([Run(sequence, 30)]).commit())
    assert [table.tolist() for table in steps[0].tables] == [table.tolist() for table in steps[1].tables]


@pytest.mark.parametrize("mix", MIXES)
def test_a_shortage_says_what_would_be_enough(mix: str) -> None:
    """31, 34: ``available`` counts evictions and pages of other groups; a plan that needs as much of the only short
    group as there is fits."""
    groups = len(MIXES[mix])
    engine = Engine(manager_of(10 * groups, *MIXES[mix]))
    for number in range(6):
        engine.turn(range(50 * number, 50 * number + 5))
    sequence = engine.open(9000)
    plan = engine.manager.plan([Run(sequence, 4 * 100 * groups)])
    if mix == "state":
        assert plan.fits
        return
    assert plan.shortages
    for shortage in plan.shortages:
        assert 0 <= shortage.available < shortage.needed
    blocks = 0
    while engine.manager.plan([Run(sequence, 4 * (blocks + 1))]).fits:
        blocks += 1
    assert blocks > 0
    if groups == 1:
        assert blocks == plan.shortages[0].available == 10
    engine.run(Run(sequence, 4 * blocks))
    engine.learn(sequence, more=0)
    engine.close(sequence)
    engine.drained()
