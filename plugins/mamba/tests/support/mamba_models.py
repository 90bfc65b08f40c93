"""Tiny random models of every served family, and their mixers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvist_mamba import RecurrentInputs
from kvist_mamba.mixers import MIXERS, Finish, recurrent_mixers

_COMMON = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "hidden_size": 32}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "num_hidden_layers": 3, "conv_kernel": 4, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "num_hidden_layers": 3, "conv_kernel": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "num_hidden_layers": 3, "chunk_size": 8},
    "bamba": {**_ATTENTION, **_MAMBA2, "intermediate_size": 48, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "jamba": {
        **_ATTENTION,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        **_ATTENTION,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "head_dim": 8,
        "intermediate_size": 48,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon_h1": {
        **_ATTENTION,
        **_MAMBA2,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [1.0, 0.5, 2.0, 1.5, 0.75],
    },
    "zamba2": {
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 8,
        "intermediate_size": 48,
        "use_mem_rope": True,
    },
    "granitemoehybrid": {
        **_ATTENTION,
        **_MAMBA2,
        "intermediate_size": 24,
        "shared_intermediate_size": 24,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
    },
    "qwen3_next": {
        **_ATTENTION,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "lfm2": {
        **_ATTENTION,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}


@cache
def tiny_model(model_type: str) -> Any:
    """Float32, in eval mode, weights spread so that states and logits are not trivially small. Not to be changed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_COMMON, **CONFIGS[model_type]))
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
