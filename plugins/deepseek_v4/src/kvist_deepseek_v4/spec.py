"""From a DeepSeek-V4 config to a cache spec. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from kvist.errors import SpecError
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream, Window
from kvist_deepseek_v4.config import Config, LayerKind, ModelShape, read_config
from kvist_deepseek_v4.formats import FORMATS, index_row, packed_row
from kvist_deepseek_v4.geometry import COMPRESSED, INDEX_K, INDEX_STATE, KV, STATE

#: Config fields that say nothing about what rows contain.
_VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache", "_attn_implementation", "torch_dtype"})
#: Domain of the multi-token prediction layers.
MTP = "mtp"


def cache_spec(
    config: Config,
    *,
    block_tokens: int = 128,
    dtype: str | None = None,
    fingerprint: str | None = None,
    drafts: int = 0,
) -> CacheSpec:
    """What DeepSeek-V4 keeps, in three groups of streams: the history, the window of 128 tokens, the window of 8.

    Every layer has ``kv``, one row for all heads, normed and rotated, that is key and value in one, needed for the
    sliding window. A compressed layer has ``compressed`` beside it, one row for 4 or 128 tokens, kept for good, and
    ``state``: of each token what it contributes to such a row, content and gate with its position's bias, in float32,
    needed until the row is made, and one row longer where windows overlap. A layer with an index has the same twice,
    as ``index_k`` and ``index_state``. Tensor-parallel ranks hold all of it.

    config: Hugging Face config mapping, in the checkpoint's spelling (``compress_ratios``) or in transformers'
        (``layer_types`` and ``compress_rates``). No schedule is assumed where it has neither.
    block_tokens: tokens of a page, a multiple of the ratios: of 128 for the released models.
    dtype: element type of all rows but states, torch's name without the prefix; ``None`` takes the config's, else
        float32. ``"fp8"`` and ``"fp8-mxfp4"`` are packed rows with index rows of 8 and of 4 bits, see
        :mod:`~kvist_deepseek_v4.formats`.
    fingerprint: what tells this model's rows from another's; ``None`` digests config and dtype, which is enough where
        only one set of weights is in play.
    drafts: most drafts of a step. A window much shorter than a block is kept as a ring, which has room for them.

    Raises SpecError naming the field that is missing or cannot work.
    """
    shape = read_config(config)
    return _spec(config, shape, enumerate(shape.layers), "target", block_tokens, dtype, fingerprint, drafts)


def mtp_spec(
    config: Config,
    *,
    block_tokens: int = 128,
    dtype: str | None = None,
    fingerprint: str | None = None,
    drafts: int = 0,
) -> CacheSpec:
    """What the multi-token prediction layers keep: rows of a window, in streams and a domain of their own. Hand it to
    ``Layout.build(..., drafts=[...])`` beside :func:`cache_spec`'s; the arguments are the same.

    Raises SpecError for a model without such layers, and as ``cache_spec`` does.
    """
    shape = read_config(config)
    if not shape.mtp_layers:
        raise SpecError("the model has no multi-token prediction layers: num_nextn_predict_layers=0")
    layers = enumerate(shape.mtp_layers, start=len(shape.layers))
    return _spec(config, shape, layers, MTP, block_tokens, dtype, fingerprint, drafts)


def _spec(
    config: Config,
    shape: ModelShape,
    layers: Iterable[tuple[int, LayerKind]],
    domain: str,
    block_tokens: int,
    dtype: str | None,
    fingerprint: str | None,
    drafts: int,
) -> CacheSpec:
    if drafts < 0:
        raise SpecError(f"drafts={drafts} cannot be negative")
    row_dtype = dtype or shape.dtype
    return CacheSpec(
        [Layer(id_, _streams(shape, kind, row_dtype, block_tokens, drafts)) for id_, kind in layers],
        block_tokens,
        fingerprint or _digest(config, row_dtype),
        domain,
        max_tokens=shape.max_tokens,
        vocab_size=shape.vocab_size,
    )


def _streams(shape: ModelShape, kind: LayerKind, dtype: str, block_tokens: int, drafts: int) -> list[Stream]:
    def window(tokens: int) -> Window:
        ring = tokens + drafts
        return Window(tokens, ring=ring if 2 * ring <= block_tokens else 0)

    def compressor(rows: str, row: RowFormat, state: str, size: int) -> tuple[Stream, Stream]:
        series = 2 if kind.overlap else 1
        return (
            Stream(rows, row, History(), kind.ratio, continued=True),
            Stream(state, RowFormat((2, series * size), "float32"), window(series * kind.ratio)),
        )

    size, index_size = shape.head_dim, shape.index_head_dim
    _, index_encoding = FORMATS.get(dtype, (None, None))
    row = packed_row(size, shape.rope) if dtype in FORMATS else RowFormat((size,), dtype)
    streams = [Stream(KV, row, window(shape.window))]
    if kind.ratio:
        streams += compressor(COMPRESSED, row, STATE, size)
    if kind.indexed:
        row = index_row(index_size, index_encoding) if index_encoding else RowFormat((index_size,), dtype)
        streams += compressor(INDEX_K, row, INDEX_STATE, index_size)
    return streams


def _digest(config: Config, dtype: str) -> str:
    """sha256 in hex over what the config and the element type say about rows."""
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps([kept, dtype], sort_keys=True, default=str).encode()).hexdigest()
