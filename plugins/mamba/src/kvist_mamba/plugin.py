"""Entry module of the plugin: imports neither torch nor triton nor transformers."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo
from kvist_mamba.families import FAMILIES
from kvist_mamba.inputs import FAMILY, KINDS

KVIST_SPEC = (1, 0)

_INSTALL_HINT = "pip install 'kvist-mamba[torch]'"


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """Models with recurrent layers, alone or beside attention."""
    return [
        CacheManagerInfo(
            name="mamba",
            model_types=tuple(sorted(FAMILIES)),
            spec_factory="kvist_mamba.spec:cache_spec",
            adapters={"transformers": "kvist_mamba.transformers:HybridAdapter"},
            install_hint="pip install 'kvist-mamba[transformers]'",
        )
    ]


@hookimpl
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """The reference, which runs anywhere, and the kernels for a GPU: both of every mixer."""
    return [
        AttentionBackendInfo(
            name="mamba-reference",
            factory="kvist_mamba.backend:ReferenceBackend",
            devices=(ANY,),
            dtypes=(ANY,),
            families=(FAMILY,),
            features=frozenset(KINDS),
            install_hint=_INSTALL_HINT,
            requires=("torch",),
        ),
        AttentionBackendInfo(
            name="mamba-triton",
            factory="kvist_mamba.triton_backend:TritonBackend",
            devices=("cuda",),
            dtypes=("float32", "float16", "bfloat16"),
            families=(FAMILY,),
            features=frozenset(KINDS),
            priority=10,
            install_hint="pip install 'kvist-mamba[triton]'",
            requires=("torch", "triton"),
        ),
    ]
