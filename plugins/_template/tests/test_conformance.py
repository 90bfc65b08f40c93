"""The plugin against the contract of Kvist: run with pytest, after ``pip install -e . 'kvist[testing]'``."""

from __future__ import annotations

from kvist.testing.packaging import PluginTests
from kvist.testing.spec import CacheSpecTests

CONFIG = {"model_type": "template", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}


class TestPackaging(PluginTests):
    name = "template"

    def configs(self):
        return [CONFIG]

    def bad_configs(self):
        text = "template: config field 'head_dim' must be a positive int, got 0"
        return [({**CONFIG, "head_dim": 0}, text)]


class TestSpec(CacheSpecTests):
    factory = "kvist_template:cache_spec"

    def configs(self):
        return [CONFIG]

    def bytes_per_token(self, config):
        return 2 * 2 * 2 * 8 * 4  # 2 layers of keys and values, 2 heads of 8 elements of 4 bytes

    def variants(self, config):
        return [{**CONFIG, "head_dim": 16}]
