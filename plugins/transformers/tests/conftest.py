"""Tiny random models, their greedy tokens by transformers itself, and engines that are checked at every step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from kvist_transformers import Engine
from kvist_transformers.families import FAMILIES, Family

VOCABULARY = 97
MAX_TOKENS = 256

hf_logging.disable_progress_bar()

#: Beside the sizes below, what makes each model type's special attention take part.
SPECIAL: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 3, "moe_intermediate_size": 16},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"use_sliding_window": True, "no_rope_layer_interval": 2},
    "gemma2": {"tie_word_embeddings": False, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"tie_word_embeddings": False, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
    "vaultgemma": {"tie_word_embeddings": False, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"attention_multiplier": 0.4, "logits_scaling": 2.0},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "gemma": {"tie_word_embeddings": False},
    "gpt_neox": {"rotary_pct": 0.5},
}


#: Copies that no engine is ever attached to, by the id of the model.
_twins: dict[int, Any] = {}


@functools.cache
def _tiny(model_type: str, overrides: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_TOKENS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    if FAMILIES[model_type].layer_types is not Family().layer_types:
        # Others must not have it: transformers' default cache would obey it although their attention does not.
        sizes["sliding_window"] = 7
    arguments = {**sizes, **SPECIAL.get(model_type, {}), **dict(overrides)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **arguments)).eval()
    # Norm weights and sinks start at constants, which would hide mistakes.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    _twins[id(model)] = copy.deepcopy(model)
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """``tiny(model_type, **config)``: a small model with random weights, the same at each call."""
    return lambda model_type, **overrides: _tiny(model_type, tuple(sorted(overrides.items())))


_expected: dict[tuple[int, tuple[int, ...]], list[int]] = {}


@pytest.fixture
def greedy() -> Callable[[Any, Any, int], list[int]]:
    """``greedy(model, prompt, count)``: what transformers' generate answers with its default cache."""

    def answer(model: Any, prompt: Any, count: int) -> list[int]:
        key = (id(model), tuple(int(token) for token in prompt))
        if len(_expected.get(key, ())) < count:
            ids = torch.tensor([list(key[1])])
            output = _twins[id(model)].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
            _expected[key] = output[0, ids.shape[1] :].tolist()
        return _expected[key][:count]

    return answer


def make_hostile(engine: Engine, seed: int = 0) -> None:
    """Free pages are handed out in random order and hold NaN; the manager is checked before every step."""
    rng = np.random.default_rng(seed)
    begin = engine.backends.begin
    engine.manager.shuffle_free_pages(rng)

    def poisoned_begin(step: Any) -> None:
        engine.manager.check()
        for group in range(len(engine.layout.groups)):
            free = torch.from_numpy(engine.manager.free_pages(group)).long()
            # All ones is NaN in every float type.
            engine.memory.pages(group)[free] = 255
        begin(step)

    engine.backends.begin = poisoned_begin


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """``engines(model, **arguments)``: a hostile engine, closed at the end of the test."""
    opened: list[Engine] = []

    def build(model: Any, *, hostile: bool = True, **arguments: Any) -> Engine:
        engine = Engine(model, **{"memory": "2MiB", "max_batch_tokens": 64, "max_sequences": 8, **arguments})
        opened.append(engine)
        if hostile:
            make_hostile(engine)
        return engine

    yield build
    for engine in opened:
        engine.close()
        engine.manager.check()


@pytest.fixture
def prompts() -> Callable[..., list[np.ndarray]]:
    """``prompts(count, shared, seed)``: random prompts of which the first ``shared`` tokens are equal."""

    def build(count: int, shared: int = 0, longest: int = 40, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        prefix = rng.integers(1, VOCABULARY, shared)
        return [np.concatenate([prefix, rng.integers(1, VOCABULARY, rng.integers(1, longest))]) for _ in range(count)]

    return build
