"""Requests that come from another process or leave for one, and pairs of caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from everybody import Everybody
from model_free import ModelFree

from kvist.batch import DecodeBatch
from kvist.errors import CapacityError, StateError
from kvist.manager import PagedCacheManager, Run
from kvist.scheduling import Job, JointPlan, ReserveToEnd, State
from kvist.sequence import Sequence as CacheSequence
from kvist.spec import History, Window
from kvist.spec import State as StateRetention
from kvist.testing.values import make_layout, make_spec, tokens

# ---------------------------------------------------------------------- landings


@pytest.mark.parametrize("mix", [(History(),), (History(), Window(6))])
def test_a_request_begins_from_rows_of_another_process(mix: tuple) -> None:
    engine = ModelFree(60, *mix)
    other = engine.submit(range(500, 506), new=12)
    job = engine.submit(range(21), new=5, remote_tokens=20)
    engine.step()
    assert job.state is State.ARRIVING
    assert [str(wait) for wait in engine.scheduler.waits()] == ["request 1 waits for its rows from another process"]
    for _ in range(4):
        # It holds nobody up.
        assert engine.step() is not None
    engine.wire.arrive(job)
    engine.drain()
    assert (job.reused_tokens, job.computed_tokens) == (0, 1)
    engine.check_outputs([other, job])
    engine.drained()


def test_rows_that_do_not_come_are_computed() -> None:
    engine = ModelFree(40, History())
    job = engine.submit(range(21), new=5, remote_tokens=20)
    assert engine.step() is None
    engine.wire.lose(job)
    assert engine.manager.stats().groups[0].held == 5
    engine.drain()
    # Nobody may have these pages as long as somebody might write to them.
    assert engine.manager.stats().groups[0].held == 5
    engine.wire.release()
    assert job.computed_tokens == 21
    engine.check_outputs([job])
    engine.drained()


def test_an_arriving_request_can_be_ended() -> None:
    engine = ModelFree(40, History())
    job = engine.submit(range(21), new=5, remote_tokens=20)
    engine.step()
    engine.finish(job)
    assert engine.scheduler.idle and engine.wire.open == 1
    engine.wire.release()
    engine.drained()


def test_a_landing_waits_for_room_like_everybody() -> None:
    engine = ModelFree(8, History())
    running = engine.submit(range(100, 112), new=9)
    engine.step()
    job = engine.submit(range(21), new=5, remote_tokens=20)
    while running.state is not State.DONE:
        engine.step()
        assert job.state in (State.WAITING, State.DONE) or running.state is State.DONE
    engine.step()
    assert job.state is State.ARRIVING
    engine.wire.arrive(job)
    engine.drain()
    engine.check_outputs([running, job])
    engine.drained()


def test_two_schedulers_hand_a_request_over() -> None:
    """Prefill here, decode there, as if it had run in one place."""
    here, there = ModelFree(20, History(), max_batch_tokens=8), ModelFree(20, History(), seed=7)
    leaving = here.submit(range(19), new=1, stop_after=2)
    while leaving.state is not State.DECODE:
        here.step()
    first = leaving.output[0]
    hold = here.wire.send(leaving)
    assert leaving.state is State.DONE and hold.length == 19
    job = there.submit(range(19), first, new=6, remote_tokens=19)
    there.step()
    landing = there.wire.landings.pop(job)
    (pages,) = landing.pages
    for block, page in enumerate(pages.tolist()):
        there.values.pages[0][page] = here.values.pages[0][hold.pages[0][block]]
    here.wire.release()
    there.scheduler.landed(job, there.manager.landed(landing))
    there.drain()
    there.check_outputs([job])
    here.drained()
    there.drained()


def test_only_a_computed_prompt_can_leave_and_only_an_arriving_one_land() -> None:
    engine = ModelFree(20, History())
    job = engine.submit(range(19))
    engine.step()
    with pytest.raises(StateError) as caught:
        engine.scheduler.detach(job)
    assert str(caught.value) == ("detach() of request 0, which is prefill\nhint: detach it when its prompt is computed")
    with pytest.raises(StateError, match=r"^lost\(\) of request 0, which is prefill$"):
        engine.scheduler.lost(job)
    assert job.sequence is not None
    with pytest.raises(StateError, match=r"^landed\(\) of request 0, which is prefill$"):
        engine.scheduler.landed(job, job.sequence)
    nobody = ModelFree(20, History(), remote=None)
    with pytest.raises(StateError, match=r"^a job with remote_tokens needs a scheduler with a remote$"):
        nobody.submit(range(9), remote_tokens=8)
    engine.drain()


# ---------------------------------------------------------------------- pairs


class Mirror:
    """A draft model's cache in which every job computes just what it computes in the scheduler's own."""

    def __init__(self, manager: PagedCacheManager) -> None:
        self.manager = manager
        self.batch = manager.decode_batch()
        self.sequences: dict[Job, CacheSequence] = {}

    def sequence(self, job: Job) -> CacheSequence | None:
        return self.sequences.get(job)

    def begin(self, job: Job) -> None:
        assert job not in self.sequences
        # Without reuse, and from the start: what it lacks is computed with the first chunk.
        self.sequences[job] = self.manager.open(job.tokens, reuse=False)

    def runs(self, chunks: Sequence[tuple[Job, int]]) -> tuple[Iterable[Run], DecodeBatch | None]:
        runs = []
        for job, count in chunks:
            own, target = self.sequences[job], job.sequence
            assert target is not None
            runs.append(Run(own, target.computed + count - own.computed))
        return runs, self.batch

    def give_up(self, job: Job) -> None:
        sequence = self.sequences.pop(job)
        if sequence.batch is not None:
            self.batch.leave(sequence)
        self.manager.close(sequence)


class Paired(ModelFree):
    def __init__(self, pages: int, draft_pages: int, **options: object) -> None:
        layout = make_layout(make_spec(4, History(), Window(5)), draft_pages)
        self.mirror = Mirror(PagedCacheManager(layout))
        super().__init__(pages, History(), companion=self.mirror, **options)

    def step(self):
        turn = super().step()
        self.mirror.manager.check()
        return turn

    def run(self, turn) -> None:
        super().run(turn)
        assert len(turn.steps) == 2
        self.mirror.manager.complete(turn.steps[1])
        for chunk in turn.chunks:
            own = self.mirror.sequences[chunk.job]
            assert own.computed == chunk.start + chunk.count
            if chunk.last:
                self.mirror.batch.join(own)


@pytest.mark.parametrize("policy", [ReserveToEnd(), Everybody()])
@pytest.mark.parametrize(("pages", "draft_pages"), [(60, 60), (14, 60), (60, 26)])
def test_a_pair_runs_as_one_whichever_is_short(pages: int, draft_pages: int, policy) -> None:
    engine = Paired(pages, draft_pages, admission=policy, max_batch_tokens=12)
    jobs = [engine.submit(range(100 * n, 100 * n + 9), new=14) for n in range(6)]
    engine.drain()
    engine.check_outputs(jobs)
    stats = engine.scheduler.stats
    assert stats.refused == 0
    assert (stats.pauses > 0) == (isinstance(policy, Everybody) and min(pages, draft_pages) < 60)
    engine.drained()
    draft = engine.mirror.manager.stats()
    assert draft.open_sequences == 0 and all(group.held == 0 for group in draft.groups)


@pytest.mark.parametrize("short", [0, 1])
def test_a_shortage_of_one_leaves_the_other_as_it_was(short: int) -> None:
    """sd-08: when one of two plans does not fit neither cache takes anything, whichever comes first."""
    managers = tuple(PagedCacheManager(make_layout(make_spec(4, History()), 3 if n == short else 9)) for n in (0, 1))
    for manager in managers:
        # Somebody holds a page.
        manager.complete(manager.plan([Run(manager.open(tokens(range(90, 94))), 4)]).commit())
    sequences = [manager.open(tokens(range(10))) for manager in managers]
    before = [manager.stats() for manager in managers]

    def plan(count: int) -> JointPlan:
        runs = [[Run(sequence, count)] for sequence in sequences]
        return JointPlan(managers, tuple(manager.plan(each) for manager, each in zip(managers, runs)))

    joint = plan(10)
    assert not joint.fits
    assert [(each.needed, each.available) for each in joint.shortages] == [(3, 2)]
    with pytest.raises(CapacityError):
        joint.commit()
    assert [manager.stats() for manager in managers] == before
    steps = plan(8).commit()
    for manager, step, sequence in zip(managers, steps, sequences):
        manager.complete(step)
        manager.check()
        assert sequence.computed == 8


def test_a_stale_plan_of_one_takes_the_step_of_the_other_back() -> None:
    managers = tuple(PagedCacheManager(make_layout(make_spec(4, History()), 9)) for _ in range(2))
    sequences = [manager.open(tokens(range(10))) for manager in managers]
    joint = JointPlan(managers, tuple(manager.plan([Run(each, 8)]) for manager, each in zip(managers, sequences)))
    managers[1].open(tokens(range(3)))
    with pytest.raises(StateError, match="this plan is stale"):
        joint.commit()
    assert [sequence.scheduled for sequence in sequences] == [0, 0]
    for manager in managers:
        manager.check()


def test_both_of_a_pair_fail_together() -> None:
    engine = Paired(30, 30)
    job = engine.submit(range(9), new=4)
    turn = engine.scheduler.turn()
    assert turn is not None
    engine.scheduler.abort(turn, ran=False)
    assert job.state is State.PREFILL
    engine.drain()
    engine.check_outputs([job])


def test_states_of_a_failed_pair_are_computed_again() -> None:
    engine = ModelFree(30, History(), StateRetention())
    job = engine.submit(range(9), new=4)
    engine.step()
    turn = engine.scheduler.turn()
    assert turn is not None
    engine.run(turn)
    engine.scheduler.abort(turn)
    assert job.state is State.WAITING and job.pauses == 1
    engine.drain()
    assert np.array_equal(job.tokens[:9], job.prompt)
    engine.check_outputs([job])
