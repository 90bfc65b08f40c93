"""Reads the hook version of a plugin from its source text, so that listing plugins runs none of their code."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import TypeGuard

import attrs
import importlib_metadata

from kvist.hookspecs import SPEC_VERSION
from kvist.plugins.discovery import PluginPlan, PluginRecord, SpecVersion

#: The module constant in which a plugin declares the hook version that it was written for.
SPEC_CONSTANT = "KVIST_SPEC"


def inspect_sources(plan: PluginPlan) -> PluginPlan:
    """The plan with the hook version of each ready plugin filled in, as far as its source text tells.

    A plugin whose module cannot be found, or whose version does not fit, is marked in the result. Imports nothing
    and never raises because of a plugin.
    """
    return attrs.evolve(plan, records=tuple(_inspect(record) for record in plan.records))


def version_fault(declared: object) -> str:
    """Why a plugin that declares this hook version cannot be loaded; empty if it can."""
    if not _is_version(declared):
        return f"{SPEC_CONSTANT} must be a pair of ints such as {SPEC_VERSION}, got {declared!r}"
    major, minor = declared
    if major != SPEC_VERSION[0] or minor > SPEC_VERSION[1]:
        return f"written for hook version {major}.{minor}, this kvist has {SPEC_VERSION[0]}.{SPEC_VERSION[1]}"
    return ""


def _is_version(value: object) -> TypeGuard[SpecVersion]:
    return isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value)


def _inspect(record: PluginRecord) -> PluginRecord:
    if record.status != "ready":
        return record
    module = record.value.partition(":")[0].strip()
    try:
        found = find(module)
    except Exception as error:  # a finder of somebody else's; whatever it raises concerns this plugin only
        return attrs.evolve(record, status="broken", reason=f"{type(error).__name__}: {error}")
    if found is None:
        return attrs.evolve(record, status="broken", reason=f"no module {module!r} can be found")
    if fault := misplaced(record, found.origin):
        return attrs.evolve(record, status="broken", reason=fault)
    declared = _declared(found)
    if declared is None:
        return record
    if fault := version_fault(declared):
        return attrs.evolve(record, status="broken", reason=fault)
    return attrs.evolve(record, spec=declared)


def misplaced(record: PluginRecord, origin: str | None) -> str:
    """Why the plugin's module, which lies at ``origin``, is somebody else's; empty if it is the distribution's own.

    A folder that comes earlier on the path hides what was installed. An editable install lists none of its modules,
    so nothing can be said about it.
    """
    module = record.value.partition(":")[0].strip()
    try:
        distribution = importlib_metadata.distribution(record.distribution)
    except importlib_metadata.PackageNotFoundError:
        return ""
    lines = f"\n{distribution.read_text('RECORD') or ''}"
    stem = module.replace(".", "/")
    path = next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if f"\n{path}," in lines), None)
    if path is None or origin is None:
        return ""
    own = str(distribution.locate_file(path))
    if own == origin or os.path.realpath(own) == os.path.realpath(origin):
        return ""
    return f"the module {module!r} is hidden by {origin}; the distribution's own is {own}"


def find(module: str) -> ModuleSpec | None:
    """Where a module would be imported from. Unlike ``importlib.util.find_spec``, imports no parent package.

    ``None`` when it cannot be found. May raise what somebody else's finder raises.
    """
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        candidates = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((candidate for candidate in candidates if candidate is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None
    return spec


def _declared(spec: ModuleSpec) -> SpecVersion | None:
    """The literal that the module's source assigns to the constant, ``None`` if there is no source or no literal."""
    for statement in _statements(spec):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if any(isinstance(target, ast.Name) and target.id == SPEC_CONSTANT for target in targets) and value is not None:
            try:
                literal = ast.literal_eval(value)
            except ValueError:
                return None
            return literal if _is_version(literal) else None
    return None


def _statements(spec: ModuleSpec) -> list[ast.stmt]:
    if not spec.has_location or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    try:
        with open(spec.origin, "rb") as file:
            return ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []  # loading it will say what is wrong


def summary(value: str) -> str:
    """First line of the docstring of the function ``"package.module:name"``, read from the source; may be empty."""
    module, _, name = value.partition(":")
    try:
        found = find(module.strip())
    except Exception:  # as above: a foreign finder must not break a list of commands
        return ""
    for statement in _statements(found) if found is not None else []:
        if isinstance(statement, ast.FunctionDef) and statement.name == name.strip():
            return (ast.get_docstring(statement) or "").partition("\n")[0]
    return ""
