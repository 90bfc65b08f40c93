"""Configs become specs: the same layers and shapes that transformers' own models have, without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoConfig

from kvist.errors import SpecError
from kvist.spec import Heads, History, Sections, State
from kvist_mamba import cache_spec
from kvist_mamba.families import FAMILIES


def shapes(spec):
    return {layer.id: {stream.name: stream.row.shape for stream in layer.streams} for layer in spec.layers}


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_omitted_fields_mean_what_they_mean_in_transformers(model_type):
    """A config.json may leave out what the config class derives or has a default for."""
    full = AutoConfig.for_model(model_type).to_dict()
    derived = cache_spec(full, fingerprint="same")
    assert cache_spec({"model_type": model_type}, fingerprint="same") == derived
    types = AutoConfig.for_model(model_type).layer_types
    kept = {index: kind for index, kind in enumerate(types) if kind not in ("mlp", "moe")}
    names = {
        "linear_attention": {"conv_state", "recurrent_state"},
        "full_attention": {"k", "v"},
        "hybrid": {"conv_state", "recurrent_state", "k", "v"},
    }
    assert {layer: set(streams) for layer, streams in shapes(derived).items()} == {
        index: names[kind] for index, kind in kept.items()
    }


def test_sizes_and_sharding_of_a_mamba2_hybrid():
    """Nemotron-H: x of 128 heads of 64, B and C of 8 groups of 128; the last 3 inputs of a convolution of 4."""
    spec = cache_spec({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"}, dtype="bfloat16")
    assert shapes(spec) == {
        0: {"conv_state": (8192 + 2 * 1024, 3), "recurrent_state": (128, 64, 128)},
        2: {"k": (8, 128), "v": (8, 128)},
    }
    conv, state = spec.layers[0].streams
    assert (conv.row.row_bytes, state.row.row_bytes) == (61440, 4 << 20)
    assert (conv.sharding, state.sharding) == (Sections((8192, 1024, 1024)), Heads(128))
    assert (conv.retention, state.retention, spec.layers[1].streams[0].retention) == (State(), State(), History())
    assert sum(stream.row.row_bytes for stream in spec.layers[1].streams) == 4096
    assert (spec.max_tokens, spec.vocab_size) == (4096, 131072)


def test_sizes_and_sharding_of_a_delta_net():
    """Qwen3-Next: q and k of 16 heads of 128, v of 32 heads of 128."""
    spec = cache_spec({"model_type": "qwen3_next"}, dtype="bfloat16", state_dtype="bfloat16")
    conv, state = spec.layers[0].streams
    assert (conv.row.shape, state.row.shape) == ((8192, 3), (32, 128, 128))
    assert (conv.row.row_bytes, state.row.row_bytes) == (49152, 1 << 20)
    assert (conv.sharding, state.sharding) == (Sections((2048, 2048, 4096)), Heads(32))
    assert [layer.id for layer in spec.layers if layer.streams[0].name == "k"] == list(range(3, 48, 4))


def test_sizes_of_mamba_and_of_short_convolutions():
    spec = cache_spec({"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64}, dtype="bfloat16")
    assert len(spec.layers) == 64 and spec.max_tokens is None
    assert [stream.row.row_bytes for stream in spec.layers[0].streams] == [30720, 320 << 10]
    # Falcon Mamba's configs say expand=16, and mean their intermediate_size.
    spec = cache_spec({"model_type": "falcon_mamba", "hidden_size": 4096, "expand": 16, "intermediate_size": 8192})
    assert spec.layers[0].streams[0].row.shape == (8192, 3)
    spec = cache_spec({"model_type": "lfm2", "num_hidden_layers": 3, "full_attn_idxs": [1]})
    assert shapes(spec) == {0: {"conv_state": (2560, 2)}, 1: {"k": (8, 80), "v": (8, 80)}, 2: {"conv_state": (2560, 2)}}


@pytest.mark.parametrize("long", [False, True])
def test_the_longest_sequence_of_zamba2_depends_on_its_context(long):
    config = AutoConfig.for_model("zamba2", use_long_context=long)
    raw = {"model_type": "zamba2", "use_long_context": long, "max_position_embeddings": 4096}
    assert cache_spec(raw).max_tokens == cache_spec(config.to_dict()).max_tokens == config.max_position_embeddings


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "the config has no model_type\nhint: served are " + ", ".join(sorted(FAMILIES))),
        ({"model_type": "mamba", "state_size": 0}, "mamba: config field 'state_size' must be a positive int, got 0"),
        (
            {"model_type": "mamba", "conv_kernel": 1},
            "mamba: a convolution of width 1 keeps nothing\nhint: it must be wider",
        ),
        (
            {"model_type": "mamba2", "hidden_act": "gelu"},
            "mamba2: hidden_act='gelu' is not served\nhint: the mixers' convolutions are computed with 'silu'",
        ),
        (
            {"model_type": "mamba2", "num_heads": 64},
            "mamba2: 64 heads of 64 channels are not expand * hidden_size=8192",
        ),
        (
            {"model_type": "bamba", "mamba_n_groups": 3},
            "bamba: mamba_n_groups=3 does not divide the number of heads=128",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
            "nemotron_h: layer 1 is of type 'X', which is not served\n"
            "hint: served are 'linear_attention', 'full_attention', 'hybrid', 'mlp' and 'moe'",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba"]},
            "granitemoehybrid: layer_types has 1 entries for num_hidden_layers=32",
        ),
        (
            {"model_type": "lfm2", "rope_scaling": {"rope_type": "dynamic"}},
            "lfm2: rope_scaling of type 'dynamic' is not served\n"
            "hint: it changes the keys of all positions when a sequence grows, and cached ones would not match",
        ),
        (
            {"model_type": "falcon_h1", "num_key_value_heads": 5},
            "falcon_h1: num_key_value_heads=5 does not divide num_attention_heads=32\n"
            "hint: every key head serves the same number of query heads",
        ),
    ],
)
def test_what_cannot_be_served_is_named(config, text):
    with pytest.raises(SpecError) as error:
        cache_spec(config)
    assert str(error.value) == text


def test_a_state_dtype_that_cannot_be_served_is_named():
    with pytest.raises(SpecError) as error:
        cache_spec({"model_type": "mamba"}, state_dtype="float8_e4m3fn")
    assert str(error.value) == (
        "mamba: recurrent states in 'float8_e4m3fn' are not served\n"
        "hint: state_dtype is one of float32, bfloat16, float64"
    )


def test_fingerprints_tell_configs_and_dtypes_apart():
    config = {"model_type": "mamba"}
    prints = {
        cache_spec(config).fingerprint,
        cache_spec(config, dtype="bfloat16").fingerprint,
        cache_spec(config, state_dtype="bfloat16").fingerprint,
        cache_spec({**config, "state_size": 32}).fingerprint,
    }
    assert len(prints) == 4
    assert cache_spec({**config, "use_cache": False}).fingerprint == cache_spec(config).fingerprint


def test_a_spec_needs_no_torch():
    script = (
        "import sys; from kvist_mamba import cache_spec; cache_spec({'model_type': 'jamba'});"
        "print(sorted({'torch', 'triton', 'transformers'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
