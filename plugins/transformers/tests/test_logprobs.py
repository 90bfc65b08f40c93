"""Logarithms of probabilities are those of one forward of transformers, with drafts and after pauses too."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from kvist.errors import RequestError
from kvist.scheduling import Watermark
from kvist_transformers import PromptLookup, Request, Sampling
from kvist_transformers.request import MOST_LOGPROBS


@pytest.mark.parametrize(
    "arguments", [{}, {"drafter": PromptLookup()}, {"memory": "64KiB", "block_tokens": 4, "admission": Watermark(0)}]
)
def test_each_token_has_its_own(arguments, tiny, engines):
    model = tiny("llama")
    # A copy: an engine owns the model's attention.
    twin = copy.deepcopy(model)
    engine = engines(model, **arguments)
    # Repetitive, so that drafts are made, and some of them wrong.
    prompts = [[5, 6, 7, 8] * 4, [9, 9, 9, 4] * 3, list(range(10, 40)), [3, 4, 5] * 6]
    wishes = [0, 4, None, MOST_LOGPROBS]
    requests = [
        Request(prompt, max_new_tokens=24, logprobs=wish, sampling=Sampling(temperature=0.3, seed=number))
        for number, (prompt, wish) in enumerate(zip(prompts, wishes))
    ]
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    if "memory" in arguments:
        assert engine.stats.pauses > 0
    if "drafter" in arguments:
        assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    for handle, request in zip(handles, requests):
        tokens = handle.tokens.tolist()
        if request.logprobs is None:
            assert handle.logprobs == []
            continue
        with torch.inference_mode():
            logits = twin(torch.tensor([[*request.tokens.tolist(), *tokens]])).logits[0]
        expected = torch.log_softmax(logits.float(), dim=-1)[len(request.tokens) - 1 : -1]
        assert len(handle.logprobs) == len(tokens) == 24
        for row, token, found in zip(expected, tokens, handle.logprobs):
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
            values, ids = row.topk(request.logprobs)
            assert [each for each, _ in found.top] == ids.tolist()
            np.testing.assert_allclose([value for _, value in found.top], values.numpy(), atol=1e-4)


def test_too_many_are_refused():
    with pytest.raises(RequestError) as raised:
        Request([1], logprobs=21)
    assert str(raised.value) == "logprobs=21 must be in 0 .. 20"
