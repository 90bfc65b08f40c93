"""The kit's tests of packaging: they find every mutant by its clause, and nothing in plugins without a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.mutants.packaging import MUTANTS, sound, suite

from kvist.testing.packaging import PluginTests
from kvist.testing.suites import marked_tests, run


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_by_its_clause(mutant):
    with suite(mutant.make()) as tests:
        failures = run(tests, mutant.clause)
    assert failures
    assert all(f"\n{mutant.clause} " in str(failure) and "\nchange: " in str(failure) for failure in failures)
    assert all(isinstance(failure.error, AssertionError) for failure in failures), failures


def test_a_sound_plugin_passes():
    with suite(sound()) as tests:
        assert run(tests) == []


def test_the_built_ins_pass():
    class Builtin(PluginTests):
        name = "builtin"

    assert run(Builtin) == []


def test_an_author_who_tells_no_configs_hears_what_is_not_run():
    class Transformers(PluginTests):
        name = "transformers"

    with pytest.raises(pytest.skip.Exception) as caught:
        Transformers().test_bad_configs_give_the_documented_errors()
    assert str(caught.value) == "not run here: the author's class has no bad_configs()"


def test_a_plugin_that_does_not_exist_is_told_by_every_test():
    class Absent(PluginTests):
        name = "no-such-plugin"

    failures = {failure.test: str(failure.error) for failure in run(Absent)}
    assert set(failures) == set(marked_tests(Absent))
    assert {text.partition(";")[0] for text in failures.values()} == {
        "no distribution has an entry point 'no-such-plugin' in the group \"kvist\""
    }


def test_a_process_that_dies_is_told(tmp_path: Path):
    info = tmp_path / "kvist_dead-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: kvist-dead\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvist]\ndead = dead_plugin\n")
    (tmp_path / "dead_plugin.py").write_text("import os\nos._exit(7)")

    class Dead(PluginTests):
        name = "dead"
        folders = (tmp_path,)

    with pytest.raises(AssertionError, match="a clean process ended with exit code 7 and printed:"):
        Dead().test_the_entry_module_is_light()
