"""From the config of a hybrid with gated delta nets to what its cache keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist import CacheSpec, Heads, History, Layer, RowFormat, Sections, SpecError, Stream
from kvist.spec import State

#: The streams of a linear layer.
CONV, MEMORY = "conv_state", "recurrent_state"


def cache_spec(
    config: Mapping[str, Any], *, block_tokens: int = 16, dtype: str = "bfloat16", fingerprint: str = ""
) -> CacheSpec:
    """States of linear layers, keys and values of the others.

    ``conv_state`` is ``[channels, width - 1]``, the channels being those of queries, keys and values;
    ``recurrent_state`` is ``[value heads, key size, value size]`` in float32, because small updates add up.

    config: ``config.json`` as a mapping. dtype: of all else. fingerprint: digest of the weights; empty where content
    never leaves the process. Raises SpecError for a missing field.
    """
    key_heads, value_heads = _field(config, "linear_num_key_heads"), _field(config, "linear_num_value_heads")
    key_size, value_size = _field(config, "linear_key_head_dim"), _field(config, "linear_value_head_dim")
    sections = (key_heads * key_size, key_heads * key_size, value_heads * value_size)
    conv = RowFormat((sum(sections), _field(config, "linear_conv_kernel_dim") - 1), dtype)
    memory = RowFormat((value_heads, key_size, value_size), "float32")
    states = (
        Stream(CONV, conv, State(), sharding=Sections(sections)),
        Stream(MEMORY, memory, State(), sharding=Heads(value_heads)),
    )
    heads = _field(config, "num_key_value_heads")
    row = RowFormat((heads, _field(config, "head_dim")), dtype)
    history = tuple(Stream(name, row, History(), sharding=Heads(heads)) for name in ("k", "v"))
    layers = [
        Layer(number, states if kind == "linear_attention" else history)
        for number, kind in enumerate(_field(config, "layer_types"))
    ]
    return CacheSpec(layers, block_tokens, fingerprint, vocab_size=_field(config, "vocab_size"))


def _field(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise SpecError(f"qwen3_next: config field {name!r} is missing")
    return config[name]
