"""The cache of template models. Importing this module is cheap: it imports neither torch nor a model library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvist.errors import SpecError
from kvist.hookspecs import hookimpl
from kvist.records import CacheManagerInfo
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream

#: The version of Kvist's hooks that this module was written for.
KVIST_SPEC = (1, 0)


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """The model types that this plugin serves, and the function that describes their cache."""
    return [CacheManagerInfo(name="template", model_types=("template",), spec_factory="kvist_template:cache_spec")]


def cache_spec(
    config: Mapping[str, Any], *, block_tokens: int = 16, dtype: str | None = None, fingerprint: str | None = None
) -> CacheSpec:
    """What a model keeps: in every layer a row of keys and a row of values for each token, as long as it runs.

    config: the content of the model's ``config.json``.
    dtype: element type of the rows, torch's name without the prefix; ``None`` takes the config's, else float32.
    fingerprint: what tells this model's rows from another's; ``None`` digests config and dtype.

    Raises SpecError naming the field that is missing or cannot work.
    """
    heads, size = _positive(config, "num_key_value_heads"), _positive(config, "head_dim")
    row = RowFormat((heads, size), dtype or str(config.get("dtype") or "float32"))
    streams = tuple(Stream(name, row, History(), sharding=Heads(heads)) for name in ("k", "v"))
    return CacheSpec(
        layers=tuple(Layer(index, streams) for index in range(_positive(config, "num_hidden_layers"))),
        block_tokens=block_tokens,
        fingerprint=fingerprint or hashlib.sha256(json.dumps([dict(config), dtype]).encode()).hexdigest(),
    )


def _positive(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if type(value) is not int or value < 1:
        raise SpecError(f"template: config field {field!r} must be a positive int, got {value!r}")
    return value
