"""The plugin against the contract of Kvist: what ``kvist conform mamba`` runs. Needs ``kvist-mamba[testing]``."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.testing.packaging import Config, PluginTests
from kvist.testing.spec import CacheSpecTests
from kvist_mamba.backend import ReferenceBackend
from kvist_mamba.inputs import KINDS
from kvist_mamba.testing import RecurrentBackendTests, recurrent_case
from kvist_mamba.tiny import COMMON, CONFIGS


class TestPackaging(PluginTests):
    """The distribution and its entry module."""

    name = "mamba"

    def configs(self) -> Sequence[Config]:
        return [{"model_type": model_type, **COMMON, **config} for model_type, config in sorted(CONFIGS.items())]

    def bad_configs(self) -> Sequence[tuple[Config, str]]:
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
_MAMBA, _MAMBA2 = 64 * 3 * 4 + 64 * 8 * 4, (64 + 2 * 2 * 16) * 3 * 4 + 8 * 8 * 16 * 4
_BYTES = {
    "mamba": (0, 3 * _MAMBA),
    "mamba2": (0, 3 * _MAMBA2),
    "bamba": (2 * 2 * 2 * 8 * 4, 2 * _MAMBA2),
    "jamba": (2 * 2 * 2 * 8 * 4, 2 * _MAMBA),
    "nemotron_h": (2 * 2 * 8 * 4, 2 * _MAMBA2),
    "falcon_h1": (3 * 2 * 2 * 8 * 4, 3 * _MAMBA2),
    "zamba2": (2 * 2 * 4 * 16 * 4, 4 * _MAMBA2),
    "granitemoehybrid": (2 * 2 * 8 * 4, 2 * _MAMBA2),
    "qwen3_next": (2 * 2 * 16 * 4, 3 * ((2 * 2 * 8 + 4 * 12) * 3 * 4 + 4 * 8 * 12 * 4)),
    "lfm2": (2 * 2 * 8 * 4, 2 * 32 * 2 * 4),
}


class TestSpec(CacheSpecTests):
    """What configs of every family become."""

    factory = "kvist_mamba.spec:cache_spec"

    def configs(self) -> Sequence[Config]:
        return [{"model_type": model_type, **COMMON, **CONFIGS[model_type]} for model_type in _BYTES]

    def bytes_per_token(self, config: Config) -> int:
        return _BYTES[config["model_type"]][0]

    def state_bytes(self, config: Config) -> int:
        return _BYTES[config["model_type"]][1]

    def variants(self, config: Config) -> Sequence[Config]:
        return [{**config, "vocab_size": 98}]


class TestReference(RecurrentBackendTests):
    """The backend that runs anywhere, with every kind of mixer."""

    backend = ReferenceBackend
    features = frozenset(KINDS)
    cases = (
        *RecurrentBackendTests.cases,
        recurrent_case("mamba2", rollback="replay", history_tokens=4),
        recurrent_case("mamba2", "bfloat16"),
        recurrent_case("delta_net", "bfloat16", rollback="replay", history_tokens=5),
    )
