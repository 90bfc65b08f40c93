"""Tiny random models of every served family, and their mixers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvist_mamba import RecurrentInputs
from kvist_mamba.mixers import MIXERS, Finish, recurrent_mixers
from kvist_mamba.tiny import COMMON, CONFIGS

#: Of every model, beside its own.
FIELDS = {**COMMON, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


@cache
def tiny_model(model_type: str) -> Any:
    """Float32, in eval mode, weights spread so that states and logits are not trivially small. Not to be changed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **FIELDS, **CONFIGS[model_type]))
    for name, parameter in model.named_parameters():
        kept = "embed" in name or "conv" in name or "A_log" in name
        if parameter.dim() >= 2 and not kept and parameter.std() < 0.05:
            parameter.data.mul_(4.0)
    return model.eval().requires_grad_(False)


def mixers(model: Any) -> dict[int, Any]:
    """The recurrent mixers of a model by their layer's number."""
    return recurrent_mixers(model)


def prepare(mixer: Any, hidden: torch.Tensor) -> tuple[RecurrentInputs, Finish]:
    """A backend's inputs for hidden states ``[T, hidden size]``, and what makes the layer's output of its value."""
    # transformers.models.<model type>.modeling_<model type>
    _, prepared = MIXERS[type(mixer).__module__.split(".")[2]]
    return prepared(mixer, hidden)
