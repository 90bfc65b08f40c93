"""Names to objects: which record serves a model type, a device or an address, and the object that it names.

The registry is built once from the loaded plugins. Asking it is for configuration time; engines keep the objects.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import attrs

from kvist.errors import PluginError
from kvist.plugins.discovery import PluginPlan, PluginRecord, plan, suggest
from kvist.plugins.loading import LoadedPlugin, LoadedPlugins, PluginWarning, load
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo, TransceiverInfo, is_target, targets

Info = TypeVar("Info", CacheManagerInfo, AttentionBackendInfo, TransceiverInfo)

#: The contract that an object named by a record's field fulfils.
_CONTRACTS = {
    (AttentionBackendInfo, "factory"): "kvist.attention.base:AttentionBackend",
    (CacheManagerInfo, "manager_factory"): "kvist.contract:CacheManager",
}

_LIST_HINT = "`kvist plugins` shows every installed plugin with its status"


def resolve(target: str, *, what: str = "", hint: str | None = None) -> Any:
    """The object that ``"package.module:Name"`` names.

    ``what`` says in errors whose object it is, ``hint`` what to do about a failure. Raises :class:`PluginError`, with
    the original error as its cause, when the string is malformed, the import fails or the name is not there.
    """
    owner = f" for {what}" if what else ""
    if not is_target(target):
        raise PluginError(f'{target!r}{owner} is not a "package.module:Name" string', hint=hint)
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(f"cannot import {module_name!r}{owner}: {reason}", hint=hint) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            near = suggest(name, (known for known in dir(found) if not known.startswith("_")))
            raise PluginError(f"{target!r}{owner}: there is no {name!r}{near}", hint=hint) from error
    return found


@attrs.frozen
class Entry(Generic[Info]):
    """One record and the plugin that it came from."""

    info: Info
    plugin: PluginRecord

    def resolve(self, target: str) -> Any:
        """The object named by one of the record's strings, e.g. ``entry.resolve(entry.info.spec_factory)``.

        A backend or manager class must have every method of its contract; more is fine. Raises :class:`PluginError`
        naming record, plugin and distribution, with the record's install hint when the import fails.
        """
        hint = self.info.install_hint or f"reinstall {self.plugin.distribution}, or choose another plugin"
        found = resolve(target, what=str(self), hint=hint)
        for field, named in targets(self.info):
            contract = _CONTRACTS.get((type(self.info), field)) if named == target else None
            if contract is not None and inspect.isclass(found):
                self._check(found, target, resolve(contract))
        return found

    def _check(self, found: type, target: str, contract: type) -> None:
        abstract: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
        public = (name for name in vars(contract) if not name.startswith("_"))
        lacking = [name for name in public if name in abstract or not hasattr(found, name)]
        if lacking:
            raise PluginError(
                f"{target!r} for {self} lacks {_shown(lacking)}, which {contract.__name__} asks for",
                hint=f"update {self.plugin.distribution}; its authors find such faults with `kvist conform`",
            )

    def __str__(self) -> str:
        return f"{self.info.name!r} of {self.plugin.origin}"


class Registry:
    """All records of the loaded plugins. Read-only after construction, so threads may share it."""

    def __init__(self, loaded: LoadedPlugins) -> None:
        """Take the records. Raises :class:`PluginError` when two plugins use one name for the same kind of record."""
        self.plan: PluginPlan = loaded.plan
        self.cache_managers = _collect("cache manager", loaded, lambda plugin: plugin.cache_managers)
        self.attention_backends = _collect("attention backend", loaded, lambda plugin: plugin.attention_backends)
        self.transceivers = _collect("transceiver", loaded, lambda plugin: plugin.transceivers)

    def cache_manager(self, model_type: str, *, name: str | None = None) -> Entry[CacheManagerInfo]:
        """What serves a ``model_type``; ``name`` chooses one record and must serve it.

        Raises :class:`PluginError` when nothing serves it, listing what is served, or when the choice is not clear.
        """
        entries = self.cache_managers
        if name is not None:
            entry = _named("cache manager", name, entries)
            if model_type not in entry.info.model_types:
                its = _shown(entry.info.model_types)
                raise PluginError(f"cache manager {entry} does not serve model type {model_type!r}; it serves {its}")
            return entry
        serving = [entry for entry in entries.values() if model_type in entry.info.model_types]
        if not serving:
            served = sorted({each for entry in entries.values() for each in entry.info.model_types})
            raise PluginError(
                f"no installed plugin serves model type {model_type!r}{suggest(model_type, served)}",
                hint=f"served are: {', '.join(served) or 'none'}; install the plugin of its family, or write one",
            )
        return _choose(f"model type {model_type!r}", serving)

    def attention_backend(
        self,
        name: str | None = None,
        *,
        device: str,
        dtype: str,
        family: str,
        features: Iterable[str] = (),
    ) -> Entry[AttentionBackendInfo]:
        """What computes attention of ``family`` on a device: the record called ``name``, or the best one.

        ``device`` is a torch device or its name (``"cuda:0"``), ``dtype`` a torch dtype or its name (``"bfloat16"``),
        ``features`` what the model needs of the family. A named backend that does not serve the request is refused,
        never exchanged. Raises :class:`PluginError` with the reason for each backend.
        """
        asked = _Request(str(device).partition(":")[0], str(dtype).removeprefix("torch."), family, frozenset(features))
        if name is not None:
            entry = _named("attention backend", name, self.attention_backends)
            if reason := asked.refusal(entry.info):
                raise PluginError(
                    f"attention backend {entry} cannot serve {asked}: {reason}", hint=entry.info.install_hint or None
                )
            return entry
        refusals = {entry: asked.refusal(entry.info) for entry in self.attention_backends.values()}
        serving = [entry for entry, reason in refusals.items() if not reason]
        if not serving:
            reasons = "".join(f"\n  {entry}: {reason}" for entry, reason in refusals.items()) or " (none is installed)"
            raise PluginError(f"no attention backend serves {asked}:{reasons}", hint=_LIST_HINT)
        return _choose(f"attention {asked}", serving)

    def transceiver(self, scheme: str, *, name: str | None = None) -> Entry[TransceiverInfo]:
        """What serves addresses of a ``scheme`` such as ``"tcp"``. Raises :class:`PluginError` as above."""
        entries = self.transceivers
        if name is not None:
            entry = _named("transceiver", name, entries)
            if scheme not in entry.info.schemes:
                its = _shown(entry.info.schemes)
                raise PluginError(f"transceiver {entry} does not serve scheme {scheme!r}; it serves {its}")
            return entry
        serving = [entry for entry in entries.values() if scheme in entry.info.schemes]
        if not serving:
            served = sorted({each for entry in entries.values() for each in entry.info.schemes})
            raise PluginError(
                f"no installed plugin serves address scheme {scheme!r}{suggest(scheme, served)}",
                hint=f"served are: {', '.join(served) or 'none'}",
            )
        return _choose(f"address scheme {scheme!r}", serving)


@attrs.frozen
class _Request:
    """What an attention backend is asked to serve."""

    device: str
    dtype: str
    family: str
    features: frozenset[str]

    def refusal(self, info: AttentionBackendInfo) -> str:
        """Why the backend does not serve the request; empty if it does."""
        if self.family not in info.families:
            return f"serves the families {_shown(info.families)}"
        if self.device not in info.devices and ANY not in info.devices:
            return f"runs on {_shown(info.devices)}"
        if self.dtype not in info.dtypes and ANY not in info.dtypes:
            return f"computes in {_shown(info.dtypes)}"
        if missing := self.features - info.features:
            return f"lacks {_shown(missing)}"
        for module in info.requires:
            if not _importable(module):
                return f"needs the module {module!r}, which is not installed"
        return info.unavailable

    def __str__(self) -> str:
        needs = f" with {_shown(self.features)}" if self.features else ""
        return f"family {self.family!r}{needs} on {self.device} in {self.dtype}"


def _shown(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _importable(module: str) -> bool:
    # Only the top-level package is looked for: finding a submodule would import its parents.
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _collect(
    kind: str, loaded: LoadedPlugins, records: Callable[[LoadedPlugin], tuple[Info, ...]]
) -> dict[str, Entry[Info]]:
    """The records of one kind by name, in the order of names."""
    entries: dict[str, Entry[Info]] = {}
    for plugin in loaded.plugins:
        for info in records(plugin):
            entry = Entry(info, plugin.record)
            if other := entries.get(info.name):
                first, second = sorted((other, entry), key=lambda each: each.plugin.name)
                raise PluginError(
                    f"two plugins provide {kind} {info.name!r}: "
                    f"{first.plugin.name!r} of {first.plugin.origin} and {second.plugin.name!r} of "
                    f"{second.plugin.origin}",
                    hint="add one of the two plugins to KVIST_DISABLE_PLUGINS, or uninstall it",
                )
            entries[info.name] = entry
    return dict(sorted(entries.items()))


def _named(kind: str, name: str, entries: dict[str, Entry[Info]]) -> Entry[Info]:
    if name not in entries:
        raise PluginError(
            f"there is no {kind} {name!r}{suggest(name, entries)}",
            hint=f"installed are: {', '.join(entries) or 'none'}",
        )
    return entries[name]


def _choose(what: str, serving: list[Entry[Info]]) -> Entry[Info]:
    """The one with the highest priority. Equal priorities are an error; overriding another distribution is told.

    Not told is what precedes a fallback, which has a negative priority.
    """
    best, *others = sorted(serving, key=lambda entry: (-entry.info.priority, entry.info.name))
    if others and others[0].info.priority == best.info.priority:
        tied = [entry for entry in serving if entry.info.priority == best.info.priority]
        raise PluginError(
            f"{what} is served by {' and '.join(str(entry) for entry in tied)} with the same priority "
            f"{best.info.priority}",
            hint="choose one by name, or add the other's plugin to KVIST_DISABLE_PLUGINS",
        )
    rivals = [entry for entry in others if entry.info.priority >= 0]
    overridden = [entry for entry in rivals if entry.plugin.distribution != best.plugin.distribution]
    if overridden:
        warnings.warn(
            f"{what}: {best} (priority {best.info.priority}) takes precedence over "
            f"{', '.join(f'{entry} (priority {entry.info.priority})' for entry in overridden)}\n"
            "hint: choose by name to make this explicit",
            PluginWarning,
            stacklevel=3,
        )
    return best


_default_lock = threading.Lock()
_default: Registry | None = None


def default_registry(resolved: PluginPlan | None = None, *, role: str | None = None) -> Registry:
    """The registry of this process, made at the first call and kept.

    Without ``resolved`` the plugins installed here are planned; a child process passes the plan of its parent
    (``default_registry().plan``), and ``role`` to name itself in errors. Raises :class:`PluginError` when loading
    fails, and when a plan is passed that differs from what this process has already loaded.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = Registry(load(resolved or plan(), role=role))
        elif resolved is not None and _identity(resolved) != _identity(_default.plan):
            raise PluginError(
                "this process has already loaded other plugins than the given plan names",
                hint="pass the plan to the first call of default_registry()",
            )
        return _default


def _identity(given: PluginPlan) -> frozenset[tuple[str, str, str, str]]:
    return frozenset(
        (record.name, record.distribution, record.version, record.value)
        for record in given.records
        if record.status in ("ready", "loaded")
    )
