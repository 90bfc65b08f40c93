"""DeepSeek-V4's attention on Kvist's paged KV cache: sliding windows, compressed rows and the index that selects them.

The names below are imported on first use: the plugin's entry module must stay importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist_deepseek_v4.inputs import DeepseekV4Inputs
    from kvist_deepseek_v4.spec import cache_spec, mtp_spec

__all__ = ["DeepseekV4Inputs", "cache_spec", "mtp_spec"]

_HOMES = {"DeepseekV4Inputs": "inputs", "cache_spec": "spec", "mtp_spec": "spec"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
