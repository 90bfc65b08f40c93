"""The list of planted faults has not rotted. That each is noticed is measured by benchmarks/fuzz.py."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # attrs resolves annotations through the module's entry.
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_every_text_occurs_once(mutants: ModuleType) -> None:
    assert mutants.misfits() == []


def test_every_mutant_is_another_program(mutants: ModuleType) -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(names) == len(set(names)) >= 25
    for mutant in mutants.MUTANTS:
        text = (mutants.SOURCE / "kvist" / mutant.file).read_text()
        assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(text)), mutant.name


def test_a_text_that_is_gone_is_named(mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rotten = mutants.Mutant("rotten", "claim.py", "no such text", "", "nothing")
    monkeypatch.setattr(mutants, "MUTANTS", (rotten,))
    assert mutants.misfits() == ["mutant 'rotten': its text occurs 0 times in claim.py, not once"]
    with pytest.raises(ValueError) as caught:
        mutants.plant(rotten, tmp_path)
    assert str(caught.value) == "mutant 'rotten': its text occurs 0 times in claim.py"


@pytest.mark.slow
def test_a_fault_is_noticed_and_the_core_as_it_is_has_none(mutants: ModuleType) -> None:
    (fault,) = [mutant for mutant in mutants.MUTANTS if mutant.name == "claim: no hold"]
    assert "seed" in mutants.hunt(fault, 20)
    assert mutants.drive(mutants.SOURCE, 3)["failure"] is None
