"""The direction of imports, read from the source: also those inside functions and those only for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "src"

#: A module imports only from modules above its own line (or from its own package). Modules on one line are one step:
#: they may use each other.
ORDER = [
    {"errors"},
    {"native"},
    {"spec"},
    {"slabs"},
    {"budget"},
    {"layout"},
    {"step"},
    {"keys"},
    {"memory"},
    {"ledger"},
    {"wishes"},
    {"prefix"},
    {"events"},
    {"watches"},
    {"policies"},
    {"keeper"},
    {"eviction"},
    {"restore"},
    {"sequence", "batch"},
    {"stats"},
    {"publish"},
    {"claim"},
    {"plan"},
    {"states"},
    {"owed"},
    {"defrag"},
    {"capacity"},
    {"commit"},
    {"tiers"},
    {"handover"},
    {"audit"},
    {"contract"},
    {"books"},
    {"residents"},
    {"exchange"},
    {"manager"},
    {"iterations"},
    {"scheduling"},
    {"attention"},
    {"transfer"},
    {"records"},
    {"hookspecs"},
    {"plugins"},
    {"registry"},
    {"builtin"},
    {"metrics"},
    {"replay"},
    {"views"},
    {"template"},
    {"testing"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

#: What the machinery of plugins consists of, and who may know it.
MACHINERY = {"records", "hookspecs", "plugins", "registry", "builtin"}
KNOW_MACHINERY = MACHINERY | {"replay", "template", "testing", "cli", "__main__"}


def imports(path: Path, package: str) -> Iterator[str]:
    """Absolute names of everything that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            # `from kvist import plugins` imports the module kvist.plugins.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def core_files() -> list[Path]:
    return sorted((CORE / "kvist").rglob("*.py"))


def part(path: Path, source: Path = CORE) -> str:
    """The module of the list above that a file of the core belongs to."""
    return path.relative_to(source / "kvist").parts[0].removesuffix(".py")


def package_of(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).parent.parts)


def violations(path: Path, source: Path = CORE) -> list[str]:
    here = part(path, source)
    found = []
    for name in imports(path, package_of(path, source)):
        top, _, rest = name.partition(".")
        if top.startswith("kvist_"):
            found.append(f"{here} imports the plugin {top}")
        if top != "kvist" or here == "__init__":
            continue
        there = rest.partition(".")[0]
        if there not in RANK:
            found.append(f"{here} imports {name}, which is not in the order of modules")
        elif RANK[there] > RANK[here]:
            found.append(f"{here} imports {there}, which comes after it")
        elif there in MACHINERY and here not in KNOW_MACHINERY:
            found.append(f"{here} imports {there}, which only {', '.join(sorted(KNOW_MACHINERY))} may know")
    return found


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(CORE)))
def test_core_modules_import_only_from_above(path):
    if part(path) != "__init__":
        assert part(path) in RANK, f"{path.name} has no place in the order of modules"
    assert violations(path) == []


def test_the_facade_imports_lazily():
    tree = ast.parse((CORE / "kvist" / "__init__.py").read_text())
    eager = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {name.module for name in eager if isinstance(name, ast.ImportFrom)} == {"__future__", "importlib", "typing"}
    assert not [node for node in eager if isinstance(node, ast.Import)]


@pytest.mark.parametrize("plugin", sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")))
def test_plugins_import_no_other_plugin(plugin):
    """But the adapter to a host is in a module of the host's name, and may import it."""
    source = ROOT / "plugins" / plugin / "src"
    (own,) = [path.name for path in source.iterdir() if path.is_dir() and not path.name.endswith(".egg-info")]
    for path in source.rglob("*.py"):
        allowed = {own, f"kvist_{path.stem}"}
        for name in imports(path, package_of(path, source)):
            top = name.partition(".")[0]
            assert not top.startswith("kvist_") or top in allowed, f"{path} imports {top}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import kvist.manager", "spec imports manager, which comes after it"),
        ("def f():\n    from kvist.manager import Plan", "spec imports manager, which comes after it"),
        ("from kvist import manager", "spec imports manager, which comes after it"),
        ("from . import manager", "spec imports manager, which comes after it"),
        ("from .manager import Plan", "spec imports manager, which comes after it"),
        ("from kvist import CacheSpec", "spec imports kvist.CacheSpec, which is not in the order of modules"),
        ("import kvist_mamba.plugin", "spec imports the plugin kvist_mamba"),
    ],
)
def test_the_check_finds(code, message, tmp_path):
    path = tmp_path / "kvist" / "spec.py"
    path.parent.mkdir()
    path.write_text(code)
    assert violations(path, tmp_path) == [message]
