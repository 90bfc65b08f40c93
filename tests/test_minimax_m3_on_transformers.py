"""MiniMax-M3 in kvist-transformers' engine: found by its entry point, and the tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everybody import Everybody
from minimax_m3_models import build

from kvist.errors import KvistError
from kvist_transformers import Engine, Request


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


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
    sizes = {"memory": "170KiB", "block_tokens": 4, "max_batch_tokens": 16, "max_sequences": 4}
    with poisoned(Engine(model, **sizes, admission=Everybody())) as engine:
        done = engine.generate([Request(prompt, max_new_tokens=12) for prompt, _ in asked])
        assert [each.tokens.tolist() for each in done] == [expected for _, expected in asked]
        assert engine.stats.pauses > 0 or sum(group.evicted for group in engine.manager.stats().groups) > 0


def test_the_model_is_its_own_again(model, asked, continued):
    before = model.config._attn_implementation
    with Engine(model, memory="1MiB", block_tokens=4) as engine:
        with pytest.raises(KvistError) as caught:
            model(torch.tensor([[1, 2]]), use_cache=False)
        assert str(caught.value) == (
            "MiniMaxM3VLAttention was called without a step: the model is attached to a Kvist engine, or its code does "
            "not pass keyword arguments on to attention\n"
            "hint: close the engine before using the model in another way; serve only supported model types"
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
