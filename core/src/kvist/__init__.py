"""Kvist: a pluggable framework for the KV caches of large-language-model inference.

Everything here is imported on first use, so that ``import kvist`` costs next to nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.errors import CapacityError as CapacityError
    from kvist.errors import DeadlockError as DeadlockError
    from kvist.errors import KvistError as KvistError
    from kvist.errors import PluginError as PluginError
    from kvist.errors import RequestError as RequestError
    from kvist.errors import SpecError as SpecError
    from kvist.errors import StateError as StateError
    from kvist.errors import TierError as TierError
    from kvist.errors import TransferError as TransferError
    from kvist.hookspecs import hookimpl as hookimpl
    from kvist.layout import Layout as Layout
    from kvist.manager import PagedCacheManager as PagedCacheManager
    from kvist.plan import Plan as Plan
    from kvist.plan import Run as Run
    from kvist.records import AttentionBackendInfo as AttentionBackendInfo
    from kvist.records import CacheManagerInfo as CacheManagerInfo
    from kvist.records import TransceiverInfo as TransceiverInfo
    from kvist.registry import default_registry as default_registry
    from kvist.spec import CacheSpec as CacheSpec
    from kvist.spec import Heads as Heads
    from kvist.spec import History as History
    from kvist.spec import Layer as Layer
    from kvist.spec import Replicated as Replicated
    from kvist.spec import RowFormat as RowFormat
    from kvist.spec import Scope as Scope
    from kvist.spec import Sections as Sections
    from kvist.spec import Stream as Stream
    from kvist.spec import Window as Window
    from kvist.step import Step as Step

    __version__: str

#: Where each public name lives.
_HOMES = {
    "kvist.errors": (
        "CapacityError",
        "DeadlockError",
        "KvistError",
        "PluginError",
        "RequestError",
        "SpecError",
        "StateError",
        "TierError",
        "TransferError",
    ),
    "kvist.hookspecs": ("hookimpl",),
    "kvist.layout": ("Layout",),
    "kvist.manager": ("PagedCacheManager",),
    "kvist.plan": ("Plan", "Run"),
    "kvist.records": ("AttentionBackendInfo", "CacheManagerInfo", "TransceiverInfo"),
    "kvist.registry": ("default_registry",),
    "kvist.spec": (
        "CacheSpec",
        "Heads",
        "History",
        "Layer",
        "Replicated",
        "RowFormat",
        "Scope",
        "Sections",
        "Stream",
        "Window",
    ),
    "kvist.step": ("Step",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        import importlib_metadata

        value: Any = importlib_metadata.version("kvist")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'kvist' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
