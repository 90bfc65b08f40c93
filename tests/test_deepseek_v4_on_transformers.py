"""DeepSeek-V4 in kvist-transformers' engine: found by its entry point, and the tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deepseek_v4_models import build
from everybody import Everybody

from kvist.errors import SpecError
from kvist_transformers import Engine, Request


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def asked(model: Any) -> list[tuple[np.ndarray, list[int]]]:
    """Prompts that share 37 tokens, with the greedy continuation by transformers' own cache, one at a time."""
    random = np.random.default_rng(0)
    shared = random.integers(2, 97, 37)
    pairs = []
    for count in (3, 50, 17, 31):
        prompt = np.concatenate([shared, random.integers(2, 97, count)])
        output = model.generate(torch.from_numpy(prompt)[None], max_new_tokens=12, do_sample=False)
        pairs.append((prompt, output[0, len(prompt) :].tolist()))
    return pairs


def poisoned(engine: Engine) -> Engine:
    """Free pages come in random order and hold NaN at every step."""
    begin = engine.backends.begin
    engine.manager.shuffle_free_pages(np.random.default_rng(1))

    def begin_poisoned(step: Any) -> None:
        engine.manager.check()
        for group in range(len(engine.layout.groups)):
            engine.memory.pages(group)[torch.from_numpy(engine.manager.free_pages(group)).long()] = 255
        begin(step)

    engine.backends.begin = begin_poisoned
    return engine


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_greedy_tokens_are_those_of_transformers(block_tokens, model, asked):
    with poisoned(
        Engine(model, memory="4MiB", block_tokens=block_tokens, max_batch_tokens=23, max_sequences=4)
    ) as engine:
        assert engine.backend_names == {"deepseek_v4": "deepseek-v4-reference"}
        for again in range(2):
            done = engine.generate([Request(prompt, max_new_tokens=12) for prompt, _ in asked])
            assert [each.tokens.tolist() for each in done] == [expected for _, expected in asked]
            if again:
                # The deepest block boundary before the last token of each prompt.
                assert all(each.reused_tokens >= (len(p) - 1) // 32 * 32 for each, (p, _) in zip(done, asked))
        engine.manager.check()


def test_pauses_and_evictions(model, asked):
    """Room for little more than one request."""
    sizes = {"memory": "200KiB", "block_tokens": 16, "max_batch_tokens": 16, "max_sequences": 4}
    with poisoned(Engine(model, **sizes, admission=Everybody())) as engine:
        done = engine.generate([Request(prompt, max_new_tokens=12) for prompt, _ in asked])
        assert [each.tokens.tolist() for each in done] == [expected for _, expected in asked]
        assert engine.stats.pauses > 0 and sum(group.evicted for group in engine.manager.stats().groups) > 0


def test_blocks_hold_whole_rows(model):
    before = model.config._attn_implementation
    with pytest.raises(SpecError) as caught:
        Engine(model, memory="1MiB", block_tokens=8)
    assert str(caught.value) == (
        "layer 2 stream 'compressed': block_tokens=8 is not a multiple of tokens_per_row=16\nhint: use a multiple of 16"
    )
    assert model.config._attn_implementation == before
