"""From a Hugging Face decoder config to a cache spec. Imports neither torch nor transformers.

The input is the config as a mapping: ``config.json`` as it lies on disk, or ``config.to_dict()``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvist.errors import SpecError
from kvist.spec import CacheSpec, Heads, History, Layer, Retention, RowFormat, Stream, Window
from kvist_transformers.families import FAMILIES, FULL, SLIDING, Config, Family

#: Config fields that say nothing about what rows contain.
_VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache", "_attn_implementation", "torch_dtype"})


def decoder_spec(
    config: Mapping[str, Any], *, block_tokens: int = 16, dtype: str | None = None, fingerprint: str | None = None
) -> CacheSpec:
    """What a decoder-only model keeps: a ``k`` and a ``v`` row per layer and token.

    config: Hugging Face config mapping with a served ``model_type``.
    dtype: element type of the rows, torch's name without the prefix; ``None`` takes the config's, else float32.
    fingerprint: what tells this model's rows from another's; ``None`` digests config and dtype, which is enough
        where only one set of weights is in play.

    Raises SpecError naming the config field that is missing or cannot work.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unknown(config, model_type)
    family = FAMILIES[model_type]
    fingerprint = fingerprint or config_digest(config, dtype or _dtype(config))
    config = {**family.defaults, **config}
    if family.switched and not config.get("use_sliding_window"):
        config["sliding_window"] = None
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise SpecError(f"{model_type}: cross-attention is not served", hint="use a decoder-only config")
    if config.get("use_bidirectional_attention"):
        raise SpecError(f"{model_type}: use_bidirectional_attention=True: only causal attention can be cached")
    layer_count = _positive(config, "num_hidden_layers")
    heads = _positive(config, "num_attention_heads")
    kv_heads = heads
    if family.grouped and config.get("num_key_value_heads") is not None:
        kv_heads = _positive(config, "num_key_value_heads")
    if heads % kv_heads:
        raise SpecError(
            f"{model_type}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}",
            hint="every key head serves the same number of query heads",
        )
    row = RowFormat((kv_heads, _head_dim(config, heads)), dtype or _dtype(config))
    layers = []
    for index, retention in enumerate(_retentions(config, family, layer_count)):
        streams = tuple(Stream(name, row, retention, sharding=Heads(kv_heads)) for name in ("k", "v"))
        layers.append(Layer(index, streams))
    return CacheSpec(
        tuple(layers),
        block_tokens,
        fingerprint,
        max_tokens=_max_tokens(config),
        vocab_size=_positive(config, "vocab_size") if "vocab_size" in config else None,
    )


def config_digest(config: Config, dtype: str) -> str:
    """sha256 in hex over what the config and ``dtype`` say about rows."""
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps([kept, dtype], sort_keys=True, default=str).encode()).hexdigest()


def _unknown(config: Config, model_type: object) -> SpecError:
    hint = f"served are {', '.join(sorted(FAMILIES))}"
    if isinstance(config.get("text_config"), Mapping):
        hint = "this is a multimodal config; its text model is under 'text_config'"
    if model_type is None:
        return SpecError("the config has no model_type", hint=hint)
    return SpecError(f"model_type {model_type!r} is not served", hint=hint)


def _positive(config: Config, field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = "is missing" if value is None else f"must be a positive int, got {value!r}"
        raise SpecError(f"{config.get('model_type')}: config field {field!r} {what}")
    return value


def _head_dim(config: Config, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim")
    hidden = _positive(config, "hidden_size")
    if hidden % heads:
        raise SpecError(
            f"{config['model_type']}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}",
            hint="give the head size as 'head_dim'",
        )
    return hidden // heads


def _dtype(config: Config) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")


def _retentions(config: Config, family: Family, count: int) -> list[Retention]:
    model_type = config["model_type"]
    types = config.get("layer_types") if family.lists_layers else None
    if types is None:
        types = family.layer_types(config, count)
    if len(types) != count:
        raise SpecError(f"{model_type}: layer_types has {len(types)} entries for num_hidden_layers={count}")
    retentions: list[Retention] = []
    for index, kind in enumerate(types):
        if kind == FULL:
            retentions.append(History())
        elif kind == SLIDING:
            if config.get("sliding_window") is None:
                raise SpecError(f"{model_type}: layer_types[{index}] is {SLIDING!r} but there is no sliding_window")
            retentions.append(Window(_positive(config, "sliding_window")))
        else:
            raise SpecError(
                f"{model_type}: layer_types[{index}] is {kind!r}, which is not served",
                hint=f"only {FULL!r} and {SLIDING!r} layers keep plain keys and values",
            )
    return retentions


def _max_tokens(config: Config) -> int | None:
    """Longest sequence whose rows do not depend on its length.

    ``dynamic`` and ``longrope`` change the rotation of *all* positions once a sequence is longer than the length
    that the model was trained for. Rows computed before would no longer match, and one long sequence in a batch
    would change the others, so such sequences are refused.
    """
    limit = _positive(config, "max_position_embeddings") if config.get("max_position_embeddings") else None
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            nested = [value for value in rope.values() if isinstance(value, Mapping)]
            for parameters in nested or [rope]:
                limit = _rope_limit(config, parameters, limit)
    return limit


def _rope_limit(config: Config, rope: Config, limit: int | None) -> int | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "longrope" or (kind == "su" and "long_factor" in rope):
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if original is None:
            raise SpecError(
                f"{config['model_type']}: rope type {kind!r} needs config field 'original_max_position_embeddings'"
            )
        return int(original) if limit is None else min(limit, int(original))
    if "dynamic" in kind:
        original = rope.get("original_max_position_embeddings")
        if original is not None:
            return int(original) if limit is None else min(limit, int(original))
    return limit
