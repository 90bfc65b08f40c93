"""Tiny models with decisive logits, twins that no adapter ever touches, and what transformers computes with them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from mamba_models import FIELDS
from transformers import AutoConfig, AutoModelForCausalLM

from kvist_mamba.tiny import COMMON, CONFIGS

FAMILIES = sorted(CONFIGS)
#: One of each kind of mixer, and one whose layers have a mixer and attention.
SOME = ("falcon_h1", "jamba", "lfm2", "mamba2", "qwen3_next")
#: By how much weights are spread, so that states are not trivially small. With larger ones some heads of the delta net
#: put out next to nothing before they are normed, and transformers' own two ways to compute it differ by 2e-5.
_SPREAD = {"qwen3_next": 2.0}
VOCABULARY = COMMON["vocab_size"]


@cache
def _model(model_type: str, overrides: tuple[tuple[str, Any], ...], which: str) -> Any:
    # Lists, which cannot be keys, come as tuples.
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in overrides}
    config = AutoConfig.for_model(model_type, **{**FIELDS, **CONFIGS[model_type], **fields})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and parameter.std() < 0.05 and "embed" not in name and "conv" not in name:
                parameter.data.mul_(_SPREAD.get(model_type, 4.0))
            # No constant that would hide a mistake.
            elif parameter.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        # Tied weights would make a tiny model repeat its last token.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model.eval().requires_grad_(False)


def hybrid_model(model_type: str, **overrides: Any) -> Any:
    """A float32 model for adapters to attach to; the same object at each call."""
    return _model(model_type, tuple(sorted(overrides.items())), "attached")


def expected_logits(model_type: str, tokens: np.ndarray, **overrides: Any) -> torch.Tensor:
    """``[tokens, vocabulary]`` of a whole sequence in one forward of transformers' own, without any cache.

    This is the path on which transformers is right in every family: its Mamba layers forget their state when several
    tokens continue a cached sequence, and its Mamba-2 layers do not limit time steps when a single one does.
    """
    return _expected(model_type, tuple(sorted(overrides.items())), tuple(int(token) for token in tokens))


@cache
def _expected(model_type: str, overrides: tuple[tuple[str, Any], ...], tokens: tuple[int, ...]) -> torch.Tensor:
    model = _model(model_type, overrides, "twin")
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return model(input_ids=ids, position_ids=torch.arange(len(tokens))[None], use_cache=False).logits[0]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference beside the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def tokens(count: int, seed: int = 0) -> np.ndarray:
    """Random token ids, none of them the padding's."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).astype(np.int32)
