"""Phase one: what is installed, and what of it may be loaded. Reads metadata of distributions and imports nothing."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Any, Literal

import attrs
import importlib_metadata
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from kvist.errors import PluginError
from kvist.hookspecs import GROUP, SPEC_VERSION

ALLOW_VARIABLE = "KVIST_PLUGINS"
DENY_VARIABLE = "KVIST_DISABLE_PLUGINS"
STRICT_VARIABLE = "KVIST_STRICT_PLUGINS"

#: The distribution of the core itself.
CORE = "kvist"

#: ``ready``: may be loaded, not imported yet. ``loaded``: imported, checked, its records taken. The others were not
#: loaded, and the record's ``reason`` says why.
Status = Literal["ready", "loaded", "disabled", "conflict", "incompatible", "broken"]

SpecVersion = tuple[int, int]

#: The name in a requirement and, unless it has a condition or an address, its versions after perhaps some extras.
_REQUIREMENT = re.compile(r"\s*([\w.-]*)(?:\s*(?:\[[^]]*\])?([^;@()\[]*)$)?")
#: Asked for only with an extra of the distribution, which is not what its plugin needs.
_OF_AN_EXTRA = re.compile(r""";\s*extra\s*==\s*(["'])[^"']*\1\s*$""")

_HINT = "`kvist plugins` shows every installed plugin with its status"


@attrs.frozen
class PluginRecord:
    """One entry point of the group ``kvist``: where it comes from, what became of it and why. Picklable."""

    #: The entry point's name, by which plugins are allowed and denied.
    name: str
    distribution: str
    version: str
    #: What the entry point names: a module, or ``module:object``.
    value: str
    status: Status = "ready"
    reason: str = ""
    #: Named in ``KVIST_PLUGINS``, so that its failure is an error and not a warning.
    explicit: bool = False
    #: The hook version that the plugin declares; ``None`` while unknown.
    spec: SpecVersion | None = None
    #: The hooks that it implements; empty while it is not loaded.
    hooks: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Distribution and version, e.g. ``kvist-acme 0.1.0``."""
        return f"{self.distribution} {self.version}"


@attrs.frozen
class Problem:
    """Something in the plan that must be mended before plugins can be loaded. Picklable."""

    message: str
    hint: str


@attrs.frozen
class PluginPlan:
    """Which plugins a process loads. Immutable and picklable: child processes load exactly their parent's plan."""

    core_version: str
    spec_version: SpecVersion
    #: Any plugin that is not usable is an error, selected or not.
    strict: bool
    #: Sorted by name and distribution; every discovered entry point is there, whatever its status.
    records: tuple[PluginRecord, ...]
    problems: tuple[Problem, ...] = ()
    #: The outcome of a loading. Whoever loads it again, a child process above all, follows it exactly or fails.
    resolved: bool = False

    def raise_for_problems(self) -> None:
        """Raise :class:`PluginError` with all problems of the plan; return when there are none."""
        if self.problems:
            message = "\n".join(problem.message for problem in self.problems)
            raise PluginError(message, hint="; ".join(dict.fromkeys(problem.hint for problem in self.problems)))


def suggest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name nearest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def plan(environ: Mapping[str, str] | None = None) -> PluginPlan:
    """Find every installed plugin and decide which of them may be loaded, without importing any.

    ``environ`` is where the three variables are read; the process's own environment by default. Never raises because
    of what is installed or configured: faults are ``problems`` of the plan, which loading it raises.
    """
    variables = os.environ if environ is None else environ
    problems: list[Problem] = []
    core_version = _core_version(problems)
    found = _discover(core_version)
    names = [record.name for record in found]
    allowed = _listed(variables, ALLOW_VARIABLE, names, problems)
    denied = _listed(variables, DENY_VARIABLE, names, problems)
    strict = _flag(variables, STRICT_VARIABLE, problems)
    records: list[PluginRecord] = []
    for name, group in groupby(found, key=lambda record: record.name):
        explicit = allowed is not None and name in allowed
        for record in _without_conflicts([attrs.evolve(record, explicit=explicit) for record in group]):
            records.append(_decide(record, allowed, denied))
    for record in records:
        if record.status not in ("ready", "disabled") and (record.explicit or strict):
            problems.append(Problem(f"plugin {record.name!r} ({record.origin}) cannot be used: {record.reason}", _HINT))
    return PluginPlan(core_version, SPEC_VERSION, strict, tuple(records), tuple(problems))


def _core_version(problems: list[Problem]) -> str:
    try:
        return about(importlib_metadata.distribution(CORE))[1]
    except importlib_metadata.PackageNotFoundError:
        problems.append(
            Problem(
                "the distribution 'kvist' is not installed, so its built-in plugins cannot be found",
                "install it, e.g. `pip install -e ./core[testing]` in a checkout",
            )
        )
        return "unknown"


def entry_points(group: str) -> tuple[list[importlib_metadata.EntryPoint], list[PluginRecord]]:
    """The installed entry points of a group, and a broken record for each distribution whose list is unreadable.

    A distribution that is found twice on the path counts once, at its first place.
    """
    try:
        return list(importlib_metadata.entry_points(group=group)), []
    except Exception:  # one malformed file, whoever's it is, spoils the fast way for all
        return _one_by_one(group)


def _one_by_one(group: str) -> tuple[list[importlib_metadata.EntryPoint], list[PluginRecord]]:
    points: list[importlib_metadata.EntryPoint] = []
    faults: dict[str, PluginRecord] = {}
    seen = set()
    for distribution in importlib_metadata.distributions():
        name, version, _ = about(distribution)
        if name in seen:
            continue
        seen.add(name)
        try:
            points += [point for point in distribution.entry_points if point.group == group]
        except Exception as error:
            reason = f"its entry_points.txt cannot be read: {type(error).__name__}: {error}"
            faults[name] = PluginRecord(name, name, version, "entry_points.txt", status="broken", reason=reason)
    return points, list(faults.values())


def about(distribution: Any) -> tuple[str, str, list[str]]:
    """Name, version and requirements; ``"unknown"`` twice when there is no metadata, or none with name and version.

    Reads the lines itself: the library parses a whole e-mail with the README as its body, at each access.
    """
    found: dict[str, list[str]] = {}
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except (OSError, ValueError):
        text = ""
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.lower(), []).append(value.strip())
    name, version = found.get("name", [""])[0], found.get("version", [""])[0]
    if not name or not version:
        return "unknown", "unknown", []
    return name, version, found.get("requires-dist", [])


def _discover(core_version: str) -> list[PluginRecord]:
    """All entry points of Kvist's group as records, sorted."""
    points, faults = entry_points(GROUP)
    found = set(faults)
    for point in points:
        if point.dist is None:
            continue
        name, version, requirements = about(point.dist)
        status: Status = "ready"
        reason = ""
        if name == "unknown":
            status, reason = "broken", "the metadata of its distribution cannot be read"
        elif canonical(name) != CORE and (reason := _unusable(requirements, core_version)):
            status = "incompatible"
        found.add(PluginRecord(point.name, name, version, point.value, status=status, reason=reason))
    return sorted(found, key=lambda record: (record.name, record.distribution, record.value))


def _unusable(requirements: Iterable[str], core_version: str) -> str:
    """Why a distribution with these ``Requires-Dist`` lines does not fit the installed core; empty if it does."""
    return next(filter(None, (_misfit(text, core_version) for text in requirements)), "")


@cache
def _misfit(text: str, core_version: str) -> str:
    """Why one requirement is not met by the core; empty if it is met, or about something else."""
    name, versions = _REQUIREMENT.match(text).groups()  # type: ignore[union-attr]  # it matches any text
    if canonical(name) != CORE or _OF_AN_EXTRA.search(text):
        return ""
    if versions is not None:
        try:
            return _outside(SpecifierSet(versions), core_version)
        except InvalidSpecifier:
            pass  # the parser of requirements says it below
    # Imported here because it takes as long as reading all metadata, and other conditions are rare.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return f"its metadata has an unreadable requirement {text!r}"
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return ""
    return _outside(requirement.specifier, core_version)


def _outside(versions: SpecifierSet, core_version: str) -> str:
    if versions.contains(core_version, prereleases=True):
        return ""
    return f"needs kvist{versions}, have kvist {core_version}"


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _listed(
    variables: Mapping[str, str], variable: str, known: list[str], problems: list[Problem]
) -> frozenset[str] | None:
    """The names in a comma-separated variable, ``None`` when it is not set. Unknown names become problems."""
    if variable not in variables:
        return None
    names = frozenset(name.strip() for name in variables[variable].split(",")) - {""}
    for name in sorted(names - set(known) - {"*"}):
        problems.append(
            Problem(
                f"{variable} names {name!r}, which is not installed{suggest(name, known)}",
                f"installed plugins: {', '.join(dict.fromkeys(known)) or 'none'}",
            )
        )
    return names


def _flag(variables: Mapping[str, str], variable: str, problems: list[Problem]) -> bool:
    value = variables.get(variable, "").strip()
    if value not in ("", "0", "1"):
        problems.append(Problem(f"{variable} must be 0 or 1, got {value!r}", f"unset {variable} or set it to 1"))
    return value == "1"


def _without_conflicts(same_name: list[PluginRecord]) -> list[PluginRecord]:
    """Mark records of one name that come from more than one place. The core's own names cannot be taken over."""
    if len(same_name) == 1:
        return same_name
    owner = next((record for record in same_name if record.distribution == CORE), None)
    if owner is not None:
        reason = f"the name {owner.name!r} belongs to {owner.origin}"
        return [r if r is owner else attrs.evolve(r, status="conflict", reason=reason) for r in same_name]
    places = " and ".join(record.origin for record in same_name)
    reason = f"entry point {same_name[0].name!r} is offered by {places}; none of them is loaded"
    return [attrs.evolve(record, status="conflict", reason=reason) for record in same_name]


def _decide(record: PluginRecord, allowed: frozenset[str] | None, denied: frozenset[str] | None) -> PluginRecord:
    """Apply the two lists. A plugin that is switched off stays off whatever else is wrong with it."""
    if denied and (record.name in denied or "*" in denied):
        return attrs.evolve(record, status="disabled", reason=f"denied by {DENY_VARIABLE}", explicit=False)
    # The allow-list chooses among the plugins of others; what the core itself is made of needs the deny-list.
    if allowed is not None and record.distribution != CORE and not ({record.name, "*"} & allowed):
        return attrs.evolve(record, status="disabled", reason=f"not listed in {ALLOW_VARIABLE}")
    return record
