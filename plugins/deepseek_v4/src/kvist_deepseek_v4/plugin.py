"""Entry module of the plugin: imports neither torch nor triton nor transformers."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo

KVIST_SPEC = (1, 0)

#: The family of inputs: every layer hands over ``DeepseekV4Inputs``.
FAMILY = "deepseek_v4"
#: A part of the family that not every backend has: rows that are no plain elements.
ENCODED_ROWS = "encoded_rows"


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """DeepSeek-V4: a window of rows in every layer, compressed rows and what makes them in most."""
    return [
        CacheManagerInfo(
            name="deepseek-v4",
            model_types=("deepseek_v4",),
            spec_factory="kvist_deepseek_v4.spec:cache_spec",
            adapters={"transformers": "kvist_deepseek_v4.transformers:DeepseekV4Adapter"},
            install_hint="pip install 'kvist-deepseek-v4[transformers]'",
        )
    ]


@hookimpl
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """The reference, which runs anywhere, and the kernels for a GPU."""
    return [
        AttentionBackendInfo(
            name="deepseek-v4-reference",
            factory="kvist_deepseek_v4.reference:ReferenceBackend",
            devices=(ANY,),
            dtypes=(ANY,),
            families=(FAMILY,),
            features=frozenset({ENCODED_ROWS}),
            install_hint="pip install 'kvist-deepseek-v4[torch]'",
            requires=("torch",),
        ),
        AttentionBackendInfo(
            name="deepseek-v4-triton",
            factory="kvist_deepseek_v4.kernels.backend:TritonBackend",
            devices=("cuda",),
            dtypes=("float32", "bfloat16", "float16"),
            families=(FAMILY,),
            priority=10,
            install_hint="pip install 'kvist-deepseek-v4[triton]'",
            requires=("torch", "triton"),
        ),
    ]
