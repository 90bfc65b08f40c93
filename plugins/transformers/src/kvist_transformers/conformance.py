"""The plugin against the contract of Kvist: what ``kvist conform transformers`` runs. Needs ``kvist[testing]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvist.testing.packaging import PluginTests
from kvist.testing.spec import CacheSpecTests
from kvist_transformers.families import Config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 32}


class TestPackaging(PluginTests):
    """The distribution and its entry module."""

    name = "transformers"

    def configs(self) -> Sequence[Config]:
        return [LLAMA, MISTRAL]

    def bad_configs(self) -> Sequence[tuple[Config, str]]:
        return [
            (
                {**LLAMA, "num_key_value_heads": 3},
                "llama: num_key_value_heads=3 does not divide num_attention_heads=4\n"
                "hint: every key head serves the same number of query heads",
            ),
            ({**LLAMA, "hidden_size": None}, "llama: config field 'hidden_size' is missing"),
            ({**MISTRAL, "sliding_window": 0}, "mistral: config field 'sliding_window' must be a positive int, got 0"),
        ]


class TestSpec(CacheSpecTests):
    """What configs of decoders become."""

    factory = "kvist_transformers.specs:decoder_spec"

    def configs(self) -> Sequence[Config]:
        return [LLAMA, MISTRAL]

    def bytes_per_token(self, config: Config) -> int:
        # Keys and values of 2 layers, 2 heads of 16 float32 each.
        return 2 * 2 * 2 * 16 * 4

    def variants(self, config: Config) -> Sequence[Config]:
        return [{**config, "rope_theta": 500_000.0}, {**config, "num_hidden_layers": 3}]
