"""What pytest is told by the kit: the mark, and the clause in the report of a test that failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvist.testing import clauses as clauses_module
from kvist.testing.clauses import Clause, explain
from kvist.testing.outcomes import not_applicable, not_run_here, undeclared
from kvist.testing.suites import marked_tests, run

pytest_plugins = ["pytester"]

SUITE = """
import pytest

class TestMine:
    @pytest.mark.clause("CM-01", "XX-99")
    def test_that_fails(self):
        assert 1 + 1 == 3

    @pytest.mark.clause("CM-01")
    def test_that_passes(self):
        pass

def test_of_somebody_else():
    assert False
"""


@pytest.fixture
def one_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"CM-01": Clause("CM-01", "One and one is two", "Count again.")}
    monkeypatch.setattr(clauses_module, "clauses", lambda: table)


@pytest.mark.usefixtures("one_clause")
def test_a_failing_test_names_its_clauses_and_what_to_change(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    ran = pytester.inline_run("--strict-markers", "-p", "no:cacheprovider")
    ran.assertoutcome(passed=1, failed=2)
    fails, passes, other = ran.getreports("pytest_runtest_logreport")[1::3]
    section = ("contract of Kvist", "CM-01 One and one is two\nchange: Count again.\nXX-99")
    assert section in fails.sections
    assert fails.user_properties == [("clause", "CM-01"), ("clause", "XX-99")]
    assert passes.user_properties == [("clause", "CM-01")]
    assert not [name for name, _ in [*passes.sections, *other.sections] if name == "contract of Kvist"]


def test_the_plugin_is_light() -> None:
    script = "import pytest, sys, kvist.testing.plugin; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(ran.stdout.split()) & {"numpy", "torch", "hypothesis", "attr", "typer", "importlib_metadata"}


def test_asserts_of_the_kit_show_values(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from kvist.testing.bookkeeping import refused\ndef test(): refused(ValueError, lambda: 1)")
    ran = pytester.runpytest_subprocess("-p", "kvist.testing.plugin" if not installed() else "kvist")
    ran.stdout.fnmatch_lines(["*no ValueError*", "*assert (None is not None)*"])


def installed() -> bool:
    """Is the core installed with the entry point of its pytest plugin?"""
    from importlib.metadata import entry_points

    return any(point.value == "kvist.testing.plugin" for point in entry_points(group="pytest11"))


class Suite:
    @pytest.mark.clause("CM-01")
    def test_good(self):
        pass

    @pytest.mark.clause("CM-01", "CM-02")
    @pytest.mark.parametrize("size", [1, pytest.param(2, id="two")])
    @pytest.mark.parametrize(("left", "right"), [(1, 2), (3, 3)])
    def test_pairs(self, size, left, right):
        assert size == 2 or left != right, f"{size} {left} {right}"

    @pytest.mark.clause("CM-03")
    def test_folder(self, tmp_path):
        (tmp_path / "file").write_text("text")
        assert not list(tmp_path.iterdir()), "a folder with something in it"

    @pytest.mark.clause("CM-04")
    @pytest.mark.parametrize("end", [not_applicable, not_run_here, undeclared])
    def test_skipped(self, end):
        end("why")

    @pytest.mark.clause("CM-04")
    def test_pytest_fails(self):
        with pytest.raises(ValueError, match="never"):
            pass


@pytest.mark.usefixtures("one_clause")
def test_a_suite_runs_without_pytest() -> None:
    assert marked_tests(Suite)["test_pairs"] == ("CM-01", "CM-02")
    failures = run(Suite)
    assert [failure.test for failure in failures] == ["test_folder", "test_pairs[3-3-1]", "test_pytest_fails"]
    assert str(failures[1]).startswith("test_pairs[3-3-1]: AssertionError: 1 3 3")
    assert str(failures[1]).endswith("\nCM-01 One and one is two\nchange: Count again.\nCM-02")
    assert [failure.test for failure in run(Suite, "CM-04")] == ["test_pytest_fails"]
    with pytest.raises(LookupError, match="Suite has no test of CM-09"):
        run(Suite, "CM-09")


def test_explain_takes_any_number() -> None:
    assert explain(["XX-01"]) == "XX-01"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (not_applicable, "not applicable: why"),
        (not_run_here, "not run here: why"),
        (undeclared, "works, but is not declared: why"),
    ],
)
def test_outcomes_are_skips_with_a_reason(end, reason) -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        end("why")
    assert str(caught.value) == reason
