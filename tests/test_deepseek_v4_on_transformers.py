"""DeepSeek-V4 in kvist-transformers' engine: found by its entry point, and the tokens are those of transformers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from deepseek_v4_models import build
from everybody import Everybody

from kvist.errors import SpecError
from kvist.registry import default_registry
from kvist_deepseek_v4.formats import encodings
from kvist_deepseek_v4.plugin import ENCODED_ROWS, FAMILY
from kvist_deepseek_v4.spec import cache_spec
from kvist_transformers import Engine, Request


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_greedy_tokens_are_those_of_transformers(block_tokens, model, asked, poisoned):
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_backend_is_chosen_by_what_it_can():
    """The kernels on a GPU, the reference for rows that they do not serve, and anywhere else."""

    def chosen(device: str, dtype: str, rows: str) -> str:
        spec = cache_spec(build().config.to_dict(), block_tokens=16, dtype=rows)
        features = {ENCODED_ROWS} if encodings(spec) else set()
        asked = {"device": device, "dtype": dtype, "family": FAMILY, "features": features}
        return default_registry().attention_backend(**asked).info.name

    assert chosen("cuda", "bfloat16", "bfloat16") == "deepseek-v4-triton"
    assert chosen("cuda", "bfloat16", "fp8") == "deepseek-v4-reference"
    assert chosen("cuda", "float64", "float32") == "deepseek-v4-reference"
    assert chosen("cpu", "bfloat16", "bfloat16") == "deepseek-v4-reference"


def test_pauses_and_evictions(model, asked, poisoned):
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
