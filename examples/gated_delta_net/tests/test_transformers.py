"""The values of transformers' own Qwen3-Next layer, over pages and in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvist import Layout, PagedCacheManager, Run
from kvist.attention.base import BackendContext
from kvist.memory.device import DeviceMemory
from kvist_gated_delta_net.attention import GatedDeltaBackend, GatedDeltaInputs
from kvist_gated_delta_net.spec import CONV, MEMORY, cache_spec

TOKENS = 30
CHUNKS = (13, 1, 1, 9, 6)


def test_a_layer_of_transformers_gives_the_same():
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    config = qwen.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], vocab_size=100,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_conv_kernel_dim=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    layer = qwen.Qwen3NextGatedDeltaNet(config, 0).eval()
    hidden = torch.randn(1, TOKENS, config.hidden_size)
    with torch.no_grad():
        expected = layer(hidden)[0]
        query, key, value, gate, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        )
    mixed = torch.cat([each.flatten(2) for each in (query, key, value)], dim=2)[0]
    decay = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias))[0].detach()
    beta, weight = b.sigmoid()[0], layer.conv1d.weight[:, 0].detach()

    spec = cache_spec(config.to_dict(), block_tokens=8, dtype="float32")
    memory = DeviceMemory(Layout.build(spec, 1 << 20))
    manager = PagedCacheManager(memory.layout)
    # The core's backends serve the other layers of the same cache.
    backend = GatedDeltaBackend(BackendContext(memory, spec.only({CONV, MEMORY})))
    sequence = manager.open(list(range(TOKENS)))
    outputs = []
    for count in CHUNKS:
        here = slice(sequence.computed, sequence.computed + count)
        step = manager.plan([Run(sequence, count)]).commit()
        memory.apply(step)
        backend.begin(step)
        outputs.append(backend.forward(0, GatedDeltaInputs(mixed[here], decay[here], beta[here], weight)))
        memory.save(step)
        manager.complete(step)
    with torch.no_grad():
        normed = layer.norm(torch.cat(outputs).flatten(0, 1), gate.flatten(0, 2))
        got = layer.out_proj(normed.view(TOKENS, -1))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
