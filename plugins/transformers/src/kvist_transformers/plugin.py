"""Entry module of the plugin: imports neither torch nor transformers."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import CacheManagerInfo
from kvist_transformers.families import FAMILIES

KVIST_SPEC = (1, 0)


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """Decoder-only Hugging Face models with grouped-query attention, full or windowed."""
    return [
        CacheManagerInfo(
            name="transformers-decoder",
            model_types=tuple(sorted(FAMILIES)),
            spec_factory="kvist_transformers.specs:decoder_spec",
            adapters={"transformers": "kvist_transformers.adapter:DecoderAdapter"},
            install_hint="pip install kvist-transformers",
        )
    ]
