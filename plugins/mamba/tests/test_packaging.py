"""The conformance kit's tests of packaging and of specs, as for anybody's plugin."""

from __future__ import annotations

from mamba_models import CONFIGS

from kvist.testing.packaging import PluginTests
from kvist.testing.spec import CacheSpecTests


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


#: In float32: bytes of keys and values of a token, and of a sequence's states, of the tiny models.
MAMBA, MAMBA2 = 64 * 3 * 4 + 64 * 8 * 4, (64 + 2 * 2 * 16) * 3 * 4 + 8 * 8 * 16 * 4
BYTES = {
    "mamba": (0, 3 * MAMBA),
    "mamba2": (0, 3 * MAMBA2),
    "bamba": (2 * 2 * 2 * 8 * 4, 2 * MAMBA2),
    "jamba": (2 * 2 * 2 * 8 * 4, 2 * MAMBA),
    "nemotron_h": (2 * 2 * 8 * 4, 2 * MAMBA2),
    "falcon_h1": (3 * 2 * 2 * 8 * 4, 3 * MAMBA2),
    "zamba2": (2 * 2 * 4 * 16 * 4, 4 * MAMBA2),
    "granitemoehybrid": (2 * 2 * 8 * 4, 2 * MAMBA2),
    "qwen3_next": (2 * 2 * 16 * 4, 3 * ((2 * 2 * 8 + 4 * 12) * 3 * 4 + 4 * 8 * 12 * 4)),
    "lfm2": (2 * 2 * 8 * 4, 2 * 32 * 2 * 4),
}


class TestSpecs(CacheSpecTests):
    factory = "kvist_mamba.spec:cache_spec"

    def configs(self):
        common = {"hidden_size": 32, "vocab_size": 97}
        return [{"model_type": model_type, **common, **CONFIGS[model_type]} for model_type in BYTES]

    def bytes_per_token(self, config):
        return BYTES[config["model_type"]][0]

    def state_bytes(self, config):
        return BYTES[config["model_type"]][1]

    def variants(self, config):
        return [{**config, "vocab_size": 98}]
