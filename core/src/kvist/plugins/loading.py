"""Phase two: import the plugins that the plan allows, check them, and take their records.

Each plugin gets a pluggy manager of its own. One plugin can then neither wrap nor reorder the hooks of another, and a
plugin that fails half way leaves nothing behind: its manager is dropped.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from typing import Any, TypeVar

import attrs
import importlib_metadata
import pluggy

from kvist import hookspecs
from kvist.errors import PluginError
from kvist.hookspecs import GROUP, SPEC_VERSION
from kvist.plugins.discovery import CORE, DENY_VARIABLE, PluginPlan, PluginRecord, about, suggest
from kvist.plugins.source import SPEC_CONSTANT, find, misplaced, version_fault
from kvist.records import AttentionBackendInfo, CacheManagerInfo, TransceiverInfo, targets

Info = TypeVar("Info", CacheManagerInfo, AttentionBackendInfo, TransceiverInfo)


_SAME_ENVIRONMENT = "give every process the same environment, or make the plan again"


class PluginWarning(UserWarning):
    """An installed plugin was not loaded, or one plugin's record takes precedence over another's."""


@attrs.frozen
class LoadedPlugin:
    """A plugin that passed every check, with the records that its hooks returned."""

    record: PluginRecord
    cache_managers: tuple[CacheManagerInfo, ...]
    attention_backends: tuple[AttentionBackendInfo, ...]
    transceivers: tuple[TransceiverInfo, ...]


@attrs.frozen
class LoadedPlugins:
    """What loading a plan gave: the plan with final statuses, and the plugins that were loaded, by name."""

    plan: PluginPlan
    plugins: tuple[LoadedPlugin, ...]


class _CheckError(Exception):
    """A check that a plugin did not pass. The text is the reason in its record."""


def load(plan: PluginPlan, *, role: str | None = None) -> LoadedPlugins:
    """Import what ``plan`` allows and collect its records. Doing it twice is harmless.

    ``role`` names this process in errors, e.g. ``"worker rank 3"``; by default it is the process's own name. Raises
    :class:`PluginError` for problems of the plan, for a plugin that is installed here in another version than planned,
    and for a selected plugin that is broken. An installed plugin that was not selected and is broken, conflicting or
    incompatible is one :class:`PluginWarning`, or an error too when the plan is strict.

    The plan in the result is resolved. Loading a resolved plan, as a child process does with its parent's, repeats no
    warning, and everything that the parent had loaded must load here too.
    """
    plan.raise_for_problems()
    process = _process(role)
    _verify(plan, process)
    records: list[PluginRecord] = []
    plugins: list[LoadedPlugin] = []
    for record in plan.records:
        if record.status in ("ready", "loaded"):
            outcome, error = _attempt(record)
            if isinstance(outcome, LoadedPlugin):
                plugins.append(outcome)
                records.append(outcome.record)
                continue
            if plan.resolved:
                raise PluginError(f"{process}: {_sentence(outcome)}", hint=_SAME_ENVIRONMENT) from error
            if record.explicit or plan.strict or record.distribution == CORE:
                raise PluginError(_sentence(outcome), hint=_hint(outcome, plan)) from error
            record = outcome
        if record.status != "disabled" and not plan.resolved:
            warnings.warn(f"{_sentence(record)}\nhint: {_hint(record, plan)}", PluginWarning, stacklevel=2)
        records.append(record)
    return LoadedPlugins(attrs.evolve(plan, records=tuple(records), resolved=True), tuple(plugins))


def examine(plan: PluginPlan) -> LoadedPlugins:
    """Import what ``plan`` allows and tell what became of it; for tools that report. Never raises because of a plugin.

    The plan in the result has final statuses and keeps its problems.
    """
    outcomes = [_attempt(record)[0] if record.status in ("ready", "loaded") else record for record in plan.records]
    plugins = tuple(outcome for outcome in outcomes if isinstance(outcome, LoadedPlugin))
    records = tuple(outcome.record if isinstance(outcome, LoadedPlugin) else outcome for outcome in outcomes)
    return LoadedPlugins(attrs.evolve(plan, records=records), plugins)


def _process(role: str | None) -> str:
    if role is None:
        # Imported here because it is slow, and whoever only lists plugins does not need it.
        from multiprocessing import current_process

        role = current_process().name
    return f"{role} (pid {os.getpid()})"


def _verify(plan: PluginPlan, process: str) -> None:
    """Refuse a plan that was made with other versions than this process would import."""
    if plan.spec_version != SPEC_VERSION:
        raise PluginError(
            f"{process}: the plan was made for hook version {plan.spec_version}, here is {SPEC_VERSION}",
            hint=_SAME_ENVIRONMENT,
        )
    wanted = {CORE: (f"kvist {plan.core_version}", plan.core_version)}
    for record in plan.records:
        if record.status in ("ready", "loaded"):
            wanted[record.distribution] = (f"{record.origin} for plugin {record.name!r}", record.version)
    for distribution, (what, version) in wanted.items():
        try:
            have = about(importlib_metadata.distribution(distribution))[1]
        except importlib_metadata.PackageNotFoundError:
            message = f"{process}: the plan has {what}, which is not installed here"
            raise PluginError(message, hint=_SAME_ENVIRONMENT) from None
        if have != version:
            message = f"{process}: the plan has {what}, here is version {have}"
            raise PluginError(message, hint=_SAME_ENVIRONMENT)


def _attempt(record: PluginRecord) -> tuple[LoadedPlugin | PluginRecord, Exception | None]:
    """Load one plugin; on failure its record as broken, with the error."""
    try:
        return _load_one(record), None
    except Exception as error:
        reason = str(error) if isinstance(error, _CheckError) else f"{type(error).__name__}: {error}"
        return attrs.evolve(record, status="broken", reason=reason), error


def _sentence(record: PluginRecord) -> str:
    point = f"entry point {record.name!r} = {record.value!r}"
    state = "in conflict" if record.status == "conflict" else record.status
    return f"plugin {record.name!r} of {record.origin} is {state} ({point}): {record.reason}"


def _hint(record: PluginRecord, plan: PluginPlan) -> str:
    deny = f"add {record.name!r} to {DENY_VARIABLE}"
    if record.status == "incompatible":
        return f"install versions of {record.distribution} and kvist that fit, or {deny}"
    if record.status == "conflict":
        # Denying a name of the core would switch off the core's own plugin.
        if any(other.name == record.name and other.distribution == CORE for other in plan.records):
            return f"uninstall {record.distribution}, or ask its authors for another name of the entry point"
        return f"uninstall all but one of them, or {deny}"
    return f"mend or uninstall {record.distribution}, or {deny}"


def _load_one(record: PluginRecord) -> LoadedPlugin:
    point = importlib_metadata.EntryPoint(record.name, record.value, GROUP)
    plugin = point.load()
    if fault := misplaced(record, getattr(sys.modules[point.module], "__file__", None)):
        raise _CheckError(fault)
    if inspect.isclass(plugin):
        raise _CheckError("the entry point names a class; name a module or an instance")
    spec = _declared_spec(plugin)
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    known = tuple(sorted(name for name in vars(manager.hook) if name.startswith(f"{GROUP}_")))
    manager.register(plugin, name=record.name)
    hooks = _check_hooks(manager, plugin, known)
    return LoadedPlugin(
        attrs.evolve(record, status="loaded", reason="", spec=spec, hooks=hooks),
        _records(manager.hook.kvist_cache_managers, CacheManagerInfo),
        _records(manager.hook.kvist_attention_backends, AttentionBackendInfo),
        _records(manager.hook.kvist_transceivers, TransceiverInfo),
    )


def _declared_spec(plugin: object) -> tuple[int, int]:
    """The hook version of a plugin object; an instance may leave it to the module of its class."""
    declared = getattr(plugin, SPEC_CONSTANT, None)
    if declared is None and not inspect.ismodule(plugin):
        declared = getattr(sys.modules.get(type(plugin).__module__), SPEC_CONSTANT, None)
    if declared is None:
        raise _CheckError(f"declares no {SPEC_CONSTANT}; add `{SPEC_CONSTANT} = {SPEC_VERSION}` to the module")
    if fault := version_fault(declared):
        raise _CheckError(fault)
    major, minor = declared
    return major, minor


def _check_hooks(manager: pluggy.PluginManager, plugin: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the hooks that the plugin implements; raises when one is unknown or there is none."""
    implemented: list[str] = []
    for caller in manager.get_hookcallers(plugin) or ():
        if not caller.has_spec():
            raise _CheckError(f"implements the unknown hook {caller.name!r}{suggest(caller.name, known)}")
        for implementation in caller.get_hookimpls():
            _check_signature(caller.name, implementation)
        implemented.append(caller.name)
    if not implemented:
        raise _CheckError("implements no kvist hook; mark the functions with kvist.hookspecs.hookimpl")
    return tuple(sorted(implemented))


def _check_signature(name: str, implementation: pluggy.HookImpl) -> None:
    if implementation.wrapper or implementation.hookwrapper:
        raise _CheckError(f"{name} is a hook wrapper; hooks of kvist cannot be wrapped")
    # Old and new pluggy disagree about defaults and keyword-only parameters, so neither is allowed.
    for parameter in inspect.signature(implementation.function).parameters.values():
        plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if not plain or parameter.default is not parameter.empty:
            raise _CheckError(
                f"{name} takes {str(parameter)!r}; only plain positional parameters without defaults work"
            )


def _records(hook: pluggy.HookCaller, kind: type[Info]) -> tuple[Info, ...]:
    """Call one hook of one plugin and check what it returned."""
    records: list[Info] = []
    # pluggy leaves out what is None, so a hook without a result forgot to return one.
    results = hook() or [None] * len(hook.get_hookimpls())
    for result in results:
        if not isinstance(result, list | tuple):
            raise _CheckError(f"{_hook_name(hook)} must return a list of {kind.__name__}, got {type(result).__name__}")
        for item in result:
            if not isinstance(item, kind):
                raise _CheckError(f"{_hook_name(hook)} must return {kind.__name__} records, got {type(item).__name__}")
            records.append(item)
    names = [record.name for record in records]
    for name in names:
        if names.count(name) > 1:
            raise _CheckError(f"{_hook_name(hook)} returns two records named {name!r}")
    for record in records:
        _check_targets(record)
    return tuple(records)


def _check_targets(record: Any) -> None:
    """Refuse names of modules that do not exist; nothing is imported for it.

    Where a whole package is missing and the record says how to get it, that is no fault before somebody selects it.
    """
    for field, target in targets(record):
        module = target.partition(":")[0]
        package = module.partition(".")[0]
        if module in sys.modules or find(module) is not None:
            continue
        if record.install_hint and find(package) is None:
            continue
        raise _CheckError(
            f"{type(record).__name__} {record.name!r}: {field} is {target!r}, but no module {module!r} can be found"
        )


def _hook_name(hook: Any) -> str:
    return str(hook.name)
