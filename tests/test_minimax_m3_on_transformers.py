"""MiniMax-M3 in kvist-transformers' engine: found by its entry point, and the tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from everybody import Everybody
from minimax_m3_models import build

from kvist.errors import KvistError
from kvist_transformers import Engine, Request


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def asked(model: Any) -> list[tuple[np.ndarray, list[int]]]:
    """Prompts that share 37 tokens, with the greedy continuation by transformers' own cache."""
    random = np.random.default_rng(0)
    shared = random.integers(2, 97, 37)
    pairs = []
    for count in (3, 50, 17, 31):
        prompt = np.concatenate([shared, random.integers(2, 97, count)])
        ids = torch.from_numpy(prompt)[None]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        pairs.append((prompt, output[0, len(prompt) :].tolist()))
    return pairs


def poisoned(engine: Engine) -> Engine:
    """Free pages come in random order and hold NaN at every step."""
    begin = engine.backends.begin
    engine.manager.shuffle_free_pages(np.random.default_rng(1))

    def begin_poisoned(step: Any) -> None:
        engine.manager.check()
        engine.memory.pages(0)[torch.from_numpy(engine.manager.free_pages(0)).long()] = 255
        begin(step)

    engine.backends.begin = begin_poisoned
    return engine


@pytest.mark.parametrize("block_tokens", [2, 4])
def test_greedy_tokens_are_those_of_transformers(block_tokens, model, asked):
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


def test_pauses_and_evictions(model, asked):
    """Room for little more than one request."""
    sizes = {"memory": "170KiB", "block_tokens": 4, "max_batch_tokens": 16, "max_sequences": 4}
    with poisoned(Engine(model, **sizes, admission=Everybody())) as engine:
        done = engine.generate([Request(prompt, max_new_tokens=12) for prompt, _ in asked])
        assert [each.tokens.tolist() for each in done] == [expected for _, expected in asked]
        assert engine.stats.pauses > 0 or sum(group.evicted for group in engine.manager.stats().groups) > 0


def test_the_model_is_its_own_again(model, asked):
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
    ids = torch.from_numpy(prompt)[None]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert output[0, len(prompt) :].tolist() == expected[:3]


def test_index_keys_of_8_bits_through_the_config(model, asked):
    """Asked for in the config; the first tokens, of a prompt that selects everything, cannot differ."""
    model.config.index_dtype = "fp8"
    try:
        with Engine(model, memory="1MiB", block_tokens=4) as engine:
            dtypes = {stream.row.dtype for layer in engine.spec.layers for stream in layer.streams}
            assert dtypes == {"float32", "float8_e4m3fn"}
            prompt = asked[0][0][:6]
            [done] = engine.generate([Request(prompt, max_new_tokens=6)])
        ids = torch.from_numpy(prompt)[None]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert done.tokens.tolist() == output[0, 6:].tolist()
    finally:
        del model.config.index_dtype
