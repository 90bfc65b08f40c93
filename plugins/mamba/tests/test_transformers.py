"""Hybrid models on the engine: greedy tokens and logits are transformers' own, whatever happens to a request."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from everybody import Everybody
from hybrid_drive import TOLERANCE, WatchedEngine, room
from hybrid_models import FAMILIES, SOME, hybrid_model, relative_error, tokens
from transformers import DynamicCache

from kvist.errors import SpecError, StateError
from kvist.restore import RestorePolicy
from kvist_mamba import cache_spec
from kvist_mamba import families as served
from kvist_mamba.mixers import MIXERS, recurrent_mixers
from kvist_mamba.tiny import CONFIGS
from kvist_mamba.transformers import HybridAdapter
from kvist_transformers import Engine, Request


def joined(*parts):
    return np.concatenate(parts).astype(np.int32)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ragged_chunked_and_reused_requests(model_type):
    """Prompts shorter than a convolution and longer than a batch; then a second turn, branches and the same again."""
    shared = tokens(20, 1)
    prompts = [joined(shared, tokens(9, 2)), tokens(2, 3), tokens(45, 4), joined(shared, tokens(14, 5)), tokens(1, 6)]
    with WatchedEngine(model_type) as engine:
        first = [Request(prompt, max_new_tokens=8) for prompt in prompts]
        answers = engine.run(first)
        # 29 + 8 tokens, of which the last was never fed back; states are kept at the exact end of a turn.
        turn = joined(prompts[0], answers[0].tokens, tokens(5, 7))
        second, again, branch, sibling = engine.run(
            [
                Request(turn, max_new_tokens=6),
                Request(prompts[2], max_new_tokens=6),
                Request(joined(shared, tokens(7, 8)), max_new_tokens=6),
                Request(joined(shared, tokens(7, 9)), max_new_tokens=6),
            ]
        )
        assert second.reused_tokens == 36
        assert again.reused_tokens == 40
        assert branch.reused_tokens == sibling.reused_tokens == 16
        engine.manager.check()


@pytest.mark.parametrize("model_type", SOME)
def test_restore_points_of_the_caller(model_type):
    """The policy goes through to the manager: with states at every block, any branch is reused up to its block."""
    prompt = tokens(40, 1)
    with WatchedEngine(model_type, restore=RestorePolicy(every_blocks=1)) as engine:
        engine.run([Request(prompt, max_new_tokens=2)])
        for length in (9, 16, 23, 33):
            [branch] = engine.run([Request(joined(prompt[:length], tokens(6, length)), max_new_tokens=2)])
            assert branch.reused_tokens == length // 8 * 8


@pytest.mark.parametrize("model_type", FAMILIES)
def test_pauses_for_want_of_memory(model_type):
    """Room for the tokens of about two requests: running ones lose their pages and are computed again."""
    prompts = [tokens(12 + 5 * seed, seed) for seed in range(4)]
    with WatchedEngine(model_type, memory=room(model_type, 80, 3), admission=Everybody()) as engine:
        engine.run([Request(prompt, max_new_tokens=30) for prompt in prompts])
        # What has states only never grows, so nobody who runs is in anybody's way.
        assert (engine.stats.pauses > 0) == any(not group.exact for group in engine.layout.groups)
        assert engine.manager.stats().open_sequences == 0


@pytest.mark.parametrize("model_type", SOME)
@pytest.mark.parametrize("failing", [1, 6])
def test_a_step_that_fails_half_way_is_forgotten(model_type, failing):
    """The last layer raises, when the states of all layers before it are already overwritten."""
    prompts = [tokens(21, 1), tokens(3, 2), tokens(18, 3)]
    with WatchedEngine(model_type) as engine:
        requests = [Request(prompt, max_new_tokens=8) for prompt in prompts]
        handles = [engine.submit(request) for request in requests]
        for _ in range(failing):
            engine.step()

        def fail(*_):
            raise RuntimeError("out of memory")

        hook = hybrid_model(model_type).base_model.layers[-1].register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
        hook.remove()
        engine.manager.check()
        while not engine.idle:
            engine.step()
        completions = [handle.completion() for handle in handles]
        engine.check(zip(requests, completions))
        assert sum(completion.pauses for completion in completions) >= 2
        assert engine.manager.stats().open_sequences == 0


@pytest.mark.parametrize("model_type", ["mamba", "bamba"])
def test_a_paused_request_finds_what_it_generated(model_type):
    """Unless others took it, nothing but its last token is computed again."""
    request = Request(tokens(12, 1), max_new_tokens=40)
    with WatchedEngine(model_type) as engine:
        handle = engine.submit(request)
        while len(handle.tokens) < 24:
            engine.step()
        engine.scheduler.pause(engine.scheduler.decoding[-1])
        while not engine.idle:
            engine.step()
        completion = handle.completion()
        engine.check([(request, completion)])
        assert (completion.pauses, engine.stats.computed_tokens) == (1, 12 + 39)


def test_a_step_that_never_began_costs_nothing():
    request = Request(tokens(21, 1), max_new_tokens=8)
    with WatchedEngine("bamba") as engine:
        handle = engine.submit(request)
        engine.step()
        apply = engine.memory.apply
        engine.memory.apply = lambda step: (_ for _ in ()).throw(RuntimeError("lost"))
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
        engine.memory.apply = apply
        while not engine.idle:
            engine.step()
        engine.check([(request, handle.completion())])
        assert handle.completion().pauses == 0


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("falcon_h1", {"mamba_rms_norm": False}),
        ("falcon_h1", {"mamba_norm_before_gate": False, "attention_in_multiplier": 0.7, "ssm_out_multiplier": 1.3}),
        ("falcon_h1", {"mamba_d_ssm": None, "mamba_proj_bias": True}),
        ("zamba2", {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4}),
        ("zamba2", {"use_mem_rope": False}),
        ("mamba", {"use_bias": True, "use_conv_bias": False}),
        ("mamba2", {"use_bias": True, "use_conv_bias": False, "time_step_limit": (0.3, 0.6)}),
        ("bamba", {"mamba_proj_bias": True, "time_step_limit": (0.3, 0.9)}),
        # The lower limit takes part: transformers obeys it for several tokens at a time only.
        ("nemotron_h", {"time_step_min": 1.2}),
        ("granitemoehybrid", {"position_embedding_type": "rope", "num_local_experts": 0}),
        ("qwen3_next", {"linear_num_value_heads": 2, "partial_rotary_factor": 0.5}),
        ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
        # Nothing but one kind of layer.
        ("bamba", {"attn_layer_indices": ()}),
        ("granitemoehybrid", {"layer_types": ("full_attention",) * 3}),
    ],
)
def test_options_of_the_models(model_type, overrides):
    prompts = [tokens(21, 1), tokens(33, 2)]
    with WatchedEngine(model_type, overrides) as engine:
        engine.run([Request(prompt, max_new_tokens=6) for prompt in prompts])
        engine.run([Request(joined(prompts[0], tokens(5, 3)), max_new_tokens=3)])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bfloat16(model_type):
    """States in float32 beside rows in bfloat16; transformers rounds at other places."""
    model = copy.deepcopy(hybrid_model(model_type)).bfloat16()
    prompt = tokens(40, 1)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(prompt).long()[None], use_cache=False).logits[0, -1].float()
    with Engine(model, memory="2MiB", max_batch_tokens=16, max_sequences=2) as engine:
        dtypes = {stream.row.dtype for layer in engine.spec.layers for stream in layer.streams}
        assert dtypes == ({"bfloat16"} if model_type == "lfm2" else {"bfloat16", "float32"})
        forward, seen = engine.adapter.forward, []
        engine.adapter.forward = lambda *arguments: seen.append(forward(*arguments)) or seen[-1]
        engine.generate([Request(prompt, max_new_tokens=1)])
    assert relative_error(seen[-1][0].float(), expected) < 0.1


@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_token_by_token_is_the_same_oracle(model_type):
    """One forward without a cache and one token at a time with one, apart from the limits of time steps."""
    ids = tokens(24, 1)
    model = copy.deepcopy(hybrid_model(model_type))
    for mixer in recurrent_mixers(model).values():
        mixer.time_step_limit = (0.0, float("inf"))
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for position, token in enumerate(ids.tolist()):
            arguments = {"position_ids": torch.tensor([[position]]), "cache": cache, "use_cache": True}
            logits.append(model(input_ids=torch.tensor([[token]]), **arguments).logits[0])
        whole = model(input_ids=torch.tensor([ids.tolist()]), use_cache=False).logits[0]
    assert relative_error(torch.cat(logits), whole) < TOLERANCE


def test_states_in_bfloat16_on_request():
    model = copy.deepcopy(hybrid_model("mamba2"))
    model.config.mamba_ssm_cache_dtype = "bfloat16"
    with Engine(model, memory="1MiB") as engine:
        dtypes = {stream.name: stream.row.dtype for layer in engine.spec.layers for stream in layer.streams}
        assert dtypes == {"conv_state": "float32", "recurrent_state": "bfloat16"}
        [completion] = engine.generate([Request(tokens(20, 1), max_new_tokens=4)])
        assert completion.error is None


def test_every_served_type_has_a_mixer():
    assert set(MIXERS) == set(served.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("model_type", ["mamba", "zamba2"])
def test_the_model_is_its_own_between_steps_and_after(model_type):
    model = copy.deepcopy(hybrid_model(model_type))
    before = [dict(vars(module)) for module in model.modules()]
    ids = torch.from_numpy(tokens(12, 1)).long()[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    with Engine(model, memory="1MiB") as engine:
        engine.submit(Request(tokens(9, 2), max_new_tokens=4))
        engine.step()
        if model_type == "mamba":
            # Nothing of a model without attention is replaced between steps.
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        else:
            with pytest.raises(StateError) as caught:
                model(input_ids=ids, use_cache=False)
            assert caught.value.message.startswith("Zamba2Attention was called without a step")
        engine.step()
    assert [vars(module) for module in model.modules()] == before
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)


def test_two_engines_on_one_model_do_not_meet():
    requests = [Request(tokens(20, 1), max_new_tokens=6), Request(tokens(13, 2), max_new_tokens=6)]
    with WatchedEngine("mamba2") as first, WatchedEngine("mamba2") as second:
        handles = [first.submit(requests[0]), second.submit(requests[1])]
        while first.step() | second.step():
            pass
        first.check([(requests[0], handles[0].completion())])
        second.check([(requests[1], handles[1].completion())])


def refusal(model, spec=None):
    with pytest.raises(SpecError) as caught:
        HybridAdapter(model, spec or cache_spec(model.config.to_dict(), fingerprint="tiny"))
    return str(caught.value)


def test_what_cannot_be_attached_is_named():
    model = copy.deepcopy(hybrid_model("bamba"))
    before = model.config._attn_implementation
    other = cache_spec({**model.config.to_dict(), "attn_layer_indices": [3]}, fingerprint="tiny")
    assert refusal(model, other) == (
        "bamba: BambaAttention cannot be served: layer_idx=1 is not a layer of the spec\n"
        "hint: run this model with transformers' own generate, or write a plugin for its attention"
    )
    other = cache_spec({**model.config.to_dict(), "mamba_d_conv": 3}, fingerprint="tiny")
    assert refusal(model, other) == "layer 0: conv_weight [128, 4], expected [128, 3]"
    mixer = next(iter(recurrent_mixers(model).values()))
    del mixer.num_heads
    assert refusal(model) == (
        "bamba: BambaForCausalLM is not as this plugin knows it: 'BambaMixer' object has no attribute 'num_heads'\n"
        "hint: use transformers >= 5.24"
    )
    assert refusal(model.train()) == "bamba: the model is in training mode\nhint: call model.eval() first"
    assert model.config._attn_implementation == before
    model = copy.deepcopy(hybrid_model("mamba"))
    model.base_model.layers = model.base_model.layers[:2]
    assert refusal(model) == (
        "mamba: recurrent mixers ran for layers [0, 1], expected each of [0, 1, 2] once\n"
        "hint: the model and its config disagree about its layers"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_long_decode_does_not_drift(model_type):
    request = Request(tokens(12, 1), max_new_tokens=2000)
    overrides = {"max_position_embeddings": 4096} if "max_position_embeddings" in CONFIGS[model_type] else {}
    with WatchedEngine(model_type, overrides, memory=room(model_type, 2400, 3)) as engine:
        engine.run([request])
