"""What the files at the root say about the distributions agrees with the folders."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEMBERS = ["core", *sorted(f"plugins/{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml"))]

#: The smallest plugin.
TEMPLATE = "plugins/_template"

#: What a distribution ships beside its package.
FILES = ("README.md", "CHANGELOG.md", "LICENSE")


def project(member: str) -> dict:
    return tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]


def test_requirements_list_every_distribution_once():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    editable = [re.sub(r"\[.*\]$", "", line.removeprefix("-e ./")) for line in lines if line.startswith("-e")]
    assert editable == MEMBERS


def test_the_root_is_no_package_and_names_the_members():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "project" not in root
    assert root["tool"]["uv"]["workspace"]["members"] == ["core", "plugins/*"]


def test_tools_are_configured_at_the_root_only():
    for member in MEMBERS:
        tools = tomllib.loads((ROOT / member / "pyproject.toml").read_text()).get("tool", {})
        assert set(tools) <= {"hatch"}, member


def test_distributions_are_named_alike_and_complete():
    for member in MEMBERS:
        found = project(member)
        name = "kvist" if member == "core" else "kvist-" + member.removeprefix("plugins/").strip("_").replace("_", "-")
        assert found["name"] == name
        assert found["requires-python"] == project("core")["requires-python"]
        if member == TEMPLATE:
            continue  # it has what a new plugin has; core/tests/plugins compares it with the core's copy
        package = ROOT / member / "src" / name.replace("-", "_")
        for path in (package / "__init__.py", package / "py.typed", *(ROOT / member / f for f in FILES)):
            assert path.is_file(), path


#: What a distribution brings along because most of its users want it. It works without, and imports nothing of it.
BROUGHT = {"plugins/transformers": {"kvist-attention-cpu": "; sys_platform == 'linux'"}}


def test_plugins_depend_on_the_core_of_this_checkout_and_on_no_other_plugin():
    major, minor = project("core")["version"].split(".")[:2]
    versions = f">={major}.{minor},<{major}.{int(minor) + 1}"
    for member in MEMBERS[1:]:
        brought = [name + versions + marker for name, marker in BROUGHT.get(member, {}).items()]
        ours = [line for line in project(member)["dependencies"] if line.startswith("kvist")]
        assert ours == [f"kvist{versions}", *brought], member


def test_suites_are_named_like_their_plugin_and_are_there():
    """`kvist conform` would say only that there are none."""
    for member in MEMBERS:
        points = project(member)["entry-points"]
        for name, module in points.get("kvist.conformance", {}).items():
            assert name in points["kvist"], member
            assert (ROOT / member / "src" / module.replace(".", "/")).with_suffix(".py").is_file(), module


def test_development_pins_torch_and_transformers_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert {"torch", "transformers"} <= {pin.partition("==")[0] for pin in pins}


def imported(member: str) -> set[str]:
    """Top-level packages that a distribution's own files import, wherever in them."""
    found = set()
    for path in (ROOT / member / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("member", MEMBERS)
def test_what_a_distribution_imports_it_declares(member):
    """Nobody may live on what somebody else happens to bring. Here every package is named like its distribution."""
    optional = [each for texts in project(member).get("optional-dependencies", {}).values() for each in texts]
    declared = {
        re.split(r"[^\w-]", text)[0].replace("-", "_") for text in [*project(member)["dependencies"], *optional]
    }
    assert imported(member) - declared <= {path.name for path in (ROOT / member / "src").iterdir()}
