"""The conformance kit's tests of packaging, as for anybody's plugin."""

from __future__ import annotations

from mamba_models import CONFIGS

from kvist.testing.packaging import PluginTests


class TestPackaging(PluginTests):
    name = "mamba"

    def configs(self):
        common = {"hidden_size": 32, "vocab_size": 97}
        return [{"model_type": model_type, **common, **config} for model_type, config in sorted(CONFIGS.items())]

    def bad_configs(self):
        return [
            (
                {"model_type": "mamba", "conv_kernel": 1},
                "mamba: a convolution of width 1 keeps nothing\nhint: it must be wider",
            ),
            (
                {"model_type": "mamba2", "num_heads": 64},
                "mamba2: 64 heads of 64 channels are not expand * hidden_size=8192",
            ),
            (
                {"model_type": "lfm2", "conv_L_cache": 0, "full_attn_idxs": []},
                "lfm2: config field 'conv_L_cache' must be a positive int, got 0",
            ),
        ]
