"""What differs between the served model types in what their layers keep: windows and config defaults. No torch.

A model type is in :data:`FAMILIES` only when the plugin's tests compare its greedy tokens with transformers' own
``generate``. Everything else about attention (scaling, softcap, sinks, rope) comes from the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

Config = Mapping[str, Any]

SLIDING = "sliding_attention"
FULL = "full_attention"

#: Layer types of a config that does not list them: (config, layer count) -> one name per layer.
LayerTypes = Callable[[Config, int], list[str]]


def _all_full(_: Config, count: int) -> list[str]:
    return [FULL] * count


def _all_sliding(config: Config, count: int) -> list[str]:
    return [FULL if config.get("sliding_window") is None else SLIDING] * count


def _from_max_window_layers(config: Config, count: int) -> list[str]:
    if config.get("sliding_window") is None:
        return [FULL] * count
    first = config.get("max_window_layers", 28)
    return [SLIDING if index >= first else FULL for index in range(count)]


def _odd_below_max_window_layers(config: Config, count: int) -> list[str]:
    if config.get("sliding_window") is None:
        return [FULL] * count
    end = config.get("max_window_layers", 28)
    return [SLIDING if (index + 1) % 2 and index < end else FULL for index in range(count)]


def _without_rope(config: Config, count: int) -> list[str]:
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [FULL] * count
    interval = config.get("no_rope_layer_interval", 4)
    roped = config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    return [FULL if has_rope else SLIDING for has_rope in roped]


def _every(default: int) -> LayerTypes:
    """Every ``sliding_window_pattern``-th layer is full, the others slide."""

    def layer_types(config: Config, count: int) -> list[str]:
        pattern = config.get("sliding_window_pattern", default)
        period = pattern if isinstance(pattern, int) else len(pattern)
        return [SLIDING if (index + 1) % period else FULL for index in range(count)]

    return layer_types


@attrs.frozen
class Family:
    """How to read one model type's config.

    layer_types: the layer types where the config does not list them.
    lists_layers: whether the model obeys ``layer_types`` in its config; otherwise the list is ignored, as it is there.
    defaults: values of fields that a raw ``config.json`` may leave out, from the config class. A missing ``head_dim``
        is hidden size / heads, a missing ``num_key_value_heads`` as many as query heads.
    switched: whether ``use_sliding_window`` has to be set for ``sliding_window`` to mean anything.
    grouped: whether the model obeys ``num_key_value_heads``; otherwise every query head has its own key head.
    """

    layer_types: LayerTypes = _all_full
    lists_layers: bool = False
    defaults: Config = attrs.field(factory=dict)
    switched: bool = False
    grouped: bool = True


def _family(
    layer_types: LayerTypes = _all_full,
    *,
    lists_layers: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    window: int | None = None,
    switched: bool = False,
    grouped: bool = True,
) -> Family:
    given = {"num_key_value_heads": kv_heads, "head_dim": head_dim, "sliding_window": window}
    defaults = {name: value for name, value in given.items() if value is not None}
    return Family(layer_types, lists_layers, defaults, switched, grouped)


FAMILIES: Mapping[str, Family] = {
    # Full attention in every layer, whatever the config says about windows.
    "apertus": _family(),
    "arcee": _family(),
    "cohere": _family(),
    "ernie4_5": _family(kv_heads=2, head_dim=128),
    "gemma": _family(kv_heads=16, head_dim=256),
    "glm": _family(kv_heads=2, head_dim=128),
    "glm4": _family(kv_heads=2, head_dim=128),
    "gpt_neox": _family(grouped=False),
    "granite": _family(),
    "granitemoe": _family(),
    "helium": _family(kv_heads=20, head_dim=128),
    "hunyuan_v1_dense": _family(),
    "llama": _family(),
    "olmo": _family(),
    "olmo2": _family(),
    "phi": _family(),
    "seed_oss": _family(kv_heads=8, head_dim=128),
    # One window for every layer.
    "ministral3": _family(_all_sliding, kv_heads=8, head_dim=128),
    "mistral": _family(_all_sliding, kv_heads=8, window=4096),
    "mixtral": _family(_all_sliding, kv_heads=8),
    "phi3": _family(_all_sliding),
    "qwen3_moe": _family(_all_sliding, kv_heads=4, window=4096, switched=True),
    "starcoder2": _family(_all_sliding, kv_heads=2),
    # Windows in some layers.
    "cohere2": _family(_every(4), lists_layers=True, window=4096),
    "exaone4": _family(_every(4), lists_layers=True, kv_heads=32, window=4096),
    "gemma2": _family(_every(2), lists_layers=True, kv_heads=4, head_dim=256, window=4096),
    "gemma3_text": _family(_every(6), lists_layers=True, kv_heads=4, head_dim=256, window=4096),
    "gpt_oss": _family(_every(2), lists_layers=True, kv_heads=8, head_dim=64, window=128),
    "ministral": _family(_all_sliding, lists_layers=True, kv_heads=8, window=4096),
    "olmo3": _family(_every(4), lists_layers=True, window=4096),
    "qwen2": _family(_from_max_window_layers, lists_layers=True, kv_heads=32, window=4096, switched=True),
    "qwen2_moe": _family(_odd_below_max_window_layers, lists_layers=True, kv_heads=16, window=4096, switched=True),
    "qwen3": _family(_from_max_window_layers, lists_layers=True, kv_heads=32, head_dim=128, window=4096, switched=True),
    "smollm3": _family(_without_rope, lists_layers=True, kv_heads=4),
    "vaultgemma": _family(_every(2), lists_layers=True, kv_heads=4, head_dim=256, window=4096),
}
