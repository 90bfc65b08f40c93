"""An implementation with one fault, for the kit to find."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import attrs

from kvist.testing.suites import Failure, run


@attrs.frozen
class Mutant:
    """name: what is wrong with it, in a few words. clause: the number of the clause whose test finds it.

    make: returns what the part's ``suite`` makes a suite of, for as long as its context lasts; where the part has no
        such function, the suite itself.
    """

    name: str
    clause: str
    make: Callable[[], Any]


def find(part: str, mutant: Mutant) -> list[Failure]:
    """The first failure of the tests of a mutant's clause, or none. part: e.g. ``"managers"``."""
    suite_of = getattr(importlib.import_module(f"kit.mutants.{part}"), "suite", contextlib.nullcontext)
    with suite_of(mutant.make()) as suite:
        return run(suite, mutant.clause, first=True)
