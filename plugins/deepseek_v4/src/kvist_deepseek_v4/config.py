"""Reads a DeepSeek-V4 config, in either spelling, and refuses what cannot be served. No torch, no transformers.

Checkpoints name a compression ratio for each layer, ``compress_ratios``, with the multi-token prediction layers behind
the others; transformers writes ``layer_types`` and one rate per type, ``compress_rates``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvist.errors import SpecError

Config = Mapping[str, Any]

MODEL_TYPE = "deepseek_v4"
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

#: transformers' defaults for the fields that checkpoints may leave out.
_DEFAULTS = {
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_nextn_predict_layers": 1,
}
_RATES = {SPARSE: 4, HEAVY: 128}
#: Older configs have one field for each type's rate.
_RATE_FIELDS = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}


@attrs.frozen
class LayerKind:
    """What a layer keeps beside its window.

    ratio: tokens that one compressed row stands for; 0 for none.
    overlap: does a compressed row pool the window before its own, too?
    indexed: does a query read only the compressed rows that an index selects?
    """

    ratio: int = 0
    overlap: bool = False
    indexed: bool = False


@attrs.frozen
class ModelShape:
    """What the cache needs to know of a model. Sizes in elements, window in tokens.

    layers, mtp_layers: of the model, and of its multi-token prediction. rope: elements at the end of a row that
    rotate. dtype: of the weights, float32 where the config names none.
    """

    layers: tuple[LayerKind, ...]
    mtp_layers: tuple[LayerKind, ...]
    head_dim: int
    rope: int
    index_head_dim: int
    index_topk: int
    window: int
    dtype: str
    max_tokens: int | None
    vocab_size: int | None


def read_config(config: Config) -> ModelShape:
    """Raises SpecError, naming the field and the value, for a config that cannot be served."""
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        raise SpecError(f"model_type {model_type!r} is not served", hint=f"served is {MODEL_TYPE}")
    if config.get("num_key_value_heads", 1) != 1:
        raise SpecError(
            f"num_key_value_heads={config['num_key_value_heads']!r}: DeepSeek-V4 has one row for all heads",
            hint="set it to 1",
        )
    fields = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    layers, mtp_layers = _schedule(fields)
    head_dim, index_head_dim = _count(fields, "head_dim"), _count(fields, "index_head_dim")
    smallest = index_head_dim if any(layer.indexed for layer in layers) else head_dim
    return ModelShape(
        layers=layers,
        mtp_layers=mtp_layers,
        head_dim=head_dim,
        rope=_rope(fields, head_dim, smallest),
        index_head_dim=index_head_dim,
        index_topk=_count(fields, "index_topk"),
        window=_count(fields, "sliding_window"),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch."),
        max_tokens=_count(fields, "max_position_embeddings") if "max_position_embeddings" in fields else None,
        vocab_size=_count(fields, "vocab_size") if "vocab_size" in fields else None,
    )


def _schedule(config: Config) -> tuple[tuple[LayerKind, ...], tuple[LayerKind, ...]]:
    """The kinds of the model's layers, and of those of its multi-token prediction."""
    count, mtp_count = _count(config, "num_hidden_layers"), _count(config, "num_nextn_predict_layers", least=0)
    rates = _rates(config)
    kinds = {SLIDING: LayerKind(), SPARSE: LayerKind(rates[SPARSE], True, True), HEAVY: LayerKind(rates[HEAVY])}
    mtp = (LayerKind(),) * mtp_count
    by_ratio = by_type = None
    ratios = config.get("compress_ratios")
    if ratios is not None:
        _require_length("compress_ratios", ratios, (count, count + mtp_count), count, mtp_count)
        all_kinds = tuple(_of_ratio(index, ratio, kinds) for index, ratio in enumerate(ratios))
        by_ratio, mtp = all_kinds[:count], all_kinds[count:] or mtp
        for index, kind in enumerate(mtp, start=count):
            if kind.ratio:
                raise SpecError(
                    f"compress_ratios[{index}] is {kind.ratio}, of a multi-token prediction layer",
                    hint="these layers have a window only, their ratio is 0",
                )
    types = config.get("layer_types")
    if types is not None:
        _require_length("layer_types", types, (count,), count, 0)
        for index, name in enumerate(types):
            if name not in kinds:
                raise SpecError(
                    f"layer_types[{index}] is {name!r}, which is not served", hint=f"served are {', '.join(kinds)}"
                )
        by_type = tuple(kinds[name] for name in types)
    if by_ratio is None and by_type is None:
        raise SpecError(
            "config fields 'compress_ratios' and 'layer_types' are missing",
            hint="the released models differ in their schedules, so none is assumed: take it from the checkpoint",
        )
    if ratios and types and by_ratio is not None and by_type is not None and by_ratio != by_type:
        index = next(index for index, (one, other) in enumerate(zip(by_ratio, by_type)) if one != other)
        raise SpecError(
            f"layer {index}: compress_ratios has {ratios[index]}, but layer_types has {types[index]!r}",
            hint="leave one of the two out",
        )
    found = by_ratio if by_ratio is not None else by_type
    assert found is not None
    return found, mtp


def _of_ratio(index: int, ratio: Any, kinds: Mapping[str, LayerKind]) -> LayerKind:
    # Some engines write 1 for "not compressed".
    if ratio in (0, 1) and not isinstance(ratio, bool):
        return kinds[SLIDING]
    for kind in kinds.values():
        if kind.ratio == ratio:
            return kind
    known = ", ".join(str(kind.ratio) for kind in kinds.values())
    raise SpecError(f"compress_ratios[{index}] is {ratio!r}, which is not served", hint=f"served are {known}")


def _rates(config: Config) -> dict[str, int]:
    rates = {**_RATES, **(config.get("compress_rates") or {})}
    for kind, field in _RATE_FIELDS.items():
        if field in config:
            rates[kind] = config[field]
        name = field if field in config else f"compress_rates[{kind!r}]"
        _count({name: rates[kind]}, name, least=2)
    if rates[SPARSE] == rates[HEAVY]:
        raise SpecError(f"both kinds of compressed layers have the rate {rates[SPARSE]}")
    return rates


def _require_length(name: str, values: Any, wanted: tuple[int, ...], count: int, mtp_count: int) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise SpecError(f"config field {name!r} must be a list, got {values!r}")
    if len(values) not in wanted:
        behind = f" and num_nextn_predict_layers={mtp_count}" if mtp_count else ""
        raise SpecError(f"{name} has {len(values)} entries for num_hidden_layers={count}{behind}")


def _rope(config: Config, head_dim: int, smallest: int) -> int:
    """How many elements rotate. Raises SpecError for rope that an index row has no room for, or that depends on the
    length of the sequence."""
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping)]
    for rope in ropes:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind in ("dynamic", "longrope"):
            raise SpecError(
                f"rope type {kind!r}: rows would change with the length of the sequence",
                hint="use a rope type that does not depend on the length",
            )
    width = config.get("qk_rope_head_dim")
    if width is None:
        factors = (each.get("partial_rotary_factor") for each in (config, *ropes))
        width = int(head_dim * next((factor for factor in factors if factor is not None), 64 / 512))
    if width % 2 or width > smallest:
        raise SpecError(
            f"rope turns {width} elements, of rows of {smallest}: they are pairs, and no more than there are",
            hint="set partial_rotary_factor or qk_rope_head_dim as the checkpoint has it",
        )
    return int(width)


def _count(config: Config, field: str, least: int = 1) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        what = "is missing" if value is None else f"must be an int of at least {least}, got {value!r}"
        raise SpecError(f"config field {field!r} {what}")
    return value
