"""The contract's documents, its clauses in the kit, the marks on tests and the mutants name the same clauses."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import kvist.testing
from kvist.testing.clauses import PARTS, clauses, numbers_of
from kvist.testing.suites import marked_tests

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "reference"
HEADING = re.compile(r"^### ([A-Z]{2}-\d\d) (.+)$", re.MULTILINE)


def documented(text: str) -> dict[str, str]:
    """Clause numbers of a document, with titles."""
    found = HEADING.findall(text)
    assert len(dict(found)) == len(found) == text.count("\n### "), "a heading twice, or one without a number"
    return dict(found)


def marked() -> set[str]:
    """Numbers on the tests of the suites of the kit."""
    found = set()
    for module in pkgutil.iter_modules(kvist.testing.__path__, "kvist.testing."):
        for name, suite in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if name.endswith("Tests"):
                for test, numbers in marked_tests(suite).items():
                    assert numbers, f"{name}.{test} has no clause"
                    found.update(numbers)
    return found


def mutants(part: str) -> list[str]:
    """The clauses of a part's mutants."""
    return [mutant.clause for mutant in importlib.import_module(f"kit.mutants.{part}").MUTANTS]


def disagreements(
    prefix: str, document: Mapping[str, str], table: Mapping[str, str], tests: Iterable[str], killed: Iterable[str]
) -> list[str]:
    """What the four do not agree on, in words."""
    found = [
        f"{number}: {title!r} in the document, {table.get(number)!r} in the kit"
        for number, title in document.items()
        if table.get(number) != title
    ]
    found += [f"{number}: in the kit, not in the document" for number in table if number not in document]
    found += [f"{number}: not numbered as {prefix}-nn" for number in document if not number.startswith(f"{prefix}-")]
    for what, numbers in (("test", set(tests)), ("mutant", set(killed))):
        found += [f"{number}: has no {what}" for number in document if number not in numbers]
        found += [f"{number}: has a {what}, and no clause" for number in sorted(numbers) if number not in document]
    return found


@pytest.mark.parametrize("prefix", PARTS)
def test_document_kit_tests_and_mutants_agree(prefix):
    part = PARTS[prefix]
    document = documented((DOCS / "contract" / f"{part}.md").read_text())
    table = {number: clause.title for number, clause in clauses().items() if number.startswith(prefix)}
    tests = {number for number in marked() if number.startswith(prefix)}
    assert document
    assert disagreements(prefix, document, table, tests, mutants(part)) == []


def test_every_number_belongs_to_a_part_that_the_entry_links():
    assert {number[:2] for number in [*clauses(), *marked()]} <= set(PARTS)
    linked = re.findall(r"\]\(contract/(\w+)\.md\)", (DOCS / "contract.md").read_text())
    assert linked == list(PARTS.values())


def test_clauses_say_what_to_change_in_one_paragraph():
    for clause in clauses().values():
        assert not clause.title.endswith(".") and "\n" not in clause.title, clause.number
        assert clause.change.endswith(".") and "\n" not in clause.change, clause.number


def test_disagreements_are_found():
    assert disagreements("CM", {"CM-01": "One"}, {"CM-01": "One"}, ["CM-01"], ["CM-01"]) == []
    assert disagreements(
        "CM", {"CM-01": "One", "AB-02": "Two"}, {"CM-01": "Other", "CM-03": "Three"}, ["CM-01", "CM-04"], ["AB-02"]
    ) == [
        "CM-01: 'One' in the document, 'Other' in the kit",
        "AB-02: 'Two' in the document, None in the kit",
        "CM-03: in the kit, not in the document",
        "AB-02: not numbered as CM-nn",
        "AB-02: has no test",
        "CM-04: has a test, and no clause",
        "CM-01: has no mutant",
    ]


def test_a_document_with_a_heading_that_is_no_clause_is_refused():
    assert documented("# T\n\n### CM-01 One\ntext\n\n### CM-02 Two\n") == {"CM-01": "One", "CM-02": "Two"}
    for wrong in ("\n### No number\n", "\n### CM-01 One\n\n### CM-01 Again\n"):
        with pytest.raises(AssertionError, match="a heading twice, or one without a number"):
            documented(wrong)


def test_numbers_of_a_test():
    @pytest.mark.clause("CM-01", "CM-02")
    @pytest.mark.clause("CM-02")
    def test():
        pass

    assert numbers_of(test) == ("CM-01", "CM-02")
    assert numbers_of(test_numbers_of_a_test) == ()
