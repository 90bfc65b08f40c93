"""The plugin against the contract of Kvist: what ``kvist conform deepseek-v4`` runs.

Needs ``kvist-deepseek-v4[testing]``. The kernels for a GPU are tried where triton is installed, and on a CPU
in its interpreter, which ``TRITON_INTERPRET=1`` switches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec

from kvist.testing.attention import Case
from kvist.testing.packaging import Config, PluginTests
from kvist.testing.spec import CacheSpecTests
from kvist_deepseek_v4.plugin import ENCODED_ROWS
from kvist_deepseek_v4.reference import ReferenceBackend
from kvist_deepseek_v4.testing import DeepseekV4BackendTests, tiny_spec

_TYPES = {
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}
#: A layer of each kind in transformers' spelling, and two in the checkpoints', with a layer of multi-token prediction.
TINY = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "index_head_dim": 16,
    "sliding_window": 8,
    "partial_rotary_factor": 0.25,
    **_TYPES,
}
RATIOS = {
    **{name: value for name, value in TINY.items() if name not in _TYPES},
    "num_hidden_layers": 2,
    "compress_ratios": [0, 4, 0],
}


class TestPackaging(PluginTests):
    """The distribution and its entry module."""

    name = "deepseek-v4"

    def configs(self) -> Sequence[Config]:
        return [TINY, RATIOS]

    def bad_configs(self) -> Sequence[tuple[Config, str]]:
        return [
            ({**TINY, "head_dim": 0}, "config field 'head_dim' must be an int of at least 1, got 0"),
            (
                {**RATIOS, "compress_ratios": [0, 128, 0]},
                "layer 1 stream 'compressed': block_tokens=16 is not a multiple of tokens_per_row=128\n"
                "hint: use a multiple of 128",
            ),
        ]


class TestSpec(CacheSpecTests):
    """What configs of both spellings become."""

    factory = "kvist_deepseek_v4.spec:cache_spec"

    def configs(self) -> Sequence[Config]:
        return [TINY, RATIOS]

    def bytes_per_token(self, config: Config) -> Fraction:
        # In float32. A layer's window row has 32 elements. One that compresses 4 tokens has rows of 32 and 16 elements
        # for 4 tokens, and of each token content and gate of two series at both widths; one that compresses 16 has
        # a row of 32 for 16 tokens, and content and gate of one series.
        window, sparse = 32 * 4, Fraction(32 * 4 + 16 * 4, 4) + 2 * 2 * (32 + 16) * 4
        heavy = Fraction(32 * 4, 16) + 2 * 32 * 4
        return 3 * window + sparse + heavy if config is TINY else 2 * window + sparse

    def variants(self, config: Config) -> Sequence[Config]:
        return [{**config, "sliding_window": 16}, {**config, "rope_theta": 5.0}]


class TestReference(DeepseekV4BackendTests):
    """The backend that runs anywhere."""

    backend = ReferenceBackend
    features = frozenset({ENCODED_ROWS})


if find_spec("triton"):
    from kvist_deepseek_v4.kernels.backend import TritonBackend

    class TestTriton(DeepseekV4BackendTests):
        """The kernels, in float32, which the interpreter rounds as a GPU does; as few layers as show all."""

        backend = TritonBackend
        cases = (Case(name="float32", spec=tiny_spec(8, layers="484")),)
        triton = True
