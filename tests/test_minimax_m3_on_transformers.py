"""MiniMax-M3 in kvist-transformers' engine: found by its entry point, and the tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from kvist.errors import KvistError
from kvist_transformers import Engine, Request

FULL, SPARSE = "full_attention", "minimax_m3_sparse"


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights. A query reads at most 12 keys of a sparse layer."""
    torch.manual_seed(3)
    config = MiniMaxM3VLTextConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=24,
        dense_intermediate_size=40,
        shared_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=[FULL, SPARSE, SPARSE, SPARSE],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = MiniMaxM3VLForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("block_tokens", [2, 4])
def test_greedy_tokens_are_those_of_transformers(block_tokens, model, asked, poisoned):
    with poisoned(
        Engine(model, memory="1MiB", block_tokens=block_tokens, max_batch_tokens=23, max_sequences=4)
    ) as engine:
        assert engine.backend_names == {"minimax_m3": "minimax-m3-reference"}
        for _ in range(2):
            done = engine.generate([Request(prompt, max_new_tokens=12) for prompt, _ in asked])
            assert [each.tokens.tolist() for each in done] == [expected for _, expected in asked]
        # The second time everything but the last token of a prompt is known.
        assert [each.reused_tokens for each in done] == [len(prompt) - 1 for prompt, _ in asked]
        engine.manager.check()


def test_pauses_and_evictions(model, asked, poisoned):
    """Room for little more than one request."""
    with poisoned(Engine(model, memory="170KiB", block_tokens=4, max_batch_tokens=16, max_sequences=4)) as engine:
        done = engine.generate([Request(prompt, max_new_tokens=12) for prompt, _ in asked])
        assert [each.tokens.tolist() for each in done] == [expected for _, expected in asked]
        assert engine.stats.pauses > 0 or sum(group.evicted for group in engine.manager.stats().groups) > 0


def test_the_model_is_its_own_again(model, asked, continued):
    before = model.config._attn_implementation
    with Engine(model, memory="1MiB", block_tokens=4) as engine:
        with pytest.raises(KvistError) as caught:
            model(torch.tensor([[1, 2]]), use_cache=False)
        assert str(caught.value) == (
            "MiniMaxM3VLAttention was called without a step: the model is attached to a Kvist engine\n"
            "hint: close the engine before using the model in another way"
        )
        with pytest.raises(KvistError) as caught:
            Engine(model, memory="1MiB", block_tokens=4)
        assert str(caught.value) == (
            "MiniMaxM3VLForCausalLM is attached already\nhint: close the engine that it is attached to"
        )
        engine.generate([Request(asked[0][0], max_new_tokens=1)])
    assert model.config._attn_implementation == before
    prompt, expected = asked[0]
    assert continued(model, prompt, 3) == expected[:3]


def test_index_keys_of_8_bits_through_the_config(model, asked, continued):
    """Asked for in the config; the first tokens, of a prompt that selects everything, cannot differ."""
    model.config.index_dtype = "fp8"
    try:
        with Engine(model, memory="1MiB", block_tokens=4) as engine:
            dtypes = {stream.row.dtype for layer in engine.spec.layers for stream in layer.streams}
            assert dtypes == {"float32", "float8_e4m3fn"}
            prompt = asked[0][0][:6]
            [done] = engine.generate([Request(prompt, max_new_tokens=6)])
        assert done.tokens.tolist() == continued(model, prompt, 6)
    finally:
        del model.config.index_dtype
