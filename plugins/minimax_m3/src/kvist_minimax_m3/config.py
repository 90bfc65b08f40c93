"""Reads a MiniMax-M3 config, in either spelling, and refuses what cannot be served. No torch, no transformers.

transformers writes flat fields (``index_topk_blocks``, ``layer_types``); checkpoints nest them under other names in
``sparse_attention_config``, and both come as they are or as the ``text_config`` of the multimodal config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvist.errors import SpecError
from kvist_minimax_m3.dtypes import dtype_name
from kvist_minimax_m3.selection import Selection

Config = Mapping[str, Any]

MULTIMODAL, TEXT = "minimax_m3_vl", "minimax_m3_vl_text"
FULL, SPARSE = "full_attention", "minimax_m3_sparse"

#: Flat field: (its name in ``sparse_attention_config``, transformers' default).
_INDEX_FIELDS = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
    # Not in transformers, which has no leading blocks.
    "index_init_blocks": ("sparse_init_block", 0),
}


@attrs.frozen
class ModelShape:
    """What the cache and its backend need to know of a model.

    sparse: for each layer, does it select blocks? dtype: of the weights, float32 where the config names none.
    index_dtype: what the config asks index keys to be stored as, ``None`` where it does not say.
    """

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_size: int
    sparse: tuple[bool, ...]
    selection: Selection
    dtype: str
    index_dtype: str | None
    max_tokens: int | None
    vocab_size: int | None


def read_config(config: Config) -> ModelShape:
    """Raises SpecError, naming the field and the value, for a config that cannot be served."""
    outer, config = config, _text_config(config)
    nested = config.get("sparse_attention_config") or {}
    heads, kv_heads = _positive(config, "num_attention_heads"), _positive(config, "num_key_value_heads")
    head_dim = _positive({"head_dim": 128, **config}, "head_dim")
    index = {name: _index_field(config, nested, name) for name in _INDEX_FIELDS}
    index_heads, index_size = (_positive(index, name) for name in ("index_n_heads", "index_head_dim"))
    _require_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    sparse = _sparse_layers(config, nested)
    if any(sparse):
        _require_divides("num_key_value_heads", kv_heads, "index_n_heads", index_heads)
        _require_divides("index_n_heads", index_heads, "num_attention_heads", heads)
        _require_plain_index(nested, sparse)
    _require_rope(config, head_dim, index_size if any(sparse) else head_dim)
    return ModelShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        index_heads=index_heads,
        index_size=index_size,
        sparse=sparse,
        selection=Selection(
            block_tokens=_positive(index, "index_block_size"),
            topk=_positive(index, "index_topk_blocks"),
            local_blocks=_count(index, "index_local_blocks"),
            init_blocks=_count(index, "index_init_blocks"),
            group_reduce=config.get("index_group_reduce", "per_index_head"),
        ),
        dtype=_dtype(config, outer),
        index_dtype=config.get("index_dtype", outer.get("index_dtype")),
        max_tokens=_positive(config, "max_position_embeddings") if config.get("max_position_embeddings") else None,
        vocab_size=_positive(config, "vocab_size") if config.get("vocab_size") else None,
    )


def _text_config(config: Config) -> Config:
    model_type = config.get("model_type")
    if model_type == MULTIMODAL:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise SpecError(f"{MULTIMODAL}: config field 'text_config' is missing")
        return text
    if model_type != TEXT:
        raise SpecError(f"model_type {model_type!r} is not served", hint=f"served are {MULTIMODAL}, {TEXT}")
    return config


def _index_field(config: Config, nested: Config, name: str) -> Any:
    other, default = _INDEX_FIELDS[name]
    if name in config and other in nested and config[name] != nested[other]:
        raise SpecError(
            f"{name}={config[name]!r}, but sparse_attention_config has {other}={nested[other]!r}",
            hint="leave one of the two out",
        )
    return config.get(name, nested.get(other, default))


def _sparse_layers(config: Config, nested: Config) -> tuple[bool, ...]:
    count = _positive(config, "num_hidden_layers")
    kinds, frequencies = config.get("layer_types"), nested.get("sparse_attention_freq")
    if kinds is None:
        # Without either, transformers makes every layer a full one.
        kinds = [SPARSE if each else FULL for each in frequencies] if frequencies else [FULL] * count
    name = "sparse_attention_freq" if config.get("layer_types") is None else "layer_types"
    if len(kinds) != count:
        raise SpecError(f"{name} has {len(kinds)} entries for num_hidden_layers={count}")
    for index, kind in enumerate(kinds):
        if kind not in (FULL, SPARSE):
            raise SpecError(
                f"layer_types[{index}] is {kind!r}, which is not served", hint=f"served are {FULL!r} and {SPARSE!r}"
            )
    return tuple(kind == SPARSE for kind in kinds)


def _require_plain_index(nested: Config, sparse: Sequence[bool]) -> None:
    score = nested.get("sparse_score_type", "max")
    if score != "max":
        raise SpecError(f"sparse_score_type={score!r} is not served", hint="blocks are ranked by their 'max' score")
    disabled = nested.get("sparse_disable_index_value", True)
    disabled = disabled if isinstance(disabled, Sequence) else [disabled] * len(sparse)
    if len(disabled) != len(sparse):
        raise SpecError(f"sparse_disable_index_value has {len(disabled)} entries for num_hidden_layers={len(sparse)}")
    for layer, (selects, off) in enumerate(zip(sparse, disabled)):
        if selects and not off:
            raise SpecError(
                f"layer {layer}: sparse_disable_index_value={off!r}: index values are not served",
                hint="an index key only ranks blocks; use a checkpoint whose index branch has no values",
            )


def _require_rope(config: Config, head_dim: int, index_size: int) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("dynamic", "longrope"):
        raise SpecError(
            f"rope type {kind!r}: rows would change with the length of the sequence",
            hint="use a rope type that does not depend on the length",
        )
    factors = (each.get("partial_rotary_factor") for each in (rope, config))
    width = int(head_dim * next((factor for factor in factors if factor is not None), 1.0))
    if width > index_size:
        raise SpecError(
            f"rope turns {width} elements of a head, an index key has index_head_dim={index_size}",
            hint="set rope_parameters['partial_rotary_factor'] as the checkpoint has it",
        )


def _require_divides(name: str, value: int, other: str, of: int) -> None:
    if of % value:
        raise SpecError(f"{name}={value} does not divide {other}={of}")


def _positive(config: Config, field: str) -> int:
    return _count(config, field, least=1)


def _count(config: Config, field: str, least: int = 0) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        what = "is missing" if value is None else f"must be an int of at least {least}, got {value!r}"
        raise SpecError(f"config field {field!r} {what}")
    return value


def _dtype(config: Config, outer: Config) -> str:
    named = (each.get(name) for each in (config, outer) for name in ("dtype", "torch_dtype"))
    return dtype_name(next((value for value in named if value), "float32"))
