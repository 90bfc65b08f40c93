"""From a GPT-OSS config to what its cache keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist import CacheSpec, Heads, History, Layer, RowFormat, SpecError, Stream, Window


def cache_spec(
    config: Mapping[str, Any], *, block_tokens: int = 16, dtype: str = "bfloat16", fingerprint: str = ""
) -> CacheSpec:
    """Keys and values of every layer, of window layers as long as they are in the window.

    config: ``config.json`` as a mapping. dtype: of the stored rows. fingerprint: digest of the weights; empty where
    content never leaves the process. Raises SpecError for a missing
    field, and for a kind of layer that GPT-OSS does not have.
    """
    heads = _field(config, "num_key_value_heads")
    row = RowFormat((heads, _field(config, "head_dim")), dtype)
    retentions = {"full_attention": History(), "sliding_attention": Window(_field(config, "sliding_window"))}
    layers = []
    for number, kind in enumerate(_field(config, "layer_types")):
        if kind not in retentions:
            raise SpecError(f"layer {number} is {kind!r}", hint=f"layer_types are {', '.join(retentions)}")
        streams = [Stream(name, row, retentions[kind], sharding=Heads(heads)) for name in ("k", "v")]
        layers.append(Layer(number, streams))
    return CacheSpec(layers, block_tokens, fingerprint, vocab_size=_field(config, "vocab_size"))


def _field(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise SpecError(f"gpt_oss: config field {name!r} is missing")
    return config[name]
