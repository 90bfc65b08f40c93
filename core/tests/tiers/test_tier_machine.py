"""The whole contract at random with host and disk below the device: see kvist.testing.tier_machine."""

from __future__ import annotations

import random

import pytest

from kvist.testing.drive import LENGTH, drive
from kvist.testing.stateful import run_with_hypothesis
from kvist.testing.tier_bookkeeping import TierSetup
from kvist.testing.tier_machine import TIER_OPERATIONS, TierMachine


def run(seed: int) -> int:
    return drive(seed, machine=TierMachine, operations=TIER_OPERATIONS, choose=TierSetup.with_tiers)


def hypothesis(examples: int, steps: int) -> int:
    return run_with_hypothesis(examples, steps, TierMachine, TIER_OPERATIONS, TierSetup.with_tiers)


def test_rules_in_any_order() -> None:
    assert hypothesis(examples=12, steps=30) > 100


@pytest.mark.parametrize("seed", range(12))
def test_seeded_traffic(seed: int) -> None:
    run(seed)


@pytest.mark.slow
def test_rules_in_any_order_for_long() -> None:
    assert hypothesis(examples=150, steps=60) > 5000


@pytest.mark.slow
def test_fifty_thousand_operations(record_property) -> None:
    operations = sum(run(seed) for seed in range(1_000, 1_000 + 50_000 // LENGTH))
    record_property("operations", operations)
    assert operations >= 50_000


def test_the_traffic_moves_content_up_and_down_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never reached is never tested."""
    reached = dict.fromkeys(["loads", "arrivals", "restarts", "settled", "failures", "wishes"], 0)

    class Counting(TierMachine):
        def _arrived(self, live) -> None:
            reached["arrivals"] += 1
            super()._arrived(live)

        def _load(self, live) -> None:
            super()._load(live)
            reached["loads"] += live.sequence.loading

        def _compare_below(self) -> None:
            reached["settled"] += 1
            super()._compare_below()

        def _start(self) -> None:
            reached["restarts"] += 1
            super()._start()

        def finish(self, draw) -> None:
            reached["wishes"] += self.manager._tree.wished
            super().finish(draw)
            reached["failures"] += sum(tier.failed_blocks for tier in self.manager.stats().tiers)

    for seed in range(12):
        drive(seed, machine=Counting, operations=TIER_OPERATIONS, choose=TierSetup.with_tiers)
    assert reached["restarts"] > 12
    assert min(reached.values()) > 0, reached


def test_the_setups_have_every_kind_of_tier() -> None:
    setups = [TierSetup.with_tiers(random.Random(seed).randrange) for seed in range(200)]
    kinds = {(bool(setup.host), bool(setup.disk_blocks)) for setup in setups}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert {setup.troubled for setup in setups} == {False, True}
