"""The conformance kit's tests of packaging, as for anybody's plugin."""

from __future__ import annotations

from kvist.testing.packaging import PluginTests

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 32}


class TestPackaging(PluginTests):
    name = "transformers"

    def configs(self):
        return [LLAMA, MISTRAL]

    def bad_configs(self):
        return [
            (
                {**LLAMA, "num_key_value_heads": 3},
                "llama: num_key_value_heads=3 does not divide num_attention_heads=4\n"
                "hint: every key head serves the same number of query heads",
            ),
            ({**LLAMA, "hidden_size": None}, "llama: config field 'hidden_size' is missing"),
            ({**MISTRAL, "sliding_window": 0}, "mistral: config field 'sliding_window' must be a positive int, got 0"),
        ]
