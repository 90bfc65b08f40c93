"""The values of transformers' own GPT-OSS layers, over pages and in chunks."""

from __future__ import annotations

import pytest
import torch

from kvist import Layout, PagedCacheManager, Run, SpecError
from kvist.attention.base import BackendContext
from kvist.memory.device import DeviceMemory
from kvist_gpt_oss_sinks.attention import SinkBackend, SinkInputs
from kvist_gpt_oss_sinks.spec import cache_spec

TOKENS = 30
CHUNKS = (13, 1, 1, 9, 6)


def test_layers_of_transformers_give_the_same():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    torch.manual_seed(0)
    config = gpt_oss.GptOssConfig(
        hidden_size=32, num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
        sliding_window=7, vocab_size=100, attn_implementation="eager",
    )  # fmt: skip
    hidden = torch.randn(1, TOKENS, config.hidden_size)
    rotary = gpt_oss.GptOssRotaryEmbedding(config)
    cos, sin = rotary(hidden, torch.arange(TOKENS)[None])
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    layers, inputs, expected = [], [], []
    for number, kind in enumerate(config.layer_types):
        layer = gpt_oss.GptOssAttention(config, number).eval()
        torch.nn.init.normal_(layer.sinks)
        window = config.sliding_window if kind == "sliding_attention" else TOKENS
        mask = torch.zeros(TOKENS, TOKENS).masked_fill((distance < 0) | (distance >= window), float("-inf"))
        with torch.no_grad():
            expected.append(layer(hidden, (cos, sin), mask)[0][0])
            query, key, value = (
                project(hidden).view(1, TOKENS, -1, config.head_dim).transpose(1, 2)
                for project in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            query, key = gpt_oss.apply_rotary_pos_emb(query, key, cos, sin)
        inputs.append([each[0].transpose(0, 1) for each in (query, key, value)])
        layers.append(layer)

    spec = cache_spec(config.to_dict(), block_tokens=4, dtype="float32")
    memory = DeviceMemory(Layout.build(spec, 1 << 20, SinkBackend.page_layout(spec)))
    manager = PagedCacheManager(memory.layout)
    backend = SinkBackend(BackendContext(memory))
    sequence = manager.open(list(range(TOKENS)))
    outputs = [[], []]
    for count in CHUNKS:
        first = sequence.computed
        step = manager.plan([Run(sequence, count)]).commit()
        memory.apply(step)
        backend.begin(step)
        for number, layer in enumerate(layers):
            chunk = SinkInputs(*(each[first : first + count] for each in inputs[number]), layer.sinks.detach())
            outputs[number].append(backend.forward(number, chunk).flatten(1))
        memory.save(step)
        manager.complete(step)
    for number, layer in enumerate(layers):
        got = layer.o_proj(torch.cat(outputs[number])).detach()
        torch.testing.assert_close(got, expected[number], rtol=1e-5, atol=1e-5)
    assert {group.name for group in memory.layout.groups} == {"target/History()", "target/Window(tokens=7, sinks=0)"}


def test_another_kind_of_layer_is_refused():
    with pytest.raises(SpecError) as error:
        cache_spec(
            {
                "num_key_value_heads": 1,
                "head_dim": 8,
                "layer_types": ["chunked_attention"],
                "sliding_window": 4,
                "vocab_size": 9,
            }
        )
    assert str(error.value) == (
        "layer 0 is 'chunked_attention'\nhint: layer_types are full_attention, sliding_attention"
    )
