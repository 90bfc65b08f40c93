"""The numbered clauses of the contract: what the kit says about one when a test of it fails.

Titles and hints are in ``contract/*.toml`` beside this module, one file for each part of the contract; the clauses
themselves are in ``docs/reference/contract``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

#: The parts of the contract: what clause numbers begin with, and the name of the part's files.
PARTS: Mapping[str, str] = {"PL": "packaging", "CM": "managers", "AB": "backends"}


@attrs.frozen
class Clause:
    """One clause. number: e.g. ``"CM-03"``. change: what the author of a plugin that breaks it should look at."""

    number: str
    title: str
    change: str

    @property
    def part(self) -> str:
        """One of the keys of :data:`PARTS`."""
        return self.number[:2]

    def __str__(self) -> str:
        return f"{self.number} {self.title}"


@cache
def clauses() -> Mapping[str, Clause]:
    """All clauses by number, in the order of the document."""
    found: dict[str, Clause] = {}
    for part in PARTS.values():
        path = files("kvist.testing") / "contract" / f"{part}.toml"
        if path.is_file():
            for number, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
                found[number] = Clause(number, row["title"], row["change"])
    return found


def explain(numbers: Iterable[str]) -> str:
    """What a failing test says about its clauses, ready to print. A number that no clause has is named alone."""
    lines = []
    for number in numbers:
        clause = clauses().get(number)
        lines += [number] if clause is None else [str(clause), f"change: {clause.change}"]
    return "\n".join(lines)


def numbers_of(test: Callable[..., Any]) -> tuple[str, ...]:
    """The numbers in the ``clause`` marks of a test function, without repetition."""
    marks = getattr(test, "pytestmark", [])
    return tuple(dict.fromkeys(number for mark in reversed(marks) if mark.name == "clause" for number in mark.args))
