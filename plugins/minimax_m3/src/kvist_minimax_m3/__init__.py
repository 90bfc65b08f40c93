"""MiniMax-M3's block-sparse attention on Kvist's paged KV cache.

The names below are imported on first use: the plugin's entry module must stay importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist_minimax_m3.inputs import SparseInputs
    from kvist_minimax_m3.selection import Selection
    from kvist_minimax_m3.spec import cache_spec

__all__ = ["Selection", "SparseInputs", "cache_spec"]

_HOMES = {"Selection": "selection", "SparseInputs": "inputs", "cache_spec": "spec"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
