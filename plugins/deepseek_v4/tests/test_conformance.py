"""The plugin against the contract of Kvist: its packaging, and the reference backend."""

from __future__ import annotations

from kvist.testing.packaging import PluginTests
from kvist_deepseek_v4.reference import ReferenceBackend
from kvist_deepseek_v4.testing import DeepseekV4BackendTests

TINY = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "index_head_dim": 16,
    "sliding_window": 8,
    "partial_rotary_factor": 0.25,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}
RATIOS = {name: value for name, value in TINY.items() if name not in ("layer_types", "compress_rates")}


class TestPackaging(PluginTests):
    name = "deepseek-v4"

    def configs(self):
        return [TINY, {**RATIOS, "compress_ratios": [0, 4, 0, 0]}]

    def bad_configs(self):
        return [
            ({**TINY, "head_dim": 0}, "config field 'head_dim' must be an int of at least 1, got 0"),
            (
                {**RATIOS, "compress_ratios": [0, 4, 128, 0]},
                "layer 2 stream 'compressed': block_tokens=16 is not a multiple of tokens_per_row=128\n"
                "hint: use a multiple of 128",
            ),
        ]


class TestReference(DeepseekV4BackendTests):
    backend = ReferenceBackend
