"""The suite: every clause of the contract of cache managers that can be tried from outside."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvist.testing.drive import drive
from kvist.testing.machine import CacheMachine
from kvist.testing.manager.life import LifeTests
from kvist.testing.manager.reuse import ReuseTests, StandstillTests
from kvist.testing.manager.room import RoomTests
from kvist.testing.manager.rows import RowTests
from kvist.testing.manager.steps import StepTests
from kvist.testing.manager.tiers import TierTests
from kvist.testing.mixes import Draw, Setup
from kvist.testing.stateful import run_with_hypothesis


class CacheManagerTests(ReuseTests, StandstillTests, StepTests, RowTests, RoomTests, LifeTests, TierTests):
    """Subclass it as ``class TestMine(CacheManagerTests)`` and fill in what :class:`ManagerAuthor` names::

        class TestMine(CacheManagerTests):
            def manager(self, layout, **options):
                return MyManager(layout, **options)

    What it cannot show: speed, and behaviour at sizes beyond those of the scenarios.
    """

    #: How long the machine that does everything in any order runs: seeds of fast traffic, and runs of Hypothesis,
    #: which shrinks what it finds.
    seeds: ClassVar[int] = 20
    examples: ClassVar[int] = 40

    @pytest.mark.clause("CM-33")
    def test_anything_in_any_order(self) -> None:
        for seed in range(self.seeds):
            drive(seed, audit=1, machine=self._machine, choose=self._choose)

    @pytest.mark.clause("CM-33")
    def test_anything_in_any_order_in_its_shortest_form(self) -> None:
        run_with_hypothesis(self.examples, 30, machine=self._machine, choose=self._choose)

    def _machine(self, setup: Setup) -> CacheMachine:
        return CacheMachine(setup, self.manager)

    def _choose(self, draw: Draw) -> Setup:
        return Setup.choose(draw, self.streams(), self.options)
