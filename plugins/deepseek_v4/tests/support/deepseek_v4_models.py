"""A tiny random DeepSeek-V4 with every kind of layer, and what transformers itself computes, one sequence at a time."""

from __future__ import annotations

import functools
from typing import Any

import torch

VOCABULARY = 97
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
#: Ratio of the heavily compressed layers, twice the window; the sparse ones have 4.
HEAVY_RATIO = 16
LAYERS = [SLIDING, SPARSE, HEAVY, SPARSE, HEAVY]


@functools.cache
def tiny() -> Any:
    """The model that tests attach."""
    return build()


@functools.cache
def oracle() -> Any:
    """An equal one, which stays transformers' own."""
    return build()


def build() -> Any:
    """Equal at each call. What is zero in a new model is not here: sinks, position biases, routers."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        partial_rotary_factor=0.25,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        layer_types=LAYERS,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe", "moe"],
        compress_rates={SPARSE: 4, HEAVY: HEAVY_RATIO},
        sliding_window=8,
        o_groups=2,
        o_lora_rank=16,
        # With few heads the index's scores tie: what is not positive counts nothing.
        index_n_heads=16,
        index_head_dim=16,
        # Chooses from 16 tokens on.
        index_topk=3,
        hc_mult=2,
        hc_sinkhorn_iters=5,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        eos_token_id=None,
        pad_token_id=0,
    )
    model = DeepseekV4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)

    def noise(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                parameter.copy_(1 + 0.1 * noise(parameter.shape))
            elif "sinks" in name or "position_bias" in name:
                parameter.copy_(0.7 * noise(parameter.shape))
            elif name.endswith("base"):
                parameter.copy_(0.3 * noise(parameter.shape))
            elif parameter.ndim >= 2:
                parameter.copy_(noise(parameter.shape) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(0, config.n_routed_experts, buffer.shape, generator=generator))
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * noise(buffer.shape))
    model.generation_config.eos_token_id = None
    return model


def hidden(layer_id: int, count: int, seed: int) -> torch.Tensor:
    """Random hidden states of one sequence, ``[count, 64]``."""
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1000 * layer_id + seed))


def embeddings(model: Any, positions: torch.Tensor) -> dict[str, Any]:
    """Rope of both kinds for a flattened batch."""
    rotary, like = model.model.rotary_emb, torch.empty(1, len(positions), 64)
    return {kind: rotary(like, position_ids=positions[None], layer_type=kind) for kind in ("main", "compress")}


@torch.no_grad()
def layer_output(layer_id: int, states: torch.Tensor) -> torch.Tensor:
    """transformers' own attention of one layer over one whole sequence, without a cache, ``[count, 64]``."""
    model, positions = oracle(), torch.arange(len(states))
    distance = positions[:, None] - positions
    mask = torch.where((distance >= 0) & (distance < model.config.sliding_window), 0.0, -torch.inf)
    output = model.model.layers[layer_id].self_attn(
        states[None],
        position_embeddings=embeddings(model, positions),
        position_ids=positions[None],
        attention_mask=mask[None, None],
        cache=None,
    )
    return output[0][0]


_logits: dict[tuple[int, ...], torch.Tensor] = {}


@torch.inference_mode()
def model_logits(tokens: Any) -> torch.Tensor:
    """transformers' logits of one whole sequence without a cache, ``[count, vocabulary]``."""
    key = tuple(int(token) for token in tokens)
    if key not in _logits:
        _logits[key] = oracle()(input_ids=torch.tensor([key]), use_cache=False).logits[0]
    return _logits[key]
