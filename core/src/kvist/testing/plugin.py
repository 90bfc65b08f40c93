"""What pytest has to know of the kit. It is imported in every run of an environment, so it is light.

It registers the mark ``clause``, so that ``--strict-markers`` accepts it, and makes a failing test of the kit name its
clauses and say what to change. Where plugins are not loaded by themselves: ``pytest -p kvist.testing.plugin``.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

#: Heading of the section that a failing test's report gets.
SECTION = "contract of Kvist"

# Asserts of the kit show their values like those of a test, whichever way the core is installed. What whoever started
# pytest has imported before is too late.
_MODULES = (f"kvist.testing.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*") if path.stem != "plugin")
pytest.register_assert_rewrite(*(name for name in _MODULES if name not in sys.modules))


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", "clause(*numbers): the clauses of Kvist's contract that a test is about")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the numbers with the item, so that every report has them, also in JUnit files and other processes."""
    numbers = (number for mark in item.iter_markers("clause") for number in mark.args)
    item.user_properties += [("clause", number) for number in dict.fromkeys(numbers)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Name the clauses of a test that failed."""
    report = yield
    numbers = [str(value) for name, value in report.user_properties if name == "clause"]
    if report.failed and numbers:
        from kvist.testing.clauses import explain  # Nobody else shall pay for it.

        report.sections.append((SECTION, explain(numbers)))
    return report
