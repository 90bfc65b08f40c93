"""Plugins: found by :func:`plan` without importing any, then imported and checked by :func:`load`.

Most callers want :func:`kvist.registry.default_registry`, which does both once for the process. Names are imported on
first use: listing what is installed needs nothing of loading it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.plugins.discovery import ALLOW_VARIABLE as ALLOW_VARIABLE
    from kvist.plugins.discovery import DENY_VARIABLE as DENY_VARIABLE
    from kvist.plugins.discovery import STRICT_VARIABLE as STRICT_VARIABLE
    from kvist.plugins.discovery import PluginPlan as PluginPlan
    from kvist.plugins.discovery import PluginRecord as PluginRecord
    from kvist.plugins.discovery import Problem as Problem
    from kvist.plugins.discovery import plan as plan
    from kvist.plugins.loading import LoadedPlugin as LoadedPlugin
    from kvist.plugins.loading import LoadedPlugins as LoadedPlugins
    from kvist.plugins.loading import PluginWarning as PluginWarning
    from kvist.plugins.loading import examine as examine
    from kvist.plugins.loading import load as load
    from kvist.plugins.source import inspect_sources as inspect_sources

_HOMES = {
    "discovery": (
        "ALLOW_VARIABLE",
        "DENY_VARIABLE",
        "STRICT_VARIABLE",
        "PluginPlan",
        "PluginRecord",
        "Problem",
        "plan",
    ),
    "loading": ("LoadedPlugin", "LoadedPlugins", "PluginWarning", "examine", "load"),
    "source": ("inspect_sources",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvist.plugins' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"kvist.plugins.{_HOME[name]}"), name)
    return value
