"""The whole contract at random, against models that know nothing of pages: see kvist.testing.machine.

Hypothesis drives the machine where a failure should shrink to a few operations; a seeded generator drives the same
operations many times as fast, which is where most of the operations of the slow set come from. Seeded traffic is in the
quick set as a part of the kit, see kvist.testing.builtin.
"""

from __future__ import annotations

import random

import pytest

from kvist.testing.drive import LENGTH, ViolationError, drive
from kvist.testing.machine import CacheMachine
from kvist.testing.mixes import MIXES, Draw, Setup
from kvist.testing.stateful import run_with_hypothesis


def test_rules_in_any_order() -> None:
    assert run_with_hypothesis(examples=100, steps=30) > 1000


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
    with pytest.raises(
        ViolationError, match=r"seed \d+, Setup\(mix=.*after operation \d+, leave: .*a step is in flight"
    ):
        sum(drive(seed) for seed in range(9))


def test_the_setups_reach_every_mix_and_kind_of_arena() -> None:
    setups = [Setup.choose(random.Random(seed).randrange) for seed in range(300)]
    assert {setup.mix for setup in setups} == set(MIXES)
    machines = [CacheMachine(setup) for setup in setups]
    fungible = [machine.pages is not None for machine in machines]
    assert 60 < sum(fungible) < 290
    assert any(len({group.page_bytes for group in machine.layout.groups}) > 1 for machine in machines)
