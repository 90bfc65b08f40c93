"""From a MiniMax-M3 config to a cache spec. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json

from kvist.spec import CacheSpec, Heads, History, Layer, Replicated, RowFormat, Stream
from kvist_minimax_m3.config import Config, read_config
from kvist_minimax_m3.dtypes import dtype_name, index_dtype_name

#: Config fields that say nothing about what rows contain.
_VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache", "_attn_implementation", "torch_dtype"})


def cache_spec(
    config: Config,
    *,
    block_tokens: int = 128,
    dtype: str | None = None,
    fingerprint: str | None = None,
    index_dtype: str | None = None,
) -> CacheSpec:
    """What MiniMax-M3 keeps: a ``k`` and a ``v`` row per layer and token, and ``index_k`` in the sparse layers.

    The three streams have one retention, so they share pages: nothing can move, share, drop or restore keys and values
    without their index keys. An index key has no heads; every tensor-parallel rank keeps all of it.

    config: Hugging Face config mapping, the multimodal one or its text config, in transformers' flat spelling or the
        checkpoint's nested one.
    block_tokens: tokens of a page; divides the model's sparse block, 128 tokens in the published model.
    dtype: element type of keys and values, torch's name without the prefix; ``None`` takes the config's, else float32.
    fingerprint: what tells this model's rows from another's; ``None`` digests config and dtypes, which is enough
        where only one set of weights is in play.
    index_dtype: element type of the index keys; ``None`` takes the config's field ``index_dtype``, else ``dtype``.
        ``"float8_e4m3fn"`` halves them and is taken only when asked for, see
        :func:`~kvist_minimax_m3.dtypes.require_fp8_bound`.

    Raises SpecError naming the field that is missing or cannot work.
    """
    shape = read_config(config)
    row_dtype = dtype_name(dtype) if dtype is not None else shape.dtype
    index_name = index_dtype_name(index_dtype or shape.index_dtype or row_dtype)
    if any(shape.sparse):
        shape.selection.require_pages(block_tokens)
    row = RowFormat((shape.kv_heads, shape.head_dim), row_dtype)
    plain = tuple(Stream(name, row, History(), sharding=Heads(shape.kv_heads)) for name in ("k", "v"))
    index = Stream("index_k", RowFormat((shape.index_size,), index_name), History(), sharding=Replicated())
    layers = [Layer(id_, (*plain, index) if sparse else plain) for id_, sparse in enumerate(shape.sparse)]
    return CacheSpec(
        layers,
        block_tokens,
        fingerprint or config_digest(config, row_dtype, index_name),
        max_tokens=shape.max_tokens,
        vocab_size=shape.vocab_size,
    )


def config_digest(config: Config, *dtypes: str) -> str:
    """sha256 in hex over what the config and the element types say about rows."""
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps([kept, *dtypes], sort_keys=True, default=str).encode()).hexdigest()
