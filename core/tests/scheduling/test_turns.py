"""What a turn consists of: rows, chunks, order, deferral. Expected values are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from model_free import SALT, Asked, ModelFree, alone

from kvist.errors import CapacityError, RequestError, SpecError, StateError
from kvist.scheduling import Job, Scheduler, State
from kvist.scheduling.prefixes import Prefixes
from kvist.spec import History, Scope
from kvist.spec import State as StateRetention

LONG = list(range(1, 33))


def chunks(engine: ModelFree) -> list[tuple[int, int, int]]:
    """Job, start and count of the latest turn's chunks."""
    return list(engine.log[-1][1])


def test_decode_rows_come_first_and_prompts_share_the_rest_in_order() -> None:
    engine = ModelFree(100, History(), max_batch_tokens=10)
    first = engine.submit(range(6), new=9)
    engine.step()
    second, third = engine.submit(range(100, 112)), engine.submit(range(200, 206))
    engine.step()
    assert engine.log[-1] == ((0,), ((1, 0, 9),))
    engine.step()
    # One decode row, the rest of the second prompt, and what is left of the budget for the third.
    assert engine.log[-1] == ((0,), ((1, 9, 3), (2, 0, 6)))
    engine.drain()
    assert [len(job.output) for job in (first, second, third)] == [9, 4, 4]
    engine.check_outputs([first, second, third])
    engine.drained()


def test_a_chunk_ends_where_a_state_is_kept() -> None:
    engine = ModelFree(40, History(), StateRetention(), max_batch_tokens=32)
    job = engine.submit(range(22))
    engine.step()
    assert job.sequence is not None and job.sequence.chunk_ends[0] == 20
    assert chunks(engine) == [(0, 0, 20)]
    engine.step()
    assert chunks(engine) == [(0, 20, 2)]
    engine.drain()
    engine.check_outputs([job])


def test_no_more_than_the_next_step_can_work_on_is_admitted() -> None:
    engine = ModelFree(100, History(), max_batch_tokens=8, max_sequences=4)
    jobs = [engine.submit(range(100 * n, 100 * n + 20)) for n in range(3)]
    engine.step()
    assert [job.state for job in jobs] == [State.PREFILL, State.WAITING, State.WAITING]
    engine.drain()
    engine.check_outputs(jobs)


def test_rows_are_limited() -> None:
    engine = ModelFree(100, History(), max_batch_tokens=64, max_sequences=2)
    jobs = [engine.submit(range(100 * n, 100 * n + 5), new=3 + n) for n in range(4)]
    seen = 0
    while not engine.scheduler.idle:
        turn = engine.step()
        assert turn is not None
        rows = turn.decode_rows + len(turn.chunks)
        seen = max(seen, rows)
    assert seen == 2
    engine.check_outputs(jobs)


def test_timestamps_are_the_clocks() -> None:
    engine = ModelFree(100, History(), max_batch_tokens=8, max_sequences=1, step_s=2.0)
    first, second = engine.submit(range(12), new=3), engine.submit(range(50, 54), new=1)
    engine.drain()
    # Two chunks, then two steps with one row each; the clock moves at the end of a step.
    assert [first.arrival_s, first.admitted_s, first.first_token_s, first.ended_s] == [0, 0, 4, 8]
    assert [second.arrival_s, second.admitted_s, second.first_token_s, second.ended_s] == [0, 8, 10, 10]


def test_drafts_of_some_are_checked_beside_the_others() -> None:
    """Three right drafts give four tokens in a step, wrong ones cost nothing but the rows."""
    engine = ModelFree(100, History(), max_batch_tokens=64)
    first, second, third = (engine.submit(range(100 * n, 100 * n + 6), new=12) for n in range(3))
    engine.step()
    engine.step({first: (3, 0), second: (1, 2)})
    assert [len(job.output) for job in (first, second, third)] == [5, 3, 2]
    assert engine.log[-1][0] == (2,)
    stats = engine.scheduler.stats
    assert (stats.drafted, stats.accepted) == (6, 4)
    # More than it will ever generate.
    engine.step({first: (50, 0)})
    assert len(first.output) == 12
    engine.drain()
    engine.check_outputs([first, second, third])
    engine.drained()


def test_drafts_take_only_what_is_left() -> None:
    """Of the tokens of a step: prompts that are being computed come first; of the pages: nobody gives way for a bet."""
    engine = ModelFree(9, History(), max_batch_tokens=8)
    first = engine.submit(range(6), new=20)
    engine.step()
    engine.submit(range(100, 114), new=1)
    for start in (0, 7):
        # The prompt's tokens and one row: nothing is left.
        engine.step({first: (4, 0)})
        assert engine.log[-1] == ((0,), ((1, start, 7),))
    engine.step({first: (4, 0)})
    assert len(first.output) == 8
    engine.drain()
    assert engine.scheduler.stats.pauses == 0
    engine.check_outputs([first])


# ---------------------------------------------------------------------- order


def test_a_priority_is_worth_so_many_seconds_and_no_more() -> None:
    engine = ModelFree(100, History(), max_sequences=1, ageing_s=10.0)
    running = engine.submit(range(4), new=30)
    engine.step()
    patient = engine.submit(range(100, 104), priority=0)
    engine.clock.now += 8
    urgent = engine.submit(range(200, 204), priority=1)
    engine.clock.now += 4
    late = engine.submit(range(300, 304), priority=1)
    engine.drain()
    order = [job.number for job in sorted((patient, urgent, late), key=lambda job: job.admitted_s)]
    # The urgent one came 9 s after the patient one, which is less than 10, the late one 13 s after.
    assert order == [urgent.number, patient.number, late.number]
    engine.check_outputs([running, patient, urgent, late])


def test_a_cached_prompt_passes_those_that_came_little_earlier() -> None:
    """As if it had come up to ``ageing_s`` earlier; a prompt of which less is cached, less."""
    engine = ModelFree(100, History(), max_sequences=1, ageing_s=10.0)
    jobs = [engine.submit(range(40), new=1)]
    engine.drain()
    jobs.append(engine.submit(range(500, 504), new=30))
    engine.step()
    unknown = engine.submit(range(600, 640))
    engine.clock.now += 6
    # 20 of 40 tokens: as if it had come 5 s earlier. 39 of 40: 9.75 s.
    half, known = engine.submit(range(20), range(700, 720)), engine.submit(range(40))
    engine.clock.now += 5
    late = engine.submit(range(40), 9)
    engine.drain()
    order = [job.number for job in sorted((unknown, half, known, late), key=lambda job: job.admitted_s)]
    assert order == [known.number, unknown.number, half.number, late.number]
    engine.check_outputs([*jobs, unknown, half, known, late])


def test_a_long_queue_costs_a_few_look_ups(monkeypatch) -> None:
    engine = ModelFree(100, History(), max_sequences=2, max_batch_tokens=64, step_s=0.01)
    for n in range(200):
        engine.submit(range(10 * n, 10 * n + 6), new=2)
    looked_up = []
    probe = engine.manager.probe
    monkeypatch.setattr(engine.manager, "probe", lambda *arguments: looked_up.append(0) or probe(*arguments))
    most = 0
    while not engine.scheduler.idle:
        looked_up.clear()
        engine.step()
        most = max(most, len(looked_up))
    # Eight of those that wait, and the one that is chosen, for each of two rows.
    assert 8 <= most <= 10


def test_equal_ranks_go_by_submission() -> None:
    engine = ModelFree(100, History(), max_sequences=1, ageing_s=0.0)
    jobs = [engine.submit(range(10 * n, 10 * n + 3), new=1, priority=n % 3) for n in range(6)]
    engine.drain()
    assert sorted(jobs, key=lambda job: job.admitted_s) == jobs


def test_two_runs_are_the_same() -> None:
    logs = []
    for _ in range(2):
        engine = ModelFree(14, History(), host_pages=40, max_batch_tokens=9)
        for n in range(9):
            engine.submit(range(100 * (n % 4), 100 * (n % 4) + 4 + 2 * n), new=3 + n % 5, priority=n % 3)
            engine.step()
        engine.drain()
        logs.append(engine.log)
    assert logs[0] == logs[1]


# ---------------------------------------------------------------------- deferral


class Computing:
    """A sequence of which only the length counts."""

    def __init__(self, computed: int) -> None:
        self.computed = computed


def job(number: int, tokens: list[int], computed: int | None = None, scope: Scope | None = None) -> Asked:
    made = Asked(prompt=np.array(tokens, np.int32), max_new_tokens=4, scope=scope or Scope())
    made.number, made.rank = number, float(number)
    if computed is not None:
        made.sequence = Computing(computed)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("computed", "tokens", "waits"),
    [
        (0, LONG, True),
        (0, [*LONG[:9], 90], True),
        # Eight tokens more are shared, but the last token of a prompt is always computed.
        (0, LONG[:8], False),
        (0, LONG[:9], True),
        (0, [*LONG[:7], 90, 91], False),
        (16, [*LONG[:23], 90, 91], False),
        (16, [*LONG[:24], 90, 91], True),
        # Nothing that a whole block is left of.
        (25, [*LONG, 90], False),
    ],
)
def test_waiting_for_a_prefix(computed: int, tokens: list[int], waits: bool) -> None:
    prefixes: Prefixes[Asked] = Prefixes(8)
    older = job(0, LONG, computed)
    prefixes.add(older)
    assert prefixes.wait_for(job(1, tokens)) is (older if waits else None)


def test_only_earlier_requests_of_the_same_scope_are_waited_for() -> None:
    prefixes: Prefixes[Asked] = Prefixes(8)
    contributor = job(5, LONG, 0)
    prefixes.add(contributor)
    assert prefixes.wait_for(job(6, LONG)) is contributor
    assert prefixes.wait_for(job(4, LONG)) is None
    assert prefixes.wait_for(job(7, LONG, scope=SALT)) is None


def test_followers_are_woken_as_soon_as_nothing_more_is_shared() -> None:
    prefixes: Prefixes[Asked] = Prefixes(8)
    contributor = job(0, LONG, 0)
    prefixes.add(contributor)
    short, long = job(1, [*LONG[:17], 90, 91]), job(2, [*LONG, 90])
    assert prefixes.wait_for(short) is prefixes.wait_for(long) is contributor
    woken = {}
    for computed in range(1, 33):
        contributor.sequence = Computing(computed)  # type: ignore[assignment]
        for each in prefixes.advanced(contributor):
            woken[each.number] = computed
    # From 10 computed tokens on no whole block of the 17 shared ones is left, from 25 on none of the 32.
    assert woken == {1: 10, 2: 25}
    assert prefixes.remove(contributor) == []


def test_followers_are_woken_when_the_contributor_gives_up() -> None:
    prefixes: Prefixes[Asked] = Prefixes(8)
    contributor, follower, gone = job(0, LONG, 0), job(1, [*LONG, 90]), job(2, [*LONG, 91])
    prefixes.add(contributor)
    assert prefixes.wait_for(follower) is prefixes.wait_for(gone) is contributor
    prefixes.forget(gone, contributor)
    assert prefixes.remove(contributor) == [follower]
    assert prefixes.wait_for(job(3, LONG)) is None


@pytest.mark.parametrize("budget", [6, 64])
def test_a_shared_prefix_is_computed_once(budget: int) -> None:
    engine = ModelFree(100, History(), max_batch_tokens=budget, max_sequences=6)
    jobs = [engine.submit(range(40), 100 + n, 200 + n) for n in range(5)]
    engine.drain()
    assert [job.reused_tokens for job in jobs] == [0, 40, 40, 40, 40]
    assert [job.computed_tokens for job in jobs] == [42, 2, 2, 2, 2]
    # With the small budget nobody is considered before the prompt's last chunk.
    assert engine.scheduler.stats.deferred == (4 if budget == 64 else 0)
    engine.check_outputs(jobs)


def test_a_cancelled_contributor_lets_its_followers_go_on() -> None:
    engine = ModelFree(100, History(), max_batch_tokens=16, max_sequences=6)
    first = engine.submit(range(31))
    engine.step()
    # 15 tokens are left, so there is room for one more; it waits for them instead.
    second, third = engine.submit(range(31), 99), engine.submit(range(31), 98)
    engine.scheduler.turn()
    assert [second.state, third.state] == [State.DEFERRED, State.DEFERRED]
    turn = engine.scheduler._turn
    assert turn is not None
    engine.scheduler.abort(turn, ran=False)
    engine.finish(third)
    engine.finish(first)
    assert second.state is State.WAITING
    engine.drain()
    engine.check_outputs([second])
    engine.drained()


# ---------------------------------------------------------------------- refusals and misuse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prompt": np.zeros(0, np.int32), "max_new_tokens": 3},
            "a job of 0 prompt tokens and 3 new ones has nothing to do\nhint: give it at least one of each",
        ),
        (
            {"prompt": np.zeros(2, np.int32), "max_new_tokens": 0},
            "a job of 2 prompt tokens and 0 new ones has nothing to do\nhint: give it at least one of each",
        ),
        (
            {"prompt": np.zeros(2, np.int32), "max_new_tokens": 1, "priority": 11},
            "priority=11 is outside -10..10\nhint: only the order of priorities matters: use fewer of them",
        ),
        (
            {"prompt": np.zeros(2, np.int32), "max_new_tokens": 1, "remote_tokens": 2},
            "remote_tokens=2 of a prompt of 2: the last one is computed here",
        ),
    ],
)
def test_jobs_that_make_no_sense(arguments: dict, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Job(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 9, "max_batch_tokens": 8}, "max_sequences=9 must be in 1 .. max_batch_tokens=8"),
        ({"max_sequences": 0}, "max_sequences=0 must be in 1 .. max_batch_tokens=8"),
        ({"ageing_s": -1.0}, "ageing_s=-1.0 must be a number of seconds"),
    ],
)
def test_schedulers_that_cannot_work(options: dict, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        ModelFree(10, History(), **options)
    assert str(caught.value) == message


def test_who_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    engine = ModelFree(4, History())
    engine.submit(range(13), new=4)
    with pytest.raises(CapacityError) as caught:
        engine.submit(range(13), new=5)
    assert str(caught.value) == (
        "17 tokens never fit: they need 640 bytes (5 pages of group target/History()) and the cache has 512\n"
        "hint: shorten the request or give the cache more memory"
    )
    engine.drain()
    assert engine.scheduler.stats.submitted == 1


def test_a_turn_ends_once_and_before_the_next() -> None:
    engine = ModelFree(20, History())
    job = engine.submit(range(6))
    scheduler: Scheduler[Asked] = engine.scheduler
    turn = scheduler.turn()
    assert turn is not None
    with pytest.raises(StateError) as caught:
        scheduler.turn()
    assert str(caught.value) == ("turn() before the turn before is complete\nhint: complete() or abort() it first")
    with pytest.raises(StateError) as caught:
        scheduler.finish(job)
    assert str(caught.value) == "request 0 is in a step\nhint: complete() the turn first, then end the request"
    engine.run(turn)
    scheduler.complete(turn)
    with pytest.raises(StateError, match="a turn ends once"):
        scheduler.complete(turn)
    with pytest.raises(StateError, match="a turn ends once"):
        scheduler.abort(turn)


@pytest.mark.parametrize("mix", [(History(),), (History(), StateRetention())])
@pytest.mark.parametrize("ran", [True, False])
def test_a_failed_step_is_tried_again(mix: tuple, ran: bool) -> None:
    """Where a step overwrites states its jobs are paused, if it had begun; otherwise nothing is lost."""
    engine = ModelFree(60, *mix)
    jobs = [engine.submit(range(100 * n, 100 * n + 7), new=6) for n in range(3)]
    for _ in range(5):
        engine.step()
        turn = engine.scheduler.turn()
        assert turn is not None
        if ran:
            engine.run(turn)
        engine.scheduler.abort(turn, ran=ran)
        engine.manager.check()
    engine.drain()
    engine.check_outputs(jobs)
    assert (engine.scheduler.stats.pauses > 0) == (ran and len(mix) > 1)
    engine.drained()


def test_waiting_jobs_can_be_ended() -> None:
    engine = ModelFree(100, History(), max_sequences=1)
    jobs = [engine.submit(range(50 * n, 50 * n + 5)) for n in range(4)]
    engine.step()
    engine.finish(jobs[2])
    engine.finish(jobs[2])
    engine.drain()
    assert [len(job.output) for job in jobs] == [4, 4, 0, 4]
    assert jobs[2].output == [] and alone(jobs[0].prompt, 4) == jobs[0].output
    engine.drained()


def test_siblings_find_a_state_to_start_from() -> None:
    """Chunks end where ``next_end`` says."""
    engine = ModelFree(80, History(), StateRetention(), max_batch_tokens=64)
    first = engine.submit(range(30))
    engine.drain()
    second = engine.submit(range(30), 77)
    engine.drain()
    assert second.reused_tokens >= 28
    engine.check_outputs([first, second])
