"""The whole contract at random, against models that know nothing of pages: see support/cache_machine.py.

Hypothesis drives the machine where a failure should shrink to a few operations; a seeded generator drives the same
operations many times as fast, which is where most of the operations of the slow set come from.
"""

from __future__ import annotations

import random

import pytest
from cache_drive import LENGTH, Violation, drive
from cache_machine import OPERATIONS, CacheMachine
from cache_mixes import MIXES, Draw, Setup
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

_BELOW = [st.integers(0, below) for below in range(64)]


def drawing(data: st.DataObject) -> Draw:
    def draw(below: int) -> int:
        if below <= 1:
            return 0
        return data.draw(_BELOW[below - 1] if below <= len(_BELOW) else st.integers(0, below - 1))

    return draw


class Traffic(RuleBasedStateMachine):
    """Rules are added below, from the table of operations."""

    executed = 0

    def __init__(self) -> None:
        super().__init__()
        self.machine: CacheMachine | None = None
        self.broken = False

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.machine = CacheMachine(Setup.choose(drawing(data)))

    def operate(self, name: str, data: st.DataObject) -> None:
        type(self).executed += 1
        # What fails leaves the machine anywhere: its end says nothing then.
        self.broken = True
        getattr(self.machine, name)(drawing(data))
        self.broken = False

    @invariant()
    def everything_holds(self) -> None:
        if self.machine is not None:
            self.machine.check()

    def teardown(self) -> None:
        if self.machine is not None and not self.broken:
            self.machine.finish(lambda below: 0)


def _rule(name: str):
    def operation(self: Traffic, data: st.DataObject) -> None:
        self.operate(name, data)

    operation.__name__ = name
    return rule(data=st.data())(operation)


# Hypothesis chooses among rules evenly, so what is to come often is there more than once.
Machine = type(
    "Machine",
    (Traffic,),
    {f"{name}_{n}": _rule(name) for name, weight in OPERATIONS.items() for n in range(-(-weight // 8))},
)


def run_with_hypothesis(examples: int, steps: int) -> int:
    Machine.executed = 0
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
    return Machine.executed


def test_rules_in_any_order() -> None:
    assert run_with_hypothesis(examples=100, steps=30) > 1000


@pytest.mark.parametrize("seed", range(20))
def test_seeded_traffic(seed: int) -> None:
    drive(seed, audit=1)


@pytest.mark.slow
def test_rules_in_any_order_for_long(record_property) -> None:
    operations = run_with_hypothesis(examples=600, steps=60)
    record_property("operations", operations)
    print(f"{operations} operations")


@pytest.mark.slow
def test_two_hundred_thousand_operations(record_property) -> None:
    # Other seeds than the quick test's.
    operations = sum(drive(seed) for seed in range(1_000, 1_000 + 200_000 // LENGTH))
    record_property("operations", operations)
    print(f"{operations} operations")
    assert operations >= 200_000


def test_a_violation_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: CacheMachine, draw: Draw) -> None:
        assert not self.flights, "a step is in flight"

    monkeypatch.setattr(CacheMachine, "leave", wrong)
    with pytest.raises(Violation, match=r"seed \d+, Setup\(mix=.*after operation \d+, leave: .*a step is in flight"):
        sum(drive(seed) for seed in range(9))


def test_the_setups_reach_every_mix_and_kind_of_arena() -> None:
    setups = [Setup.choose(random.Random(seed).randrange) for seed in range(300)]
    assert {setup.mix for setup in setups} == set(MIXES)
    machines = [CacheMachine(setup) for setup in setups]
    fungible = [machine.pages is not None for machine in machines]
    assert 60 < sum(fungible) < 290
    assert any(len({group.page_bytes for group in machine.layout.groups}) > 1 for machine in machines)
