"""Logits of the whole model over pages equal transformers' within 1e-4; what the adapter refuses."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache, tokens
from deepseek_v4_models import build, model_logits

from kvist.errors import SpecError, StateError
from kvist_deepseek_v4.spec import cache_spec
from kvist_deepseek_v4.transformers import DeepseekV4Adapter


@pytest.mark.parametrize("block", [16, 32])
def test_ragged_batches(block):
    """Sequences of different phases in one flattened batch, in another order at each step."""
    random = np.random.default_rng(block)
    prompts = [tokens(count, count) for count in (70, 33, 5, 48)]
    with Cache(block=block, alone=True) as cache:
        sequences = [cache.manager.open(prompt, reuse=False) for prompt in prompts]
        while left := [each for each in sequences if each.computed < len(each.tokens)]:
            chosen = [left[index] for index in random.permutation(len(left))[: random.integers(1, len(left) + 1)]]
            runs = []
            for sequence in chosen:
                count = int(random.choice([1, 1, 3, 8, 17]))
                runs.append((sequence, sequence.tokens[sequence.computed : sequence.computed + count], 0))
            begins = [sequence.computed for sequence in chosen]
            for (sequence, ids, _), begin, got in zip(runs, begins, cache.logits(runs)):
                wanted = model_logits(sequence.tokens)[begin : begin + len(ids)]
                assert float((got - wanted).abs().max()) < 1e-4


def test_drafts_are_verified_and_taken_back():
    prompt, random = tokens(60, 1), np.random.default_rng(2)
    wanted = model_logits(prompt)
    with Cache(block=32, drafts=4, alone=True) as cache:
        sequence = cache.manager.open(prompt[:21], reuse=False)
        cache.logits([(sequence, prompt[:21], 0)])
        while (at := sequence.computed) < 55:
            right = int(random.integers(0, 5))
            drafts = np.concatenate([prompt[at + 1 : at + 1 + right], tokens(4 - right, at)])
            sequence.extend(prompt[at : at + 1])
            [got] = cache.logits([(sequence, [prompt[at], *drafts], 4)], accepted=[1 + right])
            assert float((got[: right + 1] - wanted[at : at + right + 1]).abs().max()) < 1e-4
            sequence.extend(prompt[at + 1 : at + 1 + right])


def test_a_second_turn():
    first = tokens(45, 3)
    second = np.concatenate([first, tokens(20, 4)])
    with Cache(block=16) as cache:
        sequence = cache.manager.open(first)
        cache.compute(sequence, 9)
        cache.manager.close(sequence)
        sequence = cache.manager.open(second)
        assert sequence.reused == 45
        cache.compute(sequence, 3)


def test_the_same_again_gives_the_same_bits():
    results = []
    for _ in range(2):
        with Cache(block=16, alone=True) as cache:
            sequence = cache.manager.open(tokens(50), reuse=False)
            parts = [cache.logits([(sequence, sequence.tokens[at : at + 10], 0)])[0] for at in range(0, 50, 10)]
            results.append(torch.cat(parts))
    assert torch.equal(*results)


def refusal(model, spec):
    before = model.config._attn_implementation
    with pytest.raises(SpecError) as caught:
        DeepseekV4Adapter(model, spec)
    assert model.config._attn_implementation == before
    return str(caught.value)


def test_models_that_are_refused():
    model = build()
    spec = cache_spec(model.config.to_dict(), block_tokens=16, dtype="float32")
    assert refusal(model.train(), spec) == ("DeepseekV4ForCausalLM is in training mode\nhint: call model.eval() first")
    model.eval()
    shorter = attrs.evolve(spec, layers=spec.layers[:-1])
    assert refusal(model, shorter) == (
        "the spec describes other layers than DeepseekV4ForCausalLM has\nhint: make it with cache_spec(config)"
    )
    compressor = model.model.layers[2].self_attn.compressor
    compressor.rotary_emb.compress_attention_scaling = 1.5
    assert refusal(model, spec) == (
        "DeepseekV4ForCausalLM: model.layers.2.self_attn.compressor scales its rope by 1.5\n"
        "hint: set attention_factor=1.0 in rope_parameters['compress'], as the checkpoints are meant"
    )
    compressor.rotary_emb.compress_attention_scaling = 1.0
    for drafts in (0, 3, 8):
        own = cache_spec(model.config.to_dict(), block_tokens=32, dtype="float32", drafts=drafts)
        DeepseekV4Adapter(model, own).detach()


def test_it_is_detached_as_it_was():
    model = build()
    spec = cache_spec(model.config.to_dict(), block_tokens=16, dtype="float32")
    ids = torch.from_numpy(tokens(20).astype(np.int64))[None]
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits
    adapter = DeepseekV4Adapter(model, spec)
    assert refusal_attached(model, spec) == (
        "DeepseekV4ForCausalLM is attached already\nhint: close the engine that it is attached to"
    )
    with pytest.raises(StateError) as caught, torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    assert str(caught.value) == (
        "DeepseekV4Attention was called without a step: the model is attached to a Kvist engine, or its code does not "
        "pass keyword arguments on to attention\n"
        "hint: close the engine before using the model in another way; serve only supported model types"
    )
    model.set_attn_implementation("eager")
    with pytest.raises(SpecError) as switched:
        adapter.forward(ids[0], torch.arange(20), torch.arange(20))
    assert str(switched.value) == (
        "the attention implementation is 'eager'\n"
        "hint: something switched it while the engine was attached; do not use the model in between"
    )
    adapter.detach()
    adapter.detach()
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def refusal_attached(model, spec):
    with pytest.raises(SpecError) as caught:
        DeepseekV4Adapter(model, spec)
    return str(caught.value)
