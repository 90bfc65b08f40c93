"""The suite for spec factories passes what is right, and names the clause of what is wrong."""

from __future__ import annotations

import pytest
from kit.mutants.specs import MUTANTS, Sound

from kvist.spec import History, State, Window
from kvist.testing.mixes import Chunk
from kvist.testing.reads import reads
from kvist.testing.suites import run


def test_a_sound_factory_passes() -> None:
    assert run(Sound) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_by_its_clause(mutant) -> None:
    failures = run(mutant.make(), mutant.clause)
    assert failures
    assert all(f"\n{mutant.clause} " in str(failure) and "\nchange: " in str(failure) for failure in failures)
    assert all(isinstance(failure.error, AssertionError) for failure in failures), failures


def test_an_author_who_tells_no_variants_hears_what_is_not_run() -> None:
    class Silent(Sound):
        def variants(self, config):
            return None

    assert run(Silent) == []
    with pytest.raises(pytest.skip.Exception) as caught:
        Silent().test_variants_are_told()
    assert str(caught.value) == "not run here: the author's class has no variants()"


def test_what_queries_read_by_hand() -> None:
    assert reads(History(), 5) == ((0, 6),)
    # The query at 9 with a window of four reads 6 to 9, and the three sinks.
    assert reads(Window(4), 9) == ((6, 10),)
    assert reads(Window(4, sinks=3), 9) == ((0, 3), (6, 10))
    assert reads(Window(4, sinks=3), 6) == ((0, 7),)
    assert reads(Chunk(5), 9) == ((5, 10),) and reads(Chunk(5), 10) == ((10, 11),)


def test_a_retention_that_the_kit_was_not_told_of() -> None:
    with pytest.raises(LookupError) as caught:
        reads(State(), 3)
    assert str(caught.value) == (
        "the kit does not know what a query of State() reads; say it in the tests of the plugin with "
        "`@kvist.testing.reads.reads.register(State)`"
    )
