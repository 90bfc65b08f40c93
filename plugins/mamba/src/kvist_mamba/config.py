"""Fields of a Hugging Face config, read with errors that name them. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvist.errors import SpecError

Config = Mapping[str, Any]

#: Config fields that say nothing about what rows contain.
_VOLATILE = frozenset({"transformers_version", "_name_or_path", "use_cache", "_attn_implementation", "torch_dtype"})
#: What the mixers' convolutions are computed with.
_ACTIVATIONS = ("silu", "swish")
#: Rotations that change for all positions once a sequence has become long.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


def positive(config: Config, field: str) -> int:
    """The field's value, which must be a positive int."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = "is missing" if value is None else f"must be a positive int, got {value!r}"
        raise SpecError(f"{config['model_type']}: config field {field!r} {what}")
    return value


def expanded(config: Config, field: str) -> int:
    """``hidden_size`` times the factor in the field, which need not be whole."""
    factor = config.get(field)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise SpecError(f"{config['model_type']}: config field {field!r} must be a positive number, got {factor!r}")
    return int(factor * positive(config, "hidden_size"))


def parts(config: Config, whole: int, name: str, field: str) -> int:
    """``whole`` divided by the field's value, which must divide it. ``name`` says what ``whole`` is."""
    count = positive(config, field)
    if whole % count:
        raise SpecError(f"{config['model_type']}: {field}={count} does not divide {name}={whole}")
    return whole // count


def element_type(config: Config) -> str:
    """The config's dtype by torch's name without the prefix, float32 if it has none."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")


def digest(config: Config, *dtypes: str) -> str:
    """sha256 in hex over what the config and the dtypes say about rows."""
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps([kept, *dtypes], sort_keys=True, default=str).encode()).hexdigest()


def check_activation(config: Config, field: str) -> None:
    """Raise SpecError for a mixer whose convolution ends in anything but SiLU."""
    if config.get(field) not in _ACTIVATIONS:
        raise SpecError(
            f"{config['model_type']}: {field}={config.get(field)!r} is not served",
            hint="the mixers' convolutions are computed with 'silu'",
        )


def check_rotation(config: Config) -> None:
    """Raise SpecError for rotary embeddings under which rows computed earlier would change."""
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if isinstance(rope, Mapping):
            kind = str(rope.get("rope_type") or rope.get("type") or "default")
            if kind in _LENGTH_DEPENDENT:
                raise SpecError(
                    f"{config['model_type']}: {field} of type {kind!r} is not served",
                    hint="it changes the keys of all positions when a sequence grows, and cached ones would not match",
                )
