"""Importing Kvist is light: names and hooks cost neither torch nor triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvist

HEAVY = ("torch", "triton", "transformers")


def imported_by(*modules: str) -> set[str]:
    """Top-level packages that a clean process holds after importing ``modules``."""
    script = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "modules",
    [
        ("kvist", "kvist.hookspecs", "kvist.records", "kvist.builtin", "kvist.registry", "kvist.cli"),
        ("kvist.spec", "kvist.layout", "kvist.step", "kvist.manager"),
        ("kvist.iterations.recorder", "kvist.views.report", "kvist.views.top", "kvist.replay.command"),
    ],
)
def test_the_light_modules_import_nothing_heavy(modules):
    assert not imported_by(*modules) & set(HEAVY)


def test_the_package_itself_imports_no_third_party():
    assert not imported_by("kvist") & {"attr", "attrs", "numpy", "pluggy", "importlib_metadata", "typer", "rich"}


def test_every_public_name_is_there_and_listed():
    for name in kvist.__all__:
        assert getattr(kvist, name) is not None
    assert set(kvist.__all__) <= set(dir(kvist))
    with pytest.raises(AttributeError, match="module 'kvist' has no attribute 'nothing'"):
        kvist.nothing  # noqa: B018 - reading it is the test
