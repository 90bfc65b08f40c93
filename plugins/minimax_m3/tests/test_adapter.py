"""What the adapter refuses, and what it leaves behind."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MiniMaxM3VLConfig, MiniMaxM3VLVisionConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

from kvist.errors import SpecError
from kvist.spec import CacheSpec
from kvist_minimax_m3.spec import cache_spec
from kvist_minimax_m3.transformers import MiniMaxM3Adapter


def spec_of(model, **how) -> CacheSpec:
    return cache_spec(model.config.to_dict(), **{"block_tokens": 4, "dtype": "float32", "fingerprint": "w", **how})


def refusal(model, spec):
    before = model.config._attn_implementation
    with pytest.raises(SpecError) as caught:
        MiniMaxM3Adapter(model, spec)
    assert model.config._attn_implementation == before
    return str(caught.value)


def test_refusals(tiny):
    model = copy.deepcopy(tiny())
    spec = spec_of(model)
    other = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    assert refusal(other, spec) == (
        "LlamaForCausalLM is not served\nhint: load MiniMaxM3VLForCausalLM or MiniMaxM3SparseForConditionalGeneration"
    )
    fewer = attrs.evolve(spec, layers=spec.layers[:-1])
    assert refusal(model, fewer) == (
        "the spec describes other layers than MiniMaxM3VLForCausalLM has\nhint: make it with cache_spec(config)"
    )
    model.train()
    assert refusal(model, spec) == "MiniMaxM3VLForCausalLM is in training mode\nhint: call model.eval() first"
    model.eval()
    model.model.embed_tokens.to("meta")
    assert refusal(model, spec) == (
        "MiniMaxM3VLForCausalLM: its parameters are on 2 devices: cpu, meta\n"
        "hint: load it onto one device, without device_map"
    )


def test_index_keys_that_may_not_fit_8_bits(tiny):
    model = copy.deepcopy(tiny())
    spec = spec_of(model, index_dtype="fp8")
    MiniMaxM3Adapter(model, spec).detach()
    with torch.no_grad():
        # 16 elements: a root mean square of 1 gives at most 4 times the weight.
        model.model.layers[3].self_attn.indexer.k_norm.weight[5] = -114.0
    assert refusal(model, spec) == (
        "index keys may reach 452, float8_e4m3fn ends at 448\nhint: store the index keys of this model as bfloat16"
    )
    MiniMaxM3Adapter(model, spec_of(model)).detach()


def test_what_a_model_needs_of_a_backend(tiny):
    for variant, how, features in (
        ("equal heads", {}, set()),
        ("two index heads per key head", {}, {"several_index_heads"}),
        ("equal heads", {"index_dtype": "fp8"}, {"fp8_index"}),
    ):
        model = tiny(variant)
        adapter = MiniMaxM3Adapter(model, spec_of(model, **how))
        assert {name: need.features for name, need in adapter.needs.items()} == {"minimax_m3": features}
        adapter.detach()


def test_detach_gives_everything_back(tiny):
    model = tiny()
    adapter = MiniMaxM3Adapter(model, spec_of(model))
    assert model.config._attn_implementation == "kvist"
    assert refusal(model, spec_of(model)) == (
        "MiniMaxM3VLForCausalLM is attached already\nhint: close the engine that it is attached to"
    )
    model.set_attn_implementation("sdpa")
    with pytest.raises(SpecError) as caught:
        adapter.forward(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    assert str(caught.value) == (
        "the attention implementation is 'sdpa'\n"
        "hint: something switched it while the engine was attached; do not use the model in between"
    )
    model.set_attn_implementation("eager")
    for _ in range(2):
        adapter.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_text_of_a_multimodal_model(tiny, logits, tokens, machine):
    """The same weights inside the multimodal model give the same logits."""
    text, prompt = tiny(), tokens(40)
    expected = logits(text, prompt)
    vision = MiniMaxM3VLVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    settings = {name: value for name, value in text.config.to_dict().items() if name != "model_type"}
    config = MiniMaxM3VLConfig(text_config=settings, vision_config=vision.to_dict(), projector_hidden_size=16)
    model = MiniMaxM3SparseForConditionalGeneration(config).eval()
    model.set_experts_implementation("eager")
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    before = model.model.language_model.config._attn_implementation
    with machine(model) as cache:
        sequence = cache.manager.open(prompt)
        cache.finish(sequence, lambda _: expected)
        cache.manager.close(sequence)
    assert model.model.language_model.config._attn_implementation == before
