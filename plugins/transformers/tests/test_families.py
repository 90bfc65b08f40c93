"""Every model type that the plugin claims to serve gives transformers' own greedy tokens."""

from __future__ import annotations

import pytest

from kvist.restore import RestorePolicy
from kvist_transformers import Request
from kvist_transformers.families import FAMILIES


@pytest.mark.parametrize("backend", ["torch-reference", "cpu-native"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_greedy_tokens_equal_generate(model_type, backend, tiny, greedy, engines, prompts):
    model = tiny(model_type)
    asked = prompts(4, shared=21)
    expected = [greedy(model, prompt, 12) for prompt in asked]
    engine = engines(
        model,
        backend=backend,
        block_tokens=8,
        max_batch_tokens=24,
        max_sequences=4,
        restore=RestorePolicy(every_blocks=1),
    )
    completions = engine.generate([Request(prompt, max_new_tokens=12) for prompt in asked])
    assert [completion.tokens.tolist() for completion in completions] == expected
    assert engine.stats.reused_tokens >= 3 * 16
    # A random model that repeats one token would prove nothing.
    assert len({token for tokens in expected for token in tokens}) > 8
