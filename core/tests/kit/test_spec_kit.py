"""The suite for spec factories passes what is right, and names the clause of what is wrong."""

from __future__ import annotations

import pytest
from kit.mutants.specs import MUTANTS, Sound

from kvist.testing.mixes import Chunk
from kvist.testing.reads import reads
from kvist.testing.spec import CacheSpecTests, _compare, _lengths
from kvist.testing.suites import run
from kvist.spec import History, State, Window


def test_a_sound_factory_passes() -> None:
    assert run(Sound) == []
