"""How a test of the kit ends that neither passed nor failed: a skip whose reason begins with one of these words."""

from __future__ import annotations

from typing import NoReturn

import pytest

#: The plugin does not claim what the test is about.
NOT_APPLICABLE = "not applicable"
#: The plugin claims it, and this machine cannot show it.
NOT_RUN_HERE = "not run here"
#: The plugin does not claim it, and it works: the author may want to declare it.
UNDECLARED = "works, but is not declared"


def not_applicable(why: str) -> NoReturn:
    """End a test: the plugin does not claim this."""
    pytest.skip(f"{NOT_APPLICABLE}: {why}")


def not_run_here(why: str) -> NoReturn:
    """End a test: the plugin claims this, but this machine lacks what it takes."""
    pytest.skip(f"{NOT_RUN_HERE}: {why}")


def undeclared(what: str) -> NoReturn:
    """End a test: this works although the plugin does not declare it."""
    pytest.skip(f"{UNDECLARED}: {what}")
