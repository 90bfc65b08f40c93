"""Knowing all plugins of this checkout costs neither torch nor triton nor transformers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY_ONES = "print(sorted({'torch', 'triton', 'transformers'} & {*sys.modules}))"


def entry_modules() -> list[str]:
    modules = []
    for path in (ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        points = tomllib.loads(path.read_text())["project"]["entry-points"]["kvist"]
        modules += [value.partition(":")[0] for value in points.values()]
    return modules


def run(script: str) -> str:
    ran = subprocess.run([sys.executable, "-I", "-W", "error", "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("module", entry_modules())
def test_an_entry_module_is_light(module):
    assert run(f"import sys, kvist, kvist.hookspecs, {module}; {HEAVY_ONES}") == "[]\n"


def test_loading_every_plugin_is_light_and_gives_no_warning():
    script = (
        "import sys; from kvist.registry import default_registry; registry = default_registry();"
        "print(*(record.name for record in registry.plan.records if record.status == 'loaded'));"
        f"{HEAVY_ONES}"
    )
    names, heavy = run(script).splitlines()
    assert {"builtin", "transformers"} <= set(names.split())
    assert heavy == "[]"
