"""What the tests of models in kvist-transformers' engine share. They bring the fixture ``model``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def asked(model: Any) -> list[tuple[np.ndarray, list[int]]]:
    """Prompts that share 37 tokens, with the greedy continuation by transformers' own cache, one at a time."""
    random = np.random.default_rng(0)
    shared = random.integers(2, 97, 37)
    pairs = []
    for count in (3, 50, 17, 31):
        prompt = np.concatenate([shared, random.integers(2, 97, count)])
        pairs.append((prompt, continued(model, prompt, 12)))
    return pairs


def continued(model: Any, prompt: np.ndarray, count: int) -> list[int]:
    """``count`` greedy tokens by transformers alone."""
    ids = torch.from_numpy(prompt)[None]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture(name="continued")
def _continued() -> Callable[[Any, np.ndarray, int], list[int]]:
    return continued


@pytest.fixture
def poisoned() -> Callable[[Any], Any]:
    """``poisoned(engine)``: its free pages come in random order and hold NaN at every step."""

    def poison(engine: Any) -> Any:
        begin = engine.backends.begin
        engine.manager.shuffle_free_pages(np.random.default_rng(1))

        def begin_poisoned(step: Any) -> None:
            engine.manager.check()
            for group in range(len(engine.layout.groups)):
                engine.memory.pages(group)[torch.from_numpy(engine.manager.free_pages(group)).long()] = 255
            begin(step)

        engine.backends.begin = begin_poisoned
        return engine

    return poison
