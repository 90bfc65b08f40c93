"""Entry module of the plugin: imports neither torch nor triton nor transformers."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo

KVIST_SPEC = (1, 0)

#: The family of inputs: dense layers hand over ``GQAInputs``, sparse layers ``SparseInputs``.
FAMILY = "minimax_m3"
#: Parts of the family that not every backend has.
SEVERAL_INDEX_HEADS = "several_index_heads"
FP8_INDEX = "fp8_index"


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """MiniMax-M3: keys and values in every layer, an index key beside them in the sparse ones."""
    return [
        CacheManagerInfo(
            name="minimax-m3",
            model_types=("minimax_m3_vl", "minimax_m3_vl_text"),
            spec_factory="kvist_minimax_m3.spec:cache_spec",
            adapters={"transformers": "kvist_minimax_m3.transformers:MiniMaxM3Adapter"},
            install_hint="pip install 'kvist-minimax-m3[transformers]'",
        )
    ]


@hookimpl
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """The reference, which runs anywhere, and the kernels for a GPU."""
    return [
        AttentionBackendInfo(
            name="minimax-m3-reference",
            factory="kvist_minimax_m3.reference:ReferenceBackend",
            devices=(ANY,),
            dtypes=(ANY,),
            families=(FAMILY,),
            features=frozenset({SEVERAL_INDEX_HEADS, FP8_INDEX}),
            install_hint="pip install 'kvist-minimax-m3[torch]'",
            requires=("torch",),
        ),
        AttentionBackendInfo(
            name="minimax-m3-triton",
            factory="kvist_minimax_m3.kernels.backend:TritonBackend",
            devices=("cuda",),
            dtypes=("float32", "bfloat16", "float16"),
            families=(FAMILY,),
            features=frozenset({FP8_INDEX}),
            priority=10,
            install_hint="pip install 'kvist-minimax-m3[triton]'",
            requires=("torch", "triton"),
        ),
    ]
