"""The contract of attention backends, tried on this one."""

from __future__ import annotations

import torch

from kvist import CacheSpec, Layer, Window
from kvist.testing.attention import AttentionBackendTests, Case
from kvist_gpt_oss_sinks.attention import SinkBackend, SinkInputs
from kvist_gpt_oss_sinks.spec import cache_spec


def spec(dtype: str, block_tokens: int) -> CacheSpec:
    """Two layers of each kind, a window that ends inside a block."""
    config = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 11,
        "vocab_size": 1000,
    }
    return cache_spec(config, block_tokens=block_tokens, dtype=dtype)


class TestSinkBackend(AttentionBackendTests):
    backend = SinkBackend
    cases = (
        Case(name="float32", spec=spec("float32", 8)),
        Case(name="bfloat16", spec=spec("bfloat16", 16), dtype="bfloat16"),
    )
    constants = frozenset({"sinks"})

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> SinkInputs:
        def draw(heads: int) -> torch.Tensor:
            return torch.randn(token_count, heads, 16, generator=generator).to(getattr(torch, case.dtype))

        return SinkInputs(draw(6), draw(2), draw(2), torch.linspace(-2, 3, 6))

    def reference(self, case: Case, layer: Layer, inputs: SinkInputs) -> torch.Tensor:
        """One head after the other: the sink's share of the softmax goes nowhere."""
        retention = layer.streams[0].retention
        distance = torch.arange(len(inputs.query))[:, None] - torch.arange(len(inputs.query))[None, :]
        visible = distance >= 0
        if isinstance(retention, Window):
            visible &= distance < retention.tokens
        output = torch.empty_like(inputs.query)
        for head in range(6):
            weights = torch.exp(inputs.query[:, head] @ inputs.key[:, head // 3].T / 4) * visible
            total = weights.sum(1, keepdim=True) + torch.exp(inputs.sinks[head])
            output[:, head] = weights / total @ inputs.value[:, head // 3]
        return output
