"""Every faulty backend is found by a test of the clause that it breaks."""

from __future__ import annotations

import pytest
from kit.mutants.backends import MUTANTS
from kit.mutants.base import Mutant

from kvist.testing.suites import run


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_clauses_test_finds_it(mutant: Mutant) -> None:
    failures = run(mutant.make(), mutant.clause, first=True)
    assert failures, f"{mutant.name}: no test of {mutant.clause} failed"
    assert mutant.clause in str(failures[0])
