"""Drafts on every family of models: windows, compressed rows, index keys and states are taken back exactly.

What is expected is one forward of transformers over the whole sequence for every token, without any cache.
"""

from __future__ import annotations

import copy
from typing import Any

import deepseek_v4_models
import minimax_m3_models
import numpy as np
import pytest
import torch
from hybrid_models import hybrid_model

from kvist_transformers import Engine, PromptLookup, Request

NEW = 18
FAMILIES = {
    "deepseek_v4": deepseek_v4_models.build,
    "minimax_m3": minimax_m3_models.build,
    "mamba": lambda: copy.deepcopy(hybrid_model("mamba")),
    "mamba2": lambda: copy.deepcopy(hybrid_model("mamba2")),
    "falcon_h1": lambda: copy.deepcopy(hybrid_model("falcon_h1")),
    "qwen3_next": lambda: copy.deepcopy(hybrid_model("qwen3_next")),
    "lfm2": lambda: copy.deepcopy(hybrid_model("lfm2")),
}
#: Tokens per block where the family does not serve 16.
BLOCKS = {"minimax_m3": 4}


def answer(model: Any, prompt: np.ndarray) -> list[int]:
    """One token more than is generated, for the turn after."""
    tokens = torch.from_numpy(prompt).long()[None]
    with torch.inference_mode():
        for _ in range(NEW + 1):
            logits = model(input_ids=tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax().view(1, 1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


class Guesses:
    """Drafts of every length, right up to a random place."""

    vocab_size = None
    most = 7

    def __init__(self, whole: list[list[int]]) -> None:
        self._whole = whole
        self._rng = np.random.default_rng(0)

    def propose(self, rows: list[Any]) -> list[np.ndarray]:
        drafts = []
        for row in rows:
            start = len(row.tokens)
            [whole] = [each for each in self._whole if each[:start] == row.tokens.tolist()]
            draft = np.array(whole[start:][: self._rng.integers(0, row.most + 1)], np.int32)
            right = int(self._rng.integers(0, len(draft) + 1))
            draft[right : right + 1] = (draft[right : right + 1] + 1) % 90 + 2
            drafts.append(draft)
        return drafts

    def forget(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


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


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_drafts(family: str) -> None:
    model = FAMILIES[family]()
    rng = np.random.default_rng(4)
    shared = rng.integers(2, 60, 37)
    prompts = [np.concatenate([shared, rng.integers(2, 60, count)]).astype(np.int32) for count in (3, 50, 17, 31)]
    expected = [answer(model, prompt) for prompt in prompts]
    whole = [[*prompt.tolist(), *tokens[:NEW]] for prompt, tokens in zip(prompts, expected)]
    sizes = {"memory": "4MiB", "block_tokens": BLOCKS.get(family, 16), "max_batch_tokens": 40, "max_sequences": 4}
    requests = [Request(prompt, max_new_tokens=NEW) for prompt in prompts]
    for drafter in (Guesses(whole), PromptLookup(3, ngram=1)):
        with poisoned(Engine(model, **sizes, drafter=drafter)) as engine:
            for _ in range(2):
                done = engine.generate(requests)
                assert [each.tokens.tolist() for each in done] == [tokens[:NEW] for tokens in expected]
            if isinstance(drafter, Guesses):
                stats = engine.stats
                assert 0 < stats.accepted_tokens < stats.drafted_tokens
            # Another turn goes on from what drafts have left.
            [turn] = engine.generate([Request(np.array(whole[0], np.int32), max_new_tokens=1)])
            assert turn.reused_tokens >= len(prompts[0]) - 1
            assert turn.tokens.tolist() == expected[0][NEW:]
            engine.manager.check()
