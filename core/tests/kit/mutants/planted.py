"""Faults of benchmarks/mutants.toml in the running core: only the function around the text is compiled again."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[4]


@cache
def _listed() -> dict[str, tuple[str, str, str]]:
    found = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text(encoding="utf-8"))
    return {
        f"{Path(file).stem}: {row['name']}": (file, row["old"], row["new"])
        for file, rows in found.items()
        for row in rows
    }


def names() -> list[str]:
    """Of all faults of that list."""
    return list(_listed())


def listed(name: str) -> contextlib.AbstractContextManager[None]:
    """The fault ``"file: name"`` of that list."""
    return planted(*_listed()[name])


@contextlib.contextmanager
def planted(file: str, old: str, new: str) -> Iterator[None]:
    """While it lasts, the core's file has another text. Raises LookupError when the text is not once in a function."""
    module = importlib.import_module("kvist." + file.removesuffix(".py").replace("/", "."))
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise LookupError(f"the text {old!r} occurs {source.count(old)} times in {file}, not once")
    line = source[: source.index(old)].count("\n") + 1 + (len(old) - len(old.lstrip("\n")))
    owner, node = _function_at(ast.parse(source), line)
    # In the changed source the same function is at the same place, however many lines it has.
    changed = _named(ast.parse(source.replace(old, new)), owner, node.name)
    function = _compiled(module, changed, str(module.__file__))
    places: list[tuple[Any, Any]]
    if owner is not None:
        holder = getattr(module, owner)
        places = [(holder, vars(holder)[node.name])]
    else:
        original = getattr(module, node.name)
        modules = [each for each in sys.modules.values() if getattr(each, "__name__", "").startswith("kvist.")]
        places = [(each, original) for each in modules if vars(each).get(node.name) is original]
    try:
        for place, _ in places:
            setattr(place, node.name, function)
        yield
    finally:
        for place, original in places:
            setattr(place, node.name, original)


def _function_at(tree: ast.Module, line: int) -> tuple[str | None, ast.FunctionDef]:
    """The class, if any, and the function or method that has a line."""
    for outer in tree.body:
        for owner, node in (
            [(outer.name, n) for n in outer.body] if isinstance(outer, ast.ClassDef) else [(None, outer)]
        ):
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
                return owner, node
    raise LookupError(f"line {line} is in no function")


def _named(tree: ast.Module, owner: str | None, name: str) -> ast.FunctionDef:
    bodies = (
        [tree.body] if owner is None else [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
    )
    (found,) = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def _compiled(module: ModuleType, node: ast.FunctionDef, path: str) -> Any:
    """The function, with the globals of its module; a method as the class has it, decorated."""
    made: dict[str, Any] = {}
    tree = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), node], [])
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), vars(module), made)
    return made[node.name]
