"""The tests of a suite, and running them without pytest: how the kit is itself tested, on implementations with a fault.

A suite is a class whose tests are methods named ``test_...`` with a ``clause`` mark. They take no arguments but those
that ``pytest.mark.parametrize`` gives and ``tmp_path``, an empty folder: what the suite needs to know of a plugin are
methods and attributes of the class, which the author fills in.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvist.testing.clauses import explain, numbers_of


@attrs.frozen
class Failure:
    """A test that failed. ``str()`` names its clauses, the test, what went wrong and what to change."""

    test: str
    numbers: tuple[str, ...]
    error: BaseException

    def __str__(self) -> str:
        return f"{self.test}: {type(self.error).__name__}: {self.error}\n{explain(self.numbers)}"


def marked_tests(suite: type) -> dict[str, tuple[str, ...]]:
    """The names of a suite's tests, with the numbers of their clauses."""
    found = inspect.getmembers(suite, lambda member: inspect.isfunction(member))
    return {name: numbers_of(test) for name, test in found if name.startswith("test_")}


def run(suite: type, clause: str | None = None, *, first: bool = False) -> list[Failure]:
    """Call the tests of a suite, or those of one clause; each on an object of its own. Returns those that failed, or
    only the ``first``.

    Raises LookupError when the clause has no test.
    """
    names = [name for name, numbers in marked_tests(suite).items() if clause is None or clause in numbers]
    if not names:
        raise LookupError(f"{suite.__name__} has no test of {clause}")
    failures = []
    for name in names:
        test = getattr(suite, name)
        for arguments in _arguments(suite, test):
            label = name + (f"[{'-'.join(map(str, arguments.values()))}]" if arguments else "")
            try:
                _call(test, suite(), arguments)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as error:
                failures.append(Failure(label, numbers_of(test), error))
                if first:
                    return failures
    return failures


def _call(test: Callable[..., None], suite: object, arguments: dict[str, Any]) -> None:
    if "tmp_path" not in inspect.signature(test).parameters:
        return test(suite, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        return test(suite, **arguments, tmp_path=Path(folder))


def _arguments(suite: type, test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of every call that the ``parametrize`` marks of a test, and its suite, ask for."""
    asked = _Asked(list(inspect.signature(test).parameters))
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            asked.parametrize(*mark.args[:2])
    if hasattr(suite, "pytest_generate_tests"):
        suite().pytest_generate_tests(asked)
    for chosen in product(*asked.choices):
        yield {name: value for each in chosen for name, value in each.items()}


@attrs.define
class _Asked:
    """Stands in for pytest's ``Metafunc``: a suite may choose the arguments of its tests itself."""

    fixturenames: list[str]
    choices: list[list[dict[str, Any]]] = attrs.field(factory=list)

    def parametrize(self, names: str | Iterable[str], rows: Iterable[Any]) -> None:
        """As pytest's; rows that pytest would skip are left out."""
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [row for row in rows if not any(mark.name == "skip" for mark in getattr(row, "marks", ()))]
        rows = [row.values if hasattr(row, "marks") else (row,) if len(names) == 1 else row for row in rows]
        self.choices.append([dict(zip(names, row, strict=True)) for row in rows])
