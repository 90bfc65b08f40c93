"""Runs Hugging Face causal language models on Kvist's paged KV cache.

The names below are imported on first use: the plugin's entry module must stay importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist_transformers.draft_model import DraftModel
    from kvist_transformers.drafting import Drafter, PromptLookup
    from kvist_transformers.engine import Engine
    from kvist_transformers.handle import Handle
    from kvist_transformers.request import Completion, Request, Sampling
    from kvist_transformers.specs import decoder_spec

__all__ = [
    "Completion",
    "DraftModel",
    "Drafter",
    "Engine",
    "Handle",
    "PromptLookup",
    "Request",
    "Sampling",
    "decoder_spec",
]

_HOMES = {
    "DraftModel": "draft_model",
    "Drafter": "drafting",
    "Engine": "engine",
    "Handle": "handle",
    "PromptLookup": "drafting",
    "Completion": "request",
    "Request": "request",
    "Sampling": "request",
    "decoder_spec": "specs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
