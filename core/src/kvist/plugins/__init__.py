"""Plugins: found by :func:`plan` without importing any, then imported and checked by :func:`load`.

Most callers want :func:`kvist.registry.default_registry`, which does both once for the process.
"""

from __future__ import annotations

from kvist.plugins.discovery import (
    ALLOW_VARIABLE,
    DENY_VARIABLE,
    STRICT_VARIABLE,
    PluginPlan,
    PluginRecord,
    Problem,
    plan,
)
from kvist.plugins.loading import LoadedPlugin, LoadedPlugins, PluginWarning, examine, load
from kvist.plugins.source import inspect_sources

__all__ = [
    "ALLOW_VARIABLE",
    "DENY_VARIABLE",
    "STRICT_VARIABLE",
    "LoadedPlugin",
    "LoadedPlugins",
    "PluginPlan",
    "PluginRecord",
    "PluginWarning",
    "Problem",
    "examine",
    "inspect_sources",
    "load",
    "plan",
]
