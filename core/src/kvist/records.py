"""The records that plugins hand over: what they provide, said in plain, light values.

A record names heavy objects as ``"package.module:Name"`` strings, so that building one imports nothing. The
registry resolves a string when its record is selected. Records are frozen and keyword-only: a later minor version
may add a field with a default, and no plugin has to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvist.errors import PluginError

#: A dotted module path, a colon, a dotted name in that module.
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

#: Marks the fields that name objects, in the metadata of attrs.
_TARGETS = "targets"

#: In ``devices``, ``dtypes``: any torch device, any dtype.
ANY = "*"


def is_target(value: object) -> bool:
    """Whether ``value`` is a ``"package.module:Name"`` string."""
    return isinstance(value, str) and _TARGET.fullmatch(value) is not None


def targets(record: Any) -> Iterator[tuple[str, str]]:
    """Every object that a record names: ``("factory", "package.module:Name")``, ``("adapters['host']", ...)``."""
    for field in attrs.fields(type(record)):
        if _TARGETS in field.metadata:
            value = getattr(record, field.name)
            if isinstance(value, Mapping):
                yield from ((f"{field.name}[{key!r}]", target) for key, target in value.items())
            else:
                yield field.name, value


def _tuple(values: Any) -> Any:
    # Anything else, above all a bare string, is left as it is for the validator to refuse.
    return tuple(values) if isinstance(values, list | tuple) else values


def _frozenset(values: Any) -> Any:
    return frozenset(values) if isinstance(values, list | tuple | set | frozenset) else values


class _FrozenMapping(Mapping[str, str]):
    """A mapping that cannot change, can be hashed and, unlike the standard library's proxy, pickled."""

    def __init__(self, items: Mapping[str, str]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def _frozen_mapping(values: Any) -> Any:
    return _FrozenMapping(values) if isinstance(values, Mapping) else values


def _refuse(record: Any, field: str, wanted: str, value: object, hint: str) -> PluginError:
    name = getattr(record, "name", None)
    who = f"{type(record).__name__} {name!r}" if isinstance(name, str) and field != "name" else type(record).__name__
    return PluginError(f"{who}: {field} must be {wanted}, got {value!r}", hint=hint)


def _check_name(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise _refuse(
            record,
            attribute.name,
            "a non-empty name",
            value,
            "use letters, digits, '-', '_' and '.', starting with a letter or digit",
        )


def _check_target(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not is_target(value):
        raise _refuse(
            record,
            attribute.name,
            'a "package.module:Name" string',
            value,
            "name the object instead of importing it; it is imported when the record is selected",
        )


def _check_names(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple | frozenset) or not all(isinstance(item, str) and item for item in value):
        kind = "set" if attribute.name in ("capabilities", "features") else "tuple"
        raise _refuse(
            record,
            attribute.name,
            f"a {kind} of non-empty strings",
            value,
            "write one name as a tuple too: ('name',)",
        )


def _check_some(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    _check_names(record, attribute, value)
    if not value:
        raise _refuse(
            record,
            attribute.name,
            "a tuple with at least one name",
            value,
            "a record that serves nothing can never be selected; leave it out",
        )


def _check_adapters(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and k and is_target(v) for k, v in value.items()):
        shown = dict(value) if isinstance(value, Mapping) else value
        raise _refuse(
            record,
            attribute.name,
            'a mapping of host names to "package.module:Name" strings',
            shown,
            'for example {"transformers": "my_plugin.transformers:adapt"}',
        )


def _check_int(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refuse(record, attribute.name, "an int", value, "0 is the default; higher is preferred")


def _check_text(record: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise _refuse(record, attribute.name, "a string", value, "for example \"pip install 'kvist[torch]'\"")


def _name() -> Any:
    return attrs.field(validator=_check_name)


def _target(default: Any = attrs.NOTHING) -> Any:
    return attrs.field(default=default, validator=_check_target, metadata={_TARGETS: True})


def _some() -> Any:
    return attrs.field(converter=_tuple, validator=_check_some)


def _names(default: Iterable[str] = ()) -> Any:
    return attrs.field(default=tuple(default), converter=_tuple, validator=_check_names)


def _flags() -> Any:
    return attrs.field(factory=frozenset, converter=_frozenset, validator=_check_names)


def _priority() -> Any:
    return attrs.field(default=0, validator=_check_int)


def _hint() -> Any:
    return attrs.field(default="", validator=_check_text)


@attrs.frozen(kw_only=True)
class CacheManagerInfo:
    """One model family: how its cache is described and managed. Raises :class:`PluginError` on a bad field."""

    #: Unique over all installed plugins.
    name: str = _name()
    #: The ``model_type`` values of model configs that this family serves.
    model_types: tuple[str, ...] = _some()
    #: ``"package.module:Name"`` of a callable: model config -> ``CacheSpec``.
    spec_factory: str = _target()
    #: ``"package.module:Name"`` of the manager class; the core's one suits most families.
    manager_factory: str = _target("kvist.manager:PagedCacheManager")
    #: By host, e.g. ``{"transformers": "my_plugin.transformers:adapt"}``: what fits the family into that host.
    adapters: Mapping[str, str] = attrs.field(
        factory=dict, converter=_frozen_mapping, validator=_check_adapters, metadata={_TARGETS: True}
    )
    #: What the family's cache can do, declared and never inferred.
    capabilities: frozenset[str] = _flags()
    #: The higher one is chosen where two records serve the same model type; equal ones are an error.
    priority: int = _priority()
    #: What to do when a named object cannot be imported; shown as the error's hint.
    install_hint: str = _hint()


@attrs.frozen(kw_only=True)
class AttentionBackendInfo:
    """One implementation of attention over paged caches. Raises :class:`PluginError` on a bad field."""

    #: Unique over all installed plugins.
    name: str = _name()
    #: ``"package.module:Name"`` of the backend class.
    factory: str = _target()
    #: Device types such as ``"cpu"`` and ``"cuda"``; ``"*"`` is any torch device.
    devices: tuple[str, ...] = _some()
    #: Element types by torch's names without the prefix, e.g. ``"bfloat16"``; ``"*"`` is any.
    dtypes: tuple[str, ...] = _some()
    #: The families of inputs that it serves, e.g. ``"gqa"``.
    families: tuple[str, ...] = _some()
    #: Optional parts of the family that it implements, e.g. ``"window"``, ``"sinks"``.
    features: frozenset[str] = _flags()
    #: The higher one is chosen where several serve a request; equal ones are an error. Negative for a fallback, which
    #: any other plugin's backend precedes without a warning.
    priority: int = _priority()
    #: What to do when the backend cannot be imported; shown as the error's hint.
    install_hint: str = _hint()
    #: Modules that must be importable, e.g. ``("triton",)``. Without them the backend is not considered.
    requires: tuple[str, ...] = _names()
    #: Why it cannot run on this machine, as the plugin has found out; empty when it can. If set it is not considered.
    unavailable: str = _hint()


@attrs.frozen(kw_only=True)
class TransceiverInfo:
    """One way to move caches between processes. Raises :class:`PluginError` on a bad field."""

    #: Unique over all installed plugins.
    name: str = _name()
    #: ``"package.module:Name"`` of the transport class.
    factory: str = _target()
    #: The address schemes that it serves, e.g. ``"tcp"`` for ``tcp://host:port``.
    schemes: tuple[str, ...] = _some()
    #: What the transport can do, declared and never inferred.
    capabilities: frozenset[str] = _flags()
    #: The higher one is chosen where two records serve the same scheme; equal ones are an error.
    priority: int = _priority()
    #: What to do when the transport cannot be imported; shown as the error's hint.
    install_hint: str = _hint()
