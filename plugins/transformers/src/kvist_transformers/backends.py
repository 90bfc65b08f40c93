"""Which attention backend serves each family that a model needs."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.attention.families import Need
from kvist.records import AttentionBackendInfo
from kvist.registry import Entry, Registry


def choose_backends(
    registry: Registry, needs: Mapping[str, Need], *, device: str, dtype: str, name: str | None = None
) -> dict[str, Entry[AttentionBackendInfo]]:
    """One record per family: the one called ``name`` where it serves the family, the best one elsewhere.

    Raises PluginError with the reasons where nothing serves a family, and for a ``name`` that serves none of them.
    """
    named = registry.attention_backends.get(name) if name is not None else None
    # A name that is unknown or serves no family here is asked for anyway: the registry knows what to say.
    served = [family for family in needs if named is not None and family in named.info.families] or list(needs)[:1]
    return {
        family: registry.attention_backend(
            name if family in served else None, device=device, dtype=dtype, family=family, features=need.features
        )
        for family, need in needs.items()
    }
