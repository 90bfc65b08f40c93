"""A tiny random MiniMax-M3, for tests of several distributions."""

from __future__ import annotations

from typing import Any

import torch

FULL, SPARSE = "full_attention", "minimax_m3_sparse"


def build() -> Any:
    """Random weights. A query reads at most 12 keys of a sparse layer."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    torch.manual_seed(3)
    config = MiniMaxM3VLTextConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=24,
        dense_intermediate_size=40,
        shared_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=[FULL, SPARSE, SPARSE, SPARSE],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = MiniMaxM3VLForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model
