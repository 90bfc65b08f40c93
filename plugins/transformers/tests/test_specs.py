"""Configs become specs: the same windows and heads that transformers derives, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from kvist.errors import SpecError
from kvist.spec import History, Window
from kvist_transformers.families import FAMILIES
from kvist_transformers.specs import decoder_spec

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 256,
    "vocab_size": 97,
}


def windows(spec):
    return [getattr(layer.streams[0].retention, "tokens", None) for layer in spec.layers]


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_omitted_fields_mean_what_they_mean_in_transformers(model_type):
    """A raw config.json may leave out what the config class derives."""
    raw = {**LLAMA, "model_type": model_type, "num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 64}
    raw |= {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 3}
    check(raw, model_type)
    # Whatever the class has a default for may be missing.
    for field in ("sliding_window", "use_sliding_window", "max_window_layers"):
        raw.pop(field)
        check(raw, model_type)
    if model_type not in {"qwen2", "qwen2_moe", "qwen3", "helium", "exaone4", "gemma"}:  # 4 heads cannot share as many
        raw.pop("num_key_value_heads")
        check(raw | {"num_attention_heads": 8}, model_type)


def check(raw, model_type):
    full = AutoConfig.for_model(**raw).to_dict()
    derived = decoder_spec(full, fingerprint="same")
    assert decoder_spec(raw, fingerprint="same") == derived
    listed = full.get("layer_types")
    if FAMILIES[model_type].lists_layers and listed:
        assert [window is not None for window in windows(derived)] == [kind == "sliding_attention" for kind in listed]


def test_llama():
    spec = decoder_spec(LLAMA)
    assert [layer.id for layer in spec.layers] == [0, 1]
    key, value = spec.layers[0].streams
    assert (key.name, value.name) == ("k", "v")
    assert (key.row.shape, key.row.dtype, key.retention, key.sharding.count) == ((2, 8), "float32", History(), 2)
    assert (spec.block_tokens, spec.max_tokens, spec.vocab_size) == (16, 256, 97)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 5}, [5, 5]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("mistral", {}, [4096, 4096]),
        ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, [None, None]),
        ("gpt_oss", {"sliding_window": 5}, [5, None]),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2}, [5, None]),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 0}, [None, None]),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, [None, 5]),
        (
            "qwen3",
            {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            [5, None],
        ),
    ],
)
def test_windows(model_type, fields, expected):
    spec = decoder_spec({**LLAMA, "model_type": model_type, **fields})
    assert windows(spec) == expected
    assert all(isinstance(layer.streams[0].retention, History | Window) for layer in spec.layers)


def test_dtype_and_fingerprint():
    assert decoder_spec({**LLAMA, "torch_dtype": "bfloat16"}).layers[0].streams[0].row.dtype == "bfloat16"
    assert decoder_spec({**LLAMA, "dtype": "torch.float16"}).layers[0].streams[0].row.dtype == "float16"
    assert decoder_spec(LLAMA, dtype="float16").layers[0].streams[0].row.dtype == "float16"
    assert decoder_spec(LLAMA).fingerprint == decoder_spec({**LLAMA, "use_cache": False}).fingerprint
    assert decoder_spec(LLAMA).fingerprint != decoder_spec(LLAMA, dtype="float16").fingerprint
    assert decoder_spec(LLAMA).fingerprint != decoder_spec({**LLAMA, "rms_norm_eps": 1e-3}).fingerprint


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, 256),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32}, 32),
        ({"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 128}}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 256),
    ],
)
def test_rotations_that_depend_on_the_length_limit_it(rope, limit):
    assert decoder_spec({**LLAMA, "model_type": "phi3", **rope}).max_tokens == limit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "the config has no model_type"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not served"),
        ({"num_hidden_layers": None}, "llama: config field 'num_hidden_layers' is missing"),
        ({"num_hidden_layers": 0}, "llama: config field 'num_hidden_layers' must be a positive int, got 0"),
        ({"num_attention_heads": "4"}, "llama: config field 'num_attention_heads' must be a positive int, got '4'"),
        ({"num_key_value_heads": 3}, "llama: num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"hidden_size": 30}, "llama: hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"vocab_size": 0}, "llama: config field 'vocab_size' must be a positive int, got 0"),
        ({"head_dim": -8}, "llama: config field 'head_dim' must be a positive int, got -8"),
        ({"is_encoder_decoder": True}, "llama: cross-attention is not served"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "gemma3_text: use_bidirectional_attention=True: only causal attention can be cached",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "qwen2: layer_types has 1 entries for num_hidden_layers=2",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]},
            "qwen2: layer_types[1] is 'linear_attention', which is not served",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"]},
            "qwen2: layer_types[0] is 'sliding_attention' but there is no sliding_window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "mistral: config field 'sliding_window' must be a positive int, got 0",
        ),
        (
            {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}},
            "phi3: rope type 'longrope' needs config field 'original_max_position_embeddings'",
        ),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(SpecError) as caught:
        decoder_spec({**LLAMA, **change})
    assert caught.value.message == message


def test_a_multimodal_config_points_to_its_text_config():
    with pytest.raises(SpecError) as caught:
        decoder_spec({"model_type": "gemma3", "text_config": LLAMA})
    assert str(caught.value) == (
        "model_type 'gemma3' is not served\nhint: this is a multimodal config; its text model is under 'text_config'"
    )


def test_light_imports():
    """Replaying a trace with a config.json must not import torch or transformers."""
    code = (
        "import json, sys\n"
        "import kvist_transformers.plugin\n"
        "[info] = kvist_transformers.plugin.kvist_cache_managers()\n"
        "from kvist_transformers import decoder_spec\n"
        f"decoder_spec(json.loads({json.dumps(LLAMA)!r}))\n"
        "loaded = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
