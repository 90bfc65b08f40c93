"""The served model types: which of their layers keep what, and how large it is. Imports neither torch nor transformers.

What a config leaves out has the default of transformers' config class: a saved ``config.json`` omits what equals it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvist.errors import SpecError
from kvist_mamba.config import Config, expanded, parts, positive

#: Layer types, in transformers' words. HYBRID has a mixer and attention, NOTHING keeps nothing.
RECURRENT, FULL, HYBRID, NOTHING = "linear_attention", "full_attention", "hybrid", "nothing"
#: Other words for them in configs.
_SPELLINGS = {"mamba": RECURRENT, "conv": RECURRENT, "attention": FULL, "mlp": NOTHING, "moe": NOTHING}
#: The letters of Nemotron-H's ``hybrid_override_pattern``.
_LETTERS = {"M": RECURRENT, "*": FULL, "-": NOTHING, "E": NOTHING}


@attrs.frozen
class Mixer:
    """Sizes of one recurrent layer.

    sections: channels of the convolution, in the parts that are split over tensor-parallel ranks apart.
    kernel: its width ``K``.
    state: shape of the recurrent state, ``None`` for a mixer that is a convolution only.
    heads: is axis 0 of the state heads? Otherwise it is channels.
    gates: inputs beside the convolution's, one number per head each.
    """

    sections: tuple[int, ...]
    kernel: int
    state: tuple[int, ...] | None
    heads: bool = True
    gates: int = 0


@attrs.frozen
class Family:
    """One model type.

    mixer: sizes of its recurrent layers. layer_types: one type for each layer. head_size: of its attention.
    activation: config field of the mixer's activation, ``None`` where it is no choice.
    defaults: config fields that may be missing.
    """

    mixer: Callable[[Config], Mixer]
    layer_types: Callable[[Config], list[str]]
    defaults: dict[str, Any]
    head_size: Callable[[Config], int]
    activation: str | None = "hidden_act"


def _mamba1(config: Config, channels: int, state: str, kernel: str) -> Mixer:
    return Mixer((channels,), positive(config, kernel), (channels, positive(config, state)), heads=False)


def _pure_mamba1(config: Config) -> Mixer:
    # A config that says both has the last word on the product (Falcon Mamba's say expand=16 and mean 2).
    both = config.get("intermediate_size") is not None
    channels = positive(config, "intermediate_size") if both else expanded(config, "expand")
    return _mamba1(config, channels, "state_size", "conv_kernel")


def _jamba(config: Config) -> Mixer:
    return _mamba1(config, expanded(config, "mamba_expand"), "mamba_d_state", "mamba_d_conv")


def _heads(config: Config, heads: int, size: int, groups: str, state: str, kernel: str) -> Mixer:
    """Mamba-2: ``heads`` of ``size`` channels, and ``groups`` of B and C."""
    parts(config, heads, "the number of heads", groups)
    columns = positive(config, state)
    shared = positive(config, groups) * columns
    return Mixer((heads * size, shared, shared), positive(config, kernel), (heads, size, columns), gates=1)


def _require_product(config: Config, heads: int, size: int, width: int, name: str) -> None:
    if heads * size != width:
        raise SpecError(f"{config['model_type']}: {heads} heads of {size} channels are not {name}={width}")


def _mamba2(config: Config) -> Mixer:
    heads, size = positive(config, "num_heads"), positive(config, "head_dim")
    _require_product(config, heads, size, expanded(config, "expand"), "expand * hidden_size")
    return _heads(config, heads, size, "n_groups", "state_size", "conv_kernel")


def _mamba2_in_hybrid(config: Config) -> Mixer:
    """bamba, granitemoehybrid, falcon_h1."""
    if config.get("mamba_d_ssm") is None:
        width, name = expanded(config, "mamba_expand"), "mamba_expand * hidden_size"
    else:
        width, name = positive(config, "mamba_d_ssm"), "mamba_d_ssm"
    heads = positive(config, "mamba_n_heads")
    size = parts(config, width, name, "mamba_n_heads")
    if config.get("mamba_d_head") not in (None, "auto"):
        size = positive(config, "mamba_d_head")
    _require_product(config, heads, size, width, name)
    return _heads(config, heads, size, "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _nemotron_h(config: Config) -> Mixer:
    # Older configs use the names of other families.
    groups = "mamba_n_groups" if "mamba_n_groups" in config else "n_groups"
    kernel = "mamba_d_conv" if "mamba_d_conv" in config else "conv_kernel"
    heads, size = positive(config, "mamba_num_heads"), positive(config, "mamba_head_dim")
    return _heads(config, heads, size, groups, "ssm_state_size", kernel)


def _zamba2(config: Config) -> Mixer:
    width = expanded(config, "mamba_expand")
    size = parts(config, width, "mamba_expand * hidden_size", "n_mamba_heads")
    return _heads(config, positive(config, "n_mamba_heads"), size, "mamba_ngroups", "mamba_d_state", "mamba_d_conv")


def _qwen3_next(config: Config) -> Mixer:
    keys, values = positive(config, "linear_num_key_heads"), positive(config, "linear_num_value_heads")
    key, value = positive(config, "linear_key_head_dim"), positive(config, "linear_value_head_dim")
    parts(config, values, "linear_num_value_heads", "linear_num_key_heads")
    sections = (keys * key, keys * key, values * value)
    return Mixer(sections, positive(config, "linear_conv_kernel_dim"), (values, key, value), gates=2)


def _lfm2(config: Config) -> Mixer:
    return Mixer((positive(config, "hidden_size"),), positive(config, "conv_L_cache"), None)


def _all(kind: str) -> Callable[[Config], list[str]]:
    return lambda config: [kind] * positive(config, "num_hidden_layers")


def _attention_where(is_attention: Callable[[Config, int], bool]) -> Callable[[Config], list[str]]:
    def layer_types(config: Config) -> list[str]:
        count = positive(config, "num_hidden_layers")
        return [FULL if is_attention(config, index) else RECURRENT for index in range(count)]

    return layer_types


def _listed(field: str, otherwise: Callable[[Config], list[str]]) -> Callable[[Config], list[str]]:
    """The types in ``field``, and without it those of ``otherwise``."""

    def layer_types(config: Config) -> list[str]:
        if config.get(field) is None:
            return otherwise(config)
        types = [_SPELLINGS.get(kind, kind) for kind in config[field]]
        count = positive(config, "num_hidden_layers")
        if len(types) != count:
            raise SpecError(f"{config['model_type']}: {field} has {len(types)} entries for num_hidden_layers={count}")
        return types

    return layer_types


def _jamba_attends(config: Config, index: int) -> bool:
    return index % positive(config, "attn_layer_period") == int(config["attn_layer_offset"])


def _nemotron_h_types(config: Config) -> list[str]:
    for field in ("layers_block_type", "layer_types"):
        if config.get(field) is not None:
            return [_SPELLINGS.get(kind, kind) for kind in config[field]]
    pattern = config.get("hybrid_override_pattern", "ME*-")
    return [_LETTERS.get(letter, letter) for letter in pattern]


def _zamba2_types(config: Config) -> list[str]:
    """Zamba2-2.7B, which is what a config means that has no list."""
    hybrids = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    return [HYBRID if index in hybrids else RECURRENT for index in range(positive(config, "num_hidden_layers"))]


def _divided_head_size(config: Config) -> int:
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    return parts(config, positive(config, "hidden_size"), "hidden_size", "num_attention_heads")


def _zamba2_head_size(config: Config) -> int:
    """Attention reads the hidden state and the embedding side by side."""
    return parts(config, 2 * positive(config, "hidden_size"), "2 * hidden_size", "num_attention_heads")


_MAMBA = {
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "hidden_act": "silu",
    "vocab_size": 50280,
}
_HYBRID = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
}
_MAMBA2_IN_HYBRID = {
    **_HYBRID,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 128000,
}

FAMILIES: dict[str, Family] = {
    "mamba": Family(_pure_mamba1, _all(RECURRENT), _MAMBA, _divided_head_size),
    "falcon_mamba": Family(_pure_mamba1, _all(RECURRENT), _MAMBA, _divided_head_size),
    "mamba2": Family(
        _mamba2,
        _all(RECURRENT),
        {
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "expand": 2,
            "conv_kernel": 4,
            "hidden_act": "silu",
            "vocab_size": 32768,
        },
        _divided_head_size,
    ),
    "bamba": Family(
        _mamba2_in_hybrid,
        _attention_where(lambda config, index: index in (config.get("attn_layer_indices") or ())),
        {**_MAMBA2_IN_HYBRID, "max_position_embeddings": 262144},
        _divided_head_size,
    ),
    "jamba": Family(
        _jamba,
        _attention_where(_jamba_attends),
        {
            **_HYBRID,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "max_position_embeddings": 262144,
            "vocab_size": 65536,
        },
        _divided_head_size,
    ),
    "nemotron_h": Family(
        _nemotron_h,
        _nemotron_h_types,
        {
            **_HYBRID,
            "head_dim": 128,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
            "max_position_embeddings": 4096,
            "vocab_size": 131072,
        },
        _divided_head_size,
        activation="mamba_hidden_act",
    ),
    "falcon_h1": Family(
        _mamba2_in_hybrid,
        _all(HYBRID),
        {**_MAMBA2_IN_HYBRID, "mamba_d_ssm": 1024, "max_position_embeddings": 8192},
        _divided_head_size,
    ),
    "zamba2": Family(
        _zamba2,
        _listed("layers_block_type", _zamba2_types),
        {
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "num_attention_heads": 32,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "max_position_embeddings": 4096,
            "vocab_size": 32000,
        },
        _zamba2_head_size,
        activation=None,
    ),
    "granitemoehybrid": Family(
        _mamba2_in_hybrid,
        _listed("layer_types", _all(RECURRENT)),
        {
            **_MAMBA2_IN_HYBRID,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "vocab_size": 32000,
        },
        _divided_head_size,
    ),
    "qwen3_next": Family(
        _qwen3_next,
        _listed(
            "layer_types",
            _attention_where(lambda config, index: (index + 1) % positive(config, "full_attention_interval") == 0),
        ),
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "vocab_size": 151936,
        },
        _divided_head_size,
    ),
    "lfm2": Family(
        _lfm2,
        _listed(
            "layer_types",
            _attention_where(
                lambda config, index: config.get("full_attn_idxs") is None or index in config["full_attn_idxs"]
            ),
        ),
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "max_position_embeddings": 128000,
            "vocab_size": 65536,
        },
        _divided_head_size,
        activation=None,
    ),
}
