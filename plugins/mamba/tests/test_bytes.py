"""What a sequence and a token take: the formula's bytes and the padding that the layout reports, nothing else."""

from __future__ import annotations

import pytest

from kvist.layout import Layout
from kvist_mamba import cache_spec

GIB = 1 << 30
KIB = 1 << 10

#: Nemotron-H-8B's layers: 24 with a state, 4 with attention.
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
BAMBA = {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]}
QWEN3_NEXT = {"model_type": "qwen3_next"}
MAMBA_2_8B = {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64}

#: Config; layers with a state, bytes of its recurrent part and of its convolution's; bytes per token of all attention.
#: Heads * size * columns * 4 for a float32 state, channels * 3 * 2 for a convolution of width 4 in bfloat16, 2 * heads
#: * size * 2 for keys and values.
MODELS = {
    "nemotron_h": (NEMOTRON_H, 24, 128 * 64 * 128 * 4, (128 * 64 + 2 * 8 * 128) * 3 * 2, 4 * 2 * 8 * 128 * 2),
    "bamba": (BAMBA, 29, 128 * 64 * 256 * 4, (128 * 64 + 2 * 1 * 256) * 3 * 2, 3 * 2 * 8 * 128 * 2),
    "qwen3_next": (QWEN3_NEXT, 36, 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 2, 12 * 2 * 2 * 256 * 2),
    "mamba": (MAMBA_2_8B, 64, 5120 * 16 * 4, 5120 * 3 * 2, 0),
}


def test_the_formula_has_the_sizes_that_are_known():
    sizes = {name: row[2:4] for name, row in MODELS.items()}
    assert sizes["nemotron_h"] == (4096 * KIB, 61440)
    assert sizes["qwen3_next"] == (2048 * KIB, 49152)
    assert sizes["bamba"][0] == 8192 * KIB
    assert sizes["mamba"] == (320 * KIB, 30720)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("memory", [1 * GIB, 80 * GIB])
def test_bytes_of_a_sequence_and_of_a_token(name, block_tokens, memory):
    config, layers, state, conv, per_token = MODELS[name]
    layout = Layout.build(cache_spec(config, block_tokens=block_tokens, dtype="bfloat16"), memory)
    groups = {group.exact: group for group in layout.groups}
    assert groups[True].content_bytes == layers * (state + conv)
    assert groups[True].page_bytes == groups[True].content_bytes + groups[True].padding_bytes
    assert groups[True].padding_fraction < 0.02
    if per_token:
        assert groups[False].page_bytes == block_tokens * per_token, "attention's pages are as large as their tokens"
    assert len(groups) == (2 if per_token else 1)


def test_a_state_in_bfloat16_takes_half():
    spec = cache_spec(QWEN3_NEXT, dtype="bfloat16", state_dtype="bfloat16")
    group = Layout.build(spec, 80 * GIB).groups[0]
    assert group.content_bytes == 36 * (1024 * KIB + 49152)


@pytest.mark.parametrize("name", ["nemotron_h", "bamba", "qwen3_next"])
def test_a_sequence_of_one_token_takes_one_state_and_one_block(name):
    """Not a page of attention as large as a state: what a short prompt takes is what its rows need."""
    config, layers, state, conv, per_token = MODELS[name]
    layout = Layout.build(cache_spec(config, block_tokens=16, dtype="bfloat16"), 80 * GIB)
    fixed, blocks = (group.page_bytes for group in layout.groups)
    assert fixed + blocks < 1.01 * (layers * (state + conv) + 16 * per_token)
