"""The plugin against the contract of Kvist: what ``kvist conform minimax-m3`` runs.

Needs ``kvist-minimax-m3[testing]``. The kernels for a GPU are tried where triton is installed, and on a CPU
in its interpreter, which ``TRITON_INTERPRET=1`` switches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from kvist.testing.attention import Case
from kvist.testing.packaging import Config, PluginTests
from kvist.testing.spec import CacheSpecTests
from kvist_minimax_m3.plugin import FP8_INDEX, SEVERAL_INDEX_HEADS
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.testing import SparseBackendTests, sparse_spec

TINY = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
}
NESTED = {"model_type": "minimax_m3_vl", "text_config": TINY}


class TestPackaging(PluginTests):
    """The distribution and its entry module."""

    name = "minimax-m3"

    def configs(self) -> Sequence[Config]:
        return [TINY, NESTED]

    def bad_configs(self) -> Sequence[tuple[Config, str]]:
        return [
            ({**TINY, "index_topk_blocks": 0}, "config field 'index_topk_blocks' must be an int of at least 1, got 0"),
            (
                {**TINY, "index_block_size": 24},
                "pages of 16 tokens do not divide sparse blocks of 24\nhint: use block_tokens=24, or a divisor of it",
            ),
        ]


class TestSpec(CacheSpecTests):
    """What configs of both spellings become."""

    factory = "kvist_minimax_m3.spec:cache_spec"

    def configs(self) -> Sequence[Config]:
        return [TINY, NESTED]

    def bytes_per_token(self, config: Config) -> int:
        # Keys and values of 3 layers, 2 heads of 16 float32 each; one index key of 8 in 2 layers.
        return 3 * 2 * 2 * 16 * 4 + 2 * 8 * 4

    def variants(self, config: Config) -> Sequence[Config]:
        text = {**TINY, "index_topk_blocks": 4}
        return [{**config, "text_config": text} if "text_config" in config else text]


class TestReference(SparseBackendTests):
    """The backend that runs anywhere."""

    backend = ReferenceBackend
    features = frozenset({SEVERAL_INDEX_HEADS, FP8_INDEX})


if find_spec("triton"):
    from kvist_minimax_m3.kernels.backend import TritonBackend

    class TestTriton(SparseBackendTests):
        """The kernels, in float32: blocks of 16 tokens, the narrowest tile, of which a query reads two."""

        backend = TritonBackend
        features = frozenset({FP8_INDEX})
        cases = (Case(name="float32", spec=sparse_spec(8)),)
        rule = Selection(16, 2, 1)
        triton = True
