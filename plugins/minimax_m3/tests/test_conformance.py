"""The plugin against the contract of Kvist: its packaging, and the reference backend."""

from __future__ import annotations

from kvist.testing.packaging import PluginTests
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.testing import SparseBackendTests

TINY = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}


class TestPackaging(PluginTests):
    name = "minimax-m3"

    def configs(self):
        return [TINY, {"model_type": "minimax_m3_vl", "text_config": TINY}]

    def bad_configs(self):
        return [
            ({**TINY, "index_topk_blocks": 0}, "config field 'index_topk_blocks' must be an int of at least 1, got 0"),
            (
                {**TINY, "index_block_size": 24},
                "pages of 16 tokens do not divide sparse blocks of 24\nhint: use block_tokens=24, or a divisor of it",
            ),
        ]


class TestReference(SparseBackendTests):
    backend = ReferenceBackend
    features = frozenset({"several_index_heads", "fp8_index"})
