"""The scheduler at random: arrivals, cancellations, priorities, tiers, transfers, failing steps, tight memory.

Whatever happens, every request ends with the output that it would have had alone or is refused at submission with the
numbers, nobody is overtaken by whoever comes later in the order, and in the end no page is held. Hypothesis drives it
where a failure should shrink; a seeded generator drives the same operations many times as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from everybody import Everybody
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from model_free import SALT, Asked, ModelFree

from kvist.errors import CapacityError
from kvist.scheduling import AdmissionPolicy, ReserveToEnd, State, Watermark, order
from kvist.spec import History, Retention, Scope, Window
from kvist.spec import State as StateRetention

MIXES: list[tuple[Retention, ...]] = [
    (History(),),
    (History(), Window(6)),
    (History(), StateRetention()),
    (Window(5),),
    (StateRetention(),),
    (History(), Window(7, sinks=2), StateRetention()),
]
POLICIES: list[AdmissionPolicy] = [ReserveToEnd(), Watermark(0.0), Watermark(0.3), Everybody()]

#: ``draw(n)``: a number below ``n``.
Draw = Callable[[int], int]


class Traffic:
    """Operations on one engine, chosen by ``draw``."""

    def __init__(self, draw: Draw) -> None:
        mix = MIXES[draw(len(MIXES))]
        #: Without states a test can play the process that rows come from.
        self.rows_only = not any(retention.exact for retention in mix)
        self.ageing_s = float(draw(20))
        self.engine = ModelFree(
            (5 + draw(9)) * len(mix),
            *mix,
            admission=POLICIES[draw(len(POLICIES))],
            host_pages=[0, 0, 20, 200][draw(4)],
            copies_run=bool(draw(2)),
            ageing_s=self.ageing_s,
            max_batch_tokens=4 + draw(16),
            max_sequences=1 + draw(4),
            seed=draw(1000),
        )
        self.jobs: list[Asked] = []
        self.counts: Counter[str] = Counter()
        self.seen: set[int] = set()
        self.engine.on_turn = self._look

    def submit(self, draw: Draw) -> None:
        length = 1 + draw(23)
        shared, begin, own = draw(length + 1), 100 * draw(3), 1000 + 30 * draw(50)
        new = 1 + draw(15)
        remote = draw(length) if self.rows_only and not draw(5) else 0
        try:
            job = self.engine.submit(
                range(begin, begin + shared),
                range(own, own + length - shared),
                new=new,
                stop_after=1 + draw(new),
                priority=draw(7) - 3,
                scope=[Scope(), SALT][draw(2)],
                remote_tokens=remote,
            )
        except CapacityError:
            self.counts["refused"] += 1
            return
        self.jobs.append(job)

    def step(self, draw: Draw) -> None:
        self.engine.step(self._right(draw))

    def _right(self, draw: Draw) -> dict[Asked, tuple[int, int]]:
        """Drafts for some, of which some are right; also for jobs that do not decode."""
        jobs = [job for job in self.jobs if job.state is not State.DONE and not draw(3)] if not draw(2) else []
        return {job: (draw(4), draw(3)) for job in jobs}

    def _look(self) -> None:
        """Between a turn's making and its execution."""
        for job in self.jobs:
            if job.started and job.number not in self.seen:
                self.seen.add(job.number)
                for other in self.jobs:
                    waits = other.state is State.WAITING and not other.started
                    # At most by whoever came so little later that its cached prefix makes up for it.
                    passed = waits and order(other) < order(job) and job.rank - other.rank >= self.ageing_s
                    assert not passed, f"request {job.number} has passed request {other.number}"
        self.counts["loads"] += any(job.state is State.LOADING for job in self.jobs)

    def cancel(self, draw: Draw) -> None:
        if self.jobs:
            self.engine.finish(self.jobs[draw(len(self.jobs))])

    def fail(self, draw: Draw) -> None:
        """A step that does not get to its end."""
        right = self._right(draw)
        turn = self.engine.scheduler.turn({job.number: self.engine.drafts(job, *n) for job, n in right.items()})
        self._look()
        if turn is not None:
            ran = bool(draw(2))
            if ran:
                self.engine.run(turn)
            self.engine.scheduler.abort(turn, ran=ran)
            self.engine.manager.check()

    def transfer(self, draw: Draw) -> None:
        """A transfer ends, well or not, or somebody lets go of pages."""
        wire = self.engine.wire
        if not draw(2):
            wire.release()
        if wire.landings:
            job = list(wire.landings)[draw(len(wire.landings))]
            if draw(3):
                wire.arrive(job)
                self.counts["landed"] += 1
            else:
                wire.lose(job)
        self.engine.manager.check()

    def send(self, draw: Draw) -> None:
        """A request goes on in another process."""
        decoding = self.engine.scheduler.decoding
        if decoding:
            self.engine.wire.send(decoding[draw(len(decoding))])
            self.counts["sent"] += 1

    def copy(self, draw: Draw) -> None:
        self.engine.copy()

    def end(self) -> None:
        """Everybody comes to an end, and leaves nothing behind."""
        engine = self.engine
        turns = 0
        while not engine.scheduler.idle:
            engine.step()
            self.transfer(lambda n: n - 1)
            engine.wire.release()
            turns += 1
            assert turns < 3000, "; ".join(map(str, engine.scheduler.waits()))
        engine.wire.release()
        engine.check_outputs(self.jobs)
        for job in self.jobs:
            assert job.error is None, job.error
            assert job.state is State.DONE
        engine.drained()
        stats = engine.scheduler.stats
        assert stats.refused == 0
        assert stats.submitted == stats.ended == len(self.jobs)
        for name in ("deferred", "suspensions", "pauses", "recomputed_tokens", "trimmed", "accepted"):
            self.counts[name] += getattr(stats, name)


#: Operations and how often they come.
WEIGHTS = {"submit": 4, "step": 8, "cancel": 1, "fail": 1, "transfer": 2, "send": 1, "copy": 2}
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


def drive(seed: int) -> Traffic:
    """One run of 20 to 80 operations; the same one for the same seed."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> int:
        return int(rng.integers(count))

    traffic = Traffic(draw)
    for _ in range(20 + draw(60)):
        getattr(traffic, OPERATIONS[draw(len(OPERATIONS))])(draw)
    traffic.end()
    return traffic


class Machine(RuleBasedStateMachine):
    """The same, for Hypothesis."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.traffic = Traffic(lambda n: data.draw(st.integers(0, n - 1)))

    def _do(self, name: str, data: st.DataObject) -> None:
        getattr(self.traffic, name)(lambda n: data.draw(st.integers(0, n - 1)))

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        self._do("submit", data)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self._do("step", data)

    @rule(data=st.data())
    def step_again(self, data: st.DataObject) -> None:
        self._do("step", data)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._do("cancel", data)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self._do("fail", data)

    @rule(data=st.data())
    def transfer(self, data: st.DataObject) -> None:
        self._do("transfer", data)

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self._do("send", data)

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self._do("copy", data)

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.end()


def run_hypothesis(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_request_ends_well_whatever_happens() -> None:
    run_hypothesis(examples=100, steps=30)


def test_seeded_traffic() -> None:
    counts: Counter[str] = Counter()
    for seed in range(100):
        counts.update(drive(seed).counts)
    # Everything there is was reached.
    assert all(
        counts[name]
        for name in ("refused", "landed", "sent", "loads", "deferred", "suspensions", "pauses", "trimmed", "accepted")
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_same_traffic_gives_the_same_turns(seed: int) -> None:
    first, second = drive(seed), drive(seed)
    assert first.engine.log == second.engine.log
    assert [job.output for job in first.jobs] == [job.output for job in second.jobs]


@pytest.mark.slow
def test_seeded_traffic_for_long() -> None:
    for seed in range(1000, 1250):
        drive(seed)


@pytest.mark.slow
def test_every_request_ends_well_for_long() -> None:
    run_hypothesis(examples=80, steps=50)
