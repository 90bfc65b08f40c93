"""Greedy tokens equal transformers' generate whatever the blocks, chunks, batches, evictions and cancellations.

Every engine here hands out shuffled pages, keeps NaN in pages that nobody owns, and is checked before each step.
"""

from __future__ import annotations

import numpy as np
import pytest
from everybody import Everybody

from kvist.layout import Layout
from kvist.restore import RestorePolicy
from kvist_transformers import Request, decoder_spec

MODELS = ["llama", "qwen2", "gemma3_text", "gpt_oss"]
BACKENDS = ["torch-reference", "cpu-torch", "cpu-native"]


def memory_for(tokens, spec):
    """Bytes in which about ``tokens`` tokens fit."""
    page_bytes = [group.content_bytes for group in Layout.build(spec, 1 << 30).groups]
    return -(-tokens // spec.block_tokens + 4) * sum(page_bytes)


def run(engine, requests, rng, *, cancel=()):
    """Submit at random times, with a random token budget for each step. Returns the handles."""
    handles = []
    pending = list(requests)
    while pending or not engine.idle:
        while pending and rng.random() < 0.4:
            handles.append(engine.submit(pending.pop(0)))
        for index in cancel:
            if index < len(handles) and len(handles[index].tokens) > 2:
                handles[index].cancel()
        engine.scheduler.max_batch_tokens = int(rng.integers(9, 40))
        engine.step()
    engine.manager.check()
    return handles


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", MODELS)
def test_blocks_chunks_and_ragged_batches(model_type, backend, block_tokens, tiny, greedy, engines, prompts):
    model = tiny(model_type)
    asked = prompts(6, shared=37, longest=70)
    expected = [greedy(model, prompt, 10) for prompt in asked]
    engine = engines(model, backend=backend, block_tokens=block_tokens, restore=RestorePolicy(every_blocks=1))
    rng = np.random.default_rng(block_tokens)
    for _ in range(2):
        handles = run(engine, [Request(prompt, max_new_tokens=10) for prompt in asked], rng)
        assert [handle.tokens.tolist() for handle in handles] == expected
    # The second round finds every prompt; models with windows may lose a restore point inside a block.
    for handle, prompt in zip(handles, asked):
        lost = len(prompt) - 1 - handle.completion().reused_tokens
        assert lost == 0 if model_type == "llama" else lost < block_tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", MODELS)
def test_prefix_hits_inside_a_block(model_type, backend, tiny, greedy, engines, prompts):
    """Turns that branch off at every position around a block's ends."""
    model = tiny(model_type)
    [base] = prompts(1, shared=40, seed=1)
    engine = engines(model, backend=backend, block_tokens=8, restore=RestorePolicy(every_blocks=1))
    engine.generate([Request(base, max_new_tokens=2)])
    for length in range(12, 30):
        branch = np.concatenate([base[:length], (base[length : length + 9] + 1) % 96 + 1])
        expected = greedy(model, branch, 4)
        [completion] = engine.generate([Request(branch, max_new_tokens=4)])
        assert completion.tokens.tolist() == expected
        # Models with windows resume where their tails were kept: at block boundaries.
        assert (
            completion.reused_tokens == length if model_type == "llama" else completion.reused_tokens >= length // 8 * 8
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", MODELS)
def test_eviction_and_pauses_under_pressure(model_type, backend, tiny, greedy, engines, prompts):
    """Room for about two of the requests: the others' pages are evicted and running ones are recomputed."""
    model = tiny(model_type)
    asked = prompts(7, shared=10, longest=60, seed=2)
    expected = [greedy(model, prompt, 24) for prompt in asked]
    longest = max(len(prompt) for prompt in asked) + 24
    # Models with windows keep a part of each request only.
    memory = memory_for(
        2 * longest if model_type == "llama" else longest, decoder_spec(model.config.to_dict(), block_tokens=4)
    )
    engine = engines(model, backend=backend, block_tokens=4, memory=memory, admission=Everybody())
    handles = run(engine, [Request(prompt, max_new_tokens=24) for prompt in asked], np.random.default_rng(0))
    assert [handle.tokens.tolist() for handle in handles] == expected
    stats = engine.manager.stats()
    assert sum(group.evicted for group in stats.groups) > 0
    # Whoever was paused does not come back before there is room, to be paused again.
    assert 0 < engine.stats.pauses <= 3 * len(asked)
    assert stats.open_sequences == 0


@pytest.mark.parametrize("model_type", MODELS)
def test_cancellation_leaves_the_others_alone(model_type, tiny, greedy, engines, prompts):
    model = tiny(model_type)
    asked = prompts(6, shared=20, seed=3)
    expected = [greedy(model, prompt, 12) for prompt in asked]
    engine = engines(model, block_tokens=4)
    requests = [Request(prompt, max_new_tokens=12) for prompt in asked]
    handles = run(engine, requests, np.random.default_rng(1), cancel=(1, 4))
    for index, handle in enumerate(handles):
        completion = handle.completion()
        assert completion.finish_reason == ("cancelled" if index in (1, 4) else "length")
        assert completion.tokens.tolist() == expected[index][: len(completion.tokens)]
    assert engine.manager.stats().open_sequences == 0
    # What the cancelled ones computed is reused.
    [again] = engine.generate([requests[1]])
    assert again.tokens.tolist() == expected[1]
    assert again.reused_tokens == len(asked[1]) - 1


def test_multi_turn_reuses_the_whole_history(tiny, greedy, engines, prompts):
    model = tiny("llama")
    [history] = prompts(1, shared=30)
    engine = engines(model, block_tokens=16)
    previous = 0
    for turn in range(4):
        expected = greedy(model, history, 9)
        [completion] = engine.generate([Request(history, max_new_tokens=9)])
        assert completion.tokens.tolist() == expected
        # All but the last generated token, whose row was never computed.
        assert completion.reused_tokens == max(previous - 1, 0)
        previous = len(history) + 9
        history = np.concatenate([history, completion.tokens, [turn + 1, 5, 7]])


@pytest.mark.parametrize("budget", [16, 512])
def test_concurrent_requests_share_a_prefix_that_is_being_computed(budget, tiny, engines, prompts):
    asked = prompts(5, shared=50)
    engine = engines(tiny("llama"), block_tokens=8, max_batch_tokens=budget)
    completions = engine.generate([Request(prompt, max_new_tokens=3) for prompt in asked])
    assert completions[0].reused_tokens == 0
    assert all(completion.reused_tokens >= 48 for completion in completions[1:])


def test_scopes_share_nothing(tiny, engines, prompts):
    from kvist.spec import Scope

    [prompt] = prompts(1, shared=40)
    engine = engines(tiny("llama"))
    engine.generate([Request(prompt, max_new_tokens=2, scope=Scope(salt="a"))])
    completions = engine.generate([Request(prompt, max_new_tokens=2, scope=Scope(salt=salt)) for salt in ("a", "b")])
    assert [completion.reused_tokens for completion in completions] == [len(prompt) - 1, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(dtype, tiny, engines, prompts):
    """Greedy tokens of low precision differ between any two code paths; the first few may be compared by logits."""
    import copy

    import torch

    model = copy.deepcopy(tiny("llama")).to(getattr(torch, dtype))
    [prompt] = prompts(1, shared=20)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(prompt)[None], use_cache=False).logits[0, -1].float()
    engine = engines(model)
    [completion] = engine.generate([Request(prompt, max_new_tokens=1)])
    assert logits[completion.tokens[0]] >= logits.max() - 0.1
