"""The ladder: what happens when pages run short, and who waits for what."""

from __future__ import annotations

import numpy as np
import pytest
from everybody import Everybody
from model_free import Asked, ModelFree, waiting_times

from kvist.errors import CapacityError, DeadlockError, SpecError
from kvist.manager import Run
from kvist.scheduling import AdmissionPolicy, ReserveToEnd, Room, State, Watermark
from kvist.scheduling.roster import Roster
from kvist.spec import History, Retention, Window
from kvist.spec import State as StateRetention
from kvist.testing.values import make_layout, make_spec, tokens

MIXES: dict[str, tuple[Retention, ...]] = {
    "history": (History(),),
    "history+window": (History(), Window(6)),
    "history+state": (History(), StateRetention()),
}


# ---------------------------------------------------------------------- admission


def room(pages: int, held: list[int], jobs: list[tuple[int, int, int]], *retentions: Retention) -> Room:
    """jobs: prompt tokens, new tokens, blocks held."""

    class Held:
        loading = False

        def __init__(self, blocks: int) -> None:
            self.block_count = blocks

    pairs = [
        (Asked(prompt=np.zeros(prompt, np.int32), max_new_tokens=new), Held(blocks)) for prompt, new, blocks in jobs
    ]
    layout = make_layout(make_spec(4, *(retentions or (History(),))), pages)
    return Room(layout, held, pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "held", "jobs", "admitted"),
    [
        # One has 3 of 6 blocks, and the next needs 2: 3 + 3 + 2.
        (8, 3, [(8, 17, 3), (5, 4, 0)], True),
        (7, 3, [(8, 17, 3), (5, 4, 0)], False),
        # Two blocks of the candidate are the running one's, so they are held once: 3 + 3 + 1.
        (7, 3, [(8, 17, 3), (9, 4, 2)], True),
        # Somebody else holds two.
        (9, 5, [(8, 17, 3), (5, 4, 0)], False),
        (10, 5, [(8, 17, 3), (5, 4, 0)], True),
    ],
)
def test_reserving_to_the_end(pages: int, held: int, jobs: list[tuple[int, int, int]], admitted: bool) -> None:
    assert ReserveToEnd().admits(room(pages, [held], jobs)) is admitted


@pytest.mark.parametrize(
    ("pages", "free", "admitted"),
    [
        # 3 held, and 9 prompt tokens with one to come take 3 blocks more, whatever follows.
        (6, 0.0, True),
        (5, 0.0, False),
        (6, 0.1, False),
        (7, 0.1, True),
        (11, 0.5, False),
        (12, 0.5, True),
    ],
)
def test_a_watermark_counts_prompts_and_keeps_some_free(pages: int, free: float, admitted: bool) -> None:
    assert Watermark(free).admits(room(pages, [3], [(8, 99, 3), (9, 99, 0)])) is admitted


def test_windows_are_counted_by_what_they_hold_at_most() -> None:
    # 40 tokens: 10 blocks of history each; a window of 6 tokens lies in at most 3 blocks of 4, and a fourth is opened
    # before the oldest goes.
    retentions = (History(), Window(6))
    most = make_layout(make_spec(4, *retentions), 100)
    each = [most.most_pages(group, 43) for group in most.groups]
    assert each[0] == 11 and 3 <= each[1] <= 4
    needed = 2 * sum(each)
    jobs = [(40, 4, 0), (40, 4, 0)]
    assert ReserveToEnd().admits(room(needed, [0, 0], jobs, *retentions))
    assert not ReserveToEnd().admits(room(needed - 1, [0, 0], jobs, *retentions))


def test_a_watermark_out_of_range() -> None:
    with pytest.raises(SpecError) as caught:
        Watermark(1.0)
    assert str(caught.value) == "Watermark(free_fraction=1.0) must be in [0, 1)"


@pytest.mark.parametrize("mix", MIXES)
def test_whoever_is_admitted_by_reservation_finishes(mix: str) -> None:
    """Nobody ever gives way, however tight it is and however much is shared."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        engine = ModelFree(
            int(rng.integers(8, 20)) * len(MIXES[mix]),
            *MIXES[mix],
            seed=seed,
            max_batch_tokens=12,
            admission=ReserveToEnd(),
        )
        jobs = []
        for _ in range(12):
            begin, own = 100 * int(rng.integers(2)), 1000 * int(rng.integers(1, 9))
            cut, rest = int(rng.integers(0, 12)), int(rng.integers(1, 6))
            jobs.append(engine.submit(range(begin, begin + cut), range(own, own + rest), new=int(rng.integers(1, 12))))
            for _ in range(int(rng.integers(4))):
                engine.step()
        engine.drain()
        assert engine.scheduler.stats.pauses == engine.scheduler.stats.refused == 0
        engine.check_outputs(jobs)
        engine.drained()


def test_the_first_in_order_is_not_passed_by_smaller_ones() -> None:
    engine = ModelFree(10, History())
    running = engine.submit(range(16), new=9)
    engine.step()
    large, small = engine.submit(range(100, 120), new=9), engine.submit(range(200, 203), new=2)
    engine.drain()
    # The small one would have fitted all the time.
    assert running.ended_s <= large.admitted_s <= small.admitted_s
    engine.check_outputs([running, large, small])


# ---------------------------------------------------------------------- who gives way


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("host_pages", [0, 100])
def test_the_last_in_order_gives_way_and_comes_back(mix: str, host_pages: int) -> None:
    """A lower tier that has room takes its pages; without one they are computed again, as far as others took them."""
    engine = ModelFree(
        12 + 4 * (len(MIXES[mix]) > 1), *MIXES[mix], host_pages=host_pages, admission=Everybody(), max_batch_tokens=24
    )
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=20) for n in range(3)]
    engine.drain()
    stats = engine.scheduler.stats
    assert (stats.suspensions > 0, stats.pauses > 0) == (host_pages > 0, host_pages == 0)
    assert jobs[0].pauses + jobs[0].suspensions == 0
    if host_pages:
        assert stats.recomputed_tokens == 0
    engine.check_outputs(jobs)
    engine.drained()


def test_a_tier_that_is_too_small_for_one_more_is_not_asked() -> None:
    """Two suspended requests must not push each other out of the tier below."""
    engine = ModelFree(12, History(), host_pages=4, admission=Everybody(), max_batch_tokens=24)
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=20) for n in range(3)]
    engine.drain()
    stats = engine.scheduler.stats
    assert stats.pauses > 0
    engine.check_outputs(jobs)
    engine.drained()


def test_a_priority_decides_who_gives_way() -> None:
    engine = ModelFree(10, History(), admission=Everybody(), ageing_s=100.0, max_batch_tokens=24)
    low, high = engine.submit(range(8), new=20, priority=-1), engine.submit(range(100, 108), new=20, priority=1)
    engine.drain()
    assert (low.pauses > 0, high.pauses) == (True, 0)
    engine.check_outputs([low, high])


def test_prompts_shrink_before_anybody_gives_way() -> None:
    engine = ModelFree(10, History(), admission=Everybody(), max_batch_tokens=16)
    old = engine.submit(range(12), new=12)
    engine.step()
    engine.submit(range(100, 130), new=1)
    engine.drain()
    stats = engine.scheduler.stats
    # 7 pages are left for a prompt of 8: it gets what there is, and the rest when the old one has ended.
    assert stats.trimmed > 0
    assert stats.pauses <= 1
    assert old.pauses == 0
    engine.drained()


def test_nobody_comes_in_again_before_somebody_has_ended() -> None:
    engine = ModelFree(9, History(), admission=Everybody(), max_batch_tokens=24)
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=17) for n in range(2)]
    while not jobs[1].pauses:
        engine.step()
    # It is the first in order, and the policy would have it.
    newcomer = engine.submit(range(900, 901), new=1, priority=9)
    while jobs[0].state is not State.DONE:
        assert jobs[1].state is State.WAITING and newcomer.state is State.WAITING
        engine.step()
    engine.drain()
    assert jobs[1].pauses == 1
    engine.check_outputs([*jobs, newcomer])


@pytest.mark.parametrize("policy", [ReserveToEnd(), Watermark(0.0), Everybody()])
def test_waiting_is_bounded_by_those_who_come_first(policy: AdmissionPolicy) -> None:
    """40 equal requests at once, with room for two or three: the last begins when those before have had their turn."""
    engine = ModelFree(14, History(), admission=policy, max_batch_tokens=16)
    jobs = [engine.submit(range(100 * n, 100 * n + 10), new=8) for n in range(40)]
    engine.drain()
    waited = waiting_times(jobs)
    assert waited == sorted(waited)
    # 17 tokens take 5 pages, so two fit to their ends, each for 9 steps or so.
    assert max(waited) <= 40 / 2 * 10 + 20
    assert max(waited) <= 2.2 * float(np.mean(waited))
    engine.check_outputs(jobs)


def test_a_request_that_runs_alone_always_goes_on() -> None:
    for mix in MIXES.values():
        engine = ModelFree(9 * len(mix), *mix, admission=Everybody(), max_batch_tokens=30)
        longest = max(n for n in range(1, 60) if engine.manager.layout.fits(n))
        jobs = [engine.submit(range(1000 * n, 1000 * n + longest - 3), new=4) for n in range(3)]
        engine.drain()
        assert engine.scheduler.stats.refused == 0
        engine.check_outputs(jobs)
        engine.drained()


# ---------------------------------------------------------------------- waiting for copies


def test_copies_under_way_are_waited_for_and_hold_nobody_else_up() -> None:
    engine = ModelFree(12, History(), host_pages=100, copies_run=False, admission=Everybody(), max_batch_tokens=24)
    jobs = [engine.submit(range(100 * n, 100 * n + 8), new=20) for n in range(3)]
    waited = 0
    while not engine.scheduler.idle:
        before = [job.suspensions for job in jobs]
        if engine.step() is None:
            waited += 1
            # Nobody gives way while pages are about to come back.
            assert [job.suspensions for job in jobs] == before or sum(before) + 1 == sum(j.suspensions for j in jobs)
    assert waited > 0
    engine.check_outputs(jobs)
    engine.drained()


def test_a_load_holds_only_its_own_request_up() -> None:
    engine = ModelFree(20, History(), host_pages=100, copies_run=False, max_batch_tokens=32)
    first = engine.submit(range(40), new=1)
    engine.drain()
    for _ in range(20):
        engine.manager.poll()
        engine.copy()
    filler = engine.submit(range(500, 570), new=1)
    engine.drain()
    for _ in range(20):
        engine.manager.poll()
        engine.copy()
    again = engine.submit(range(40), 77, new=2)
    other = engine.submit(range(900, 910), new=6)
    engine.step()
    assert again.state is State.LOADING
    waits = [str(wait) for wait in engine.scheduler.waits()]
    assert waits == ["request 2 waits for its rows from a lower tier"]
    while other.state is not State.DONE:
        engine.step()
        assert again.state is State.LOADING
    engine.drain()
    assert again.reused_tokens >= 36
    engine.check_outputs([first, filler, again, other])
    engine.drained()


# ---------------------------------------------------------------------- deadlocks


def test_pages_that_others_hold_are_a_deadlock_that_names_everybody() -> None:
    engine = ModelFree(6, History(), max_batch_tokens=8)
    alien = engine.manager.open(tokens(range(900, 916)))
    engine.manager.complete(engine.manager.plan([Run(alien, 16)]).commit())
    first, second = engine.submit(range(12), new=4), engine.submit(range(100, 104))
    engine.step()
    for _ in range(2):
        with pytest.raises(DeadlockError) as caught:
            engine.scheduler.turn()
        assert str(caught.value) == (
            "no request can go on, and nobody is at work who will change that: request 0 waits for pages: "
            "target/History() needs 1 pages and can get 0; request 1 waits for room; "
            "others than its requests have 1 open sequences and hold 4 pages\n"
            "hint: close the sequences and release the holds that others than this scheduler have on its cache"
        )
    engine.manager.close(alien)
    engine.drain()
    engine.check_outputs([first, second])
    engine.drained()


def test_a_hold_that_will_be_released_is_no_deadlock() -> None:
    engine = ModelFree(6, History(), max_batch_tokens=16)
    leaving = engine.submit(range(12), new=8)
    engine.step()
    assert engine.wire.send(leaving).length == 12
    staying = engine.submit(range(100, 112), new=8)
    for _ in range(8):
        engine.step()
    assert staying.state is State.DECODE and len(staying.output) == 1
    assert [wait.ends for wait in engine.scheduler.waits()] == [True]
    engine.wire.release()
    engine.drain()
    engine.check_outputs([staying])
    engine.drained()


def test_a_request_that_lacks_pages_although_it_is_alone_ends_with_the_numbers(monkeypatch) -> None:
    """It passed the arithmetic at submission, so this takes a cache that is smaller than its layout says."""
    engine = ModelFree(6, History(), max_batch_tokens=32)
    monkeypatch.setattr(type(engine.manager.layout), "require_fit", lambda *_: None)
    lost, next_one = engine.submit(range(22), new=8), engine.submit(range(100, 104))
    engine.drain()
    assert str(lost.error) == (
        "one request alone does not fit a cache of 896 bytes: target/History() needs 1 pages and can get 0\n"
        "hint: give the cache more memory"
    )
    assert isinstance(lost.error, CapacityError)
    assert len(lost.output) == 3
    assert engine.scheduler.stats.refused == 1
    engine.check_outputs([next_one])
    engine.drained()


def test_waits_say_who_waits_for_whom() -> None:
    engine = ModelFree(40, History(), max_batch_tokens=16, max_sequences=2)
    engine.submit(range(31))
    engine.step()
    for n in range(2):
        engine.submit(range(31), 90 + n)
    engine.submit(range(500, 505))
    engine.submit(range(600, 605))
    turn = engine.scheduler.turn()
    assert turn is not None
    assert [str(wait) for wait in engine.scheduler.waits()] == [
        "request 1 waits for the prefix that request 0 computes",
        "request 2 waits for the prefix that request 0 computes",
        "request 4 waits for room",
    ]
    assert all(wait.ends for wait in engine.scheduler.waits())
    engine.scheduler.abort(turn, ran=False)
    engine.drain()
    assert engine.scheduler.waits() == []


def test_a_state_never_follows_a_wrong_one() -> None:
    roster: Roster[Asked] = Roster()
    job = Asked(prompt=np.zeros(3, np.int32), max_new_tokens=1)
    job.number, job.rank = 7, 0.0
    roster.enter(job)
    with pytest.raises(AssertionError, match="job 7 cannot go from waiting to decode"):
        roster.move(job, State.DECODE)
