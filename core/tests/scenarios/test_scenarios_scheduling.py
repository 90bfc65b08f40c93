"""Scenarios of area F that concern who runs when, and the scheduler's clauses (sd) of the checklist."""

from __future__ import annotations

import pytest
from everybody import Everybody
from model_free import ModelFree

from kvist.budget import block_bytes, split_bytes
from kvist.errors import CapacityError
from kvist.scheduling import AdmissionPolicy, ReserveToEnd, State, Watermark
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream
from kvist.spec import State as StateRetention

POLICIES = [ReserveToEnd(), Watermark(0.0), Watermark(0.2), Everybody()]


def ids(policy: AdmissionPolicy) -> str:
    return str(policy) if not isinstance(policy, Everybody) else "Everybody"


@pytest.mark.parametrize("policy", POLICIES, ids=ids)
def test_a_request_larger_than_the_pool_harms_nobody(policy: AdmissionPolicy) -> None:
    """31: R (20 tokens in a pool of 16) is refused at once with the numbers and S runs; R2's output can never fit,
    which is known at submission too, so there is no loop to end. R3 waits for pages and S2 behind it waits with it: the
    order is kept, and neither waits for ever."""
    engine = ModelFree(4, History(), admission=policy)
    with pytest.raises(CapacityError) as caught:
        engine.submit(range(20), new=1)
    assert str(caught.value) == (
        "20 tokens never fit: they need 640 bytes (5 pages of group target/History()) and the cache has 512\n"
        "hint: shorten the request or give the cache more memory"
    )
    small = engine.submit(range(50, 54), new=2)
    engine.drain()
    with pytest.raises(CapacityError, match=r"^19 tokens never fit"):
        engine.submit(range(100, 112), new=8)
    holder = engine.submit(range(200, 210), new=3)
    engine.step()
    large, behind = engine.submit(range(300, 312), new=1), engine.submit(range(400, 404), new=1)
    engine.drain()
    assert large.admitted_s <= behind.admitted_s
    engine.check_outputs([small, holder, large, behind])
    engine.drained()


@pytest.mark.parametrize(
    ("policy", "preempted", "thrown_away"),
    [(ReserveToEnd(), 0, 0), (Watermark(0.0), 1, 12), (Everybody(), 2, 24)],
    ids=ids,
)
def test_nobody_is_preempted_again_and_again(policy: AdmissionPolicy, preempted: int, thrown_away: int) -> None:
    """33: A is never preempted, B at most so often, and no more tokens are computed again."""
    engine = ModelFree(6, History(), admission=policy, max_batch_tokens=4)
    first, second = engine.submit(range(8), new=16), engine.submit(range(50, 58), new=16)
    engine.drain()
    assert first.pauses == 0
    assert second.pauses <= preempted
    assert second.recomputed_tokens <= thrown_away
    assert engine.manager.stats().computed_tokens == 2 * 23 + second.recomputed_tokens
    engine.check_outputs([first, second])
    engine.drained()


def test_a_pool_in_which_neither_can_finish_refuses_both() -> None:
    """33: with 5 pages."""
    engine = ModelFree(5, History(), max_batch_tokens=4)
    for begin in (0, 50):
        with pytest.raises(CapacityError, match=r"^23 tokens never fit"):
            engine.submit(range(begin, begin + 8), new=16)
    assert engine.scheduler.idle


def kv(heads: int, layers: int, fingerprint: str) -> CacheSpec:
    row = RowFormat((heads, 1), "int8")
    streams = (Stream("k", row, History(), sharding=Heads(heads)), Stream("v", row, History(), sharding=Heads(heads)))
    return CacheSpec(tuple(Layer(number, streams) for number in range(layers)), 1, fingerprint)


@pytest.mark.parametrize(
    ("target", "draft", "held"), [(kv(4, 1, "t"), kv(1, 1, "d"), 100), (kv(2, 2, "t"), kv(2, 1, "d"), 83)]
)
def test_a_pair_divides_one_budget_by_what_each_costs(target: CacheSpec, draft: CacheSpec, held: int) -> None:
    """34 (a), (b), sz-10: 1000 bytes for a target of 8 per token and a draft of 2, and of 4: both hold equally many."""
    costs = [block_bytes(target), block_bytes(draft)]
    shares = split_bytes(1000, costs)
    assert sum(shares) == 1000
    assert [share // cost for share, cost in zip(shares, costs)] == [held, held]


def test_ranks_that_agree_on_the_least_plan_the_same() -> None:
    """34 (c): two ranks that report different memory take the smaller one, and all their turns are equal."""
    logs = []
    for reported in ((20, 18), (18, 20)):
        engine = ModelFree(min(reported), History(), seed=None, admission=Watermark(0.0), max_batch_tokens=12)
        for n in range(7):
            engine.submit(range(100 * n, 100 * n + 7 + n), new=9)
        engine.drain()
        logs.append(engine.log)
    assert logs[0] == logs[1]


def test_sd_01_sd_02_victims_come_from_the_end_of_the_order() -> None:
    """sd-01, sd-02: the last of those that run gives way, whoever has given way already is not asked again."""
    engine = ModelFree(12, History(), host_pages=100, admission=Everybody(), max_batch_tokens=32)
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=20) for n in range(4)]
    victims = []
    while not engine.scheduler.idle:
        before = [job.suspensions for job in jobs]
        running = [job.number for job in jobs if job.state in (State.PREFILL, State.DECODE)]
        engine.step()
        taken = [job.number for job, count in zip(jobs, before) if job.suspensions > count]
        assert taken == sorted(running)[len(running) - len(taken) :]
        victims += taken
    assert len(victims) == len(set(victims)) > 0
    engine.check_outputs(jobs)


def test_sd_03_without_a_lower_tier_victims_compute_again() -> None:
    """sd-03: and what they come back to is what others left of theirs."""
    engine = ModelFree(12, History(), admission=Everybody(), max_batch_tokens=32)
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=20) for n in range(3)]
    engine.drain()
    stats = engine.scheduler.stats
    assert stats.pauses > 0 and stats.suspensions == 0
    assert 0 < stats.recomputed_tokens <= sum(len(job.prompt) + 19 for job in jobs if job.pauses)
    engine.check_outputs(jobs)


def test_sd_05_ru_17_whoever_was_not_admitted_holds_nothing() -> None:
    """sd-05, ru-17: a request that finds a prefix and no room does not keep that prefix from others."""
    engine = ModelFree(10, History(), max_batch_tokens=32)
    prefix = engine.submit(range(16), new=1)
    engine.drain()
    running = engine.submit(range(500, 516), new=9)
    engine.step()
    waiting = engine.submit(range(16), range(90, 102), new=2)
    for _ in range(3):
        engine.step()
        assert waiting.state is State.WAITING
        assert engine.manager.stats().open_sequences == 1
    # All but the two pages of the running one's future can be had.
    assert engine.manager.stats().groups[0].held <= 5
    engine.drain()
    assert waiting.reused_tokens > 0
    engine.check_outputs([prefix, running, waiting])
    engine.drained()


def test_sd_06_only_those_that_really_run_are_waited_for() -> None:
    """sd-06: a request that waits itself is no reason to wait."""
    engine = ModelFree(100, History(), max_batch_tokens=64, max_sequences=2)
    jobs = [engine.submit(range(30), 90 + n, new=8) for n in range(3)]
    unrelated = engine.submit(range(500, 510), new=2)
    turn = engine.scheduler.turn()
    assert turn is not None
    assert [job.state for job in jobs] == [State.PREFILL, State.DEFERRED, State.DEFERRED]
    # Both rows are not taken by those that wait.
    assert unrelated.state is State.PREFILL
    engine.scheduler.abort(turn, ran=False)
    engine.drain()
    engine.check_outputs([*jobs, unrelated])


def test_sd_07_waiting_for_copies_is_no_deadlock() -> None:
    """sd-07: however long it takes. A deadlock is found at once, from who holds what, and not after so many passes."""
    engine = ModelFree(12, History(), host_pages=100, copies_run=False, admission=Everybody(), max_batch_tokens=24)
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=20) for n in range(3)]
    while (turn := engine.scheduler.turn()) is not None:
        engine.scheduler.abort(turn, ran=False)
        engine.step()
    assert any(job.suspensions for job in jobs)
    for _ in range(1500):
        assert engine.scheduler.turn() is None
        assert all(wait.ends for wait in engine.scheduler.waits())
    engine.copies_run = True
    engine.drain()
    engine.check_outputs(jobs)
    engine.drained()


def test_budgets_of_tokens_and_rows_are_kept() -> None:
    """sd-09: in every turn, with chunks that end where states are kept."""
    engine = ModelFree(80, History(), StateRetention(), max_batch_tokens=10, max_sequences=3)
    jobs = [engine.submit(range(100 * n, 100 * n + 5 + 3 * n), new=6) for n in range(8)]
    while not engine.scheduler.idle:
        turn = engine.step()
        assert turn is not None
        assert turn.step.token_count <= 10
        assert turn.decode_rows + len(turn.chunks) <= 3
    engine.check_outputs(jobs)
    engine.drained()
