"""Request traces that tests write themselves, and a model family of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvist.plugins.discovery import PluginPlan, PluginRecord
from kvist.plugins.loading import LoadedPlugin, LoadedPlugins
from kvist.records import CacheManagerInfo
from kvist.registry import Registry
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream, Window


def line(input_length: int, output_length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    """A line of the format with ``hash_ids``."""
    return {"timestamp": 0, "input_length": input_length, "output_length": output_length, "hash_ids": ids, **more}


def branching(seed: int, count: int, *, block_tokens: int = 8) -> list[dict[str, Any]]:
    """Conversations that branch: a prompt goes on from a prefix of an earlier one, or is the same prompt again."""
    rng = np.random.default_rng(seed)
    next_id = 0
    past: list[list[int]] = [[]]
    lines = []
    for number in range(count):
        history = past[int(rng.integers(max(0, len(past) - 12), len(past)))]
        keep = int(rng.integers(0, len(history) + 1)) if rng.random() < 0.7 else len(history)
        fresh = int(rng.integers(0 if keep else 1, 4))
        ids = [*history[:keep], *range(next_id, next_id + fresh)]
        next_id += fresh
        # Prompts that end inside their last block leave the cached run in the middle of it.
        length = len(ids) * block_tokens - int(rng.integers(0, block_tokens))
        lines.append(line(length, int(rng.integers(0, 12)), ids, block_tokens=block_tokens, timestamp=number))
        past.append(ids)
    return lines


def toy_spec(config: Mapping[str, Any], *, block_tokens: int = 16, dtype: str | None = None) -> CacheSpec:
    """One full layer, and a windowed one if the config has a window. The first has rows of 16 elements."""
    rows = {"full": RowFormat((2, 8), dtype or "float32"), "windowed": RowFormat((1, 8), dtype or "float32")}
    streams = [Stream(name, rows["full"], History()) for name in ("k", "v")]
    layers = [Layer(0, tuple(streams))]
    if "window" in config:
        window = Window(config["window"])
        layers.append(Layer(1, tuple(Stream(name, rows["windowed"], window) for name in ("k", "v"))))
    return CacheSpec(
        tuple(layers),
        block_tokens,
        "toy",
        max_tokens=config.get("max_tokens"),
        vocab_size=config.get("vocab_size", 1000),
    )


def toy_registry() -> Registry:
    """Knows the model type ``toy`` and nothing else."""
    record = PluginRecord("toys", "kvist-toys", "1.0", "toys", "loaded")
    info = CacheManagerInfo(name="toy", model_types=("toy",), spec_factory="toy_traces:toy_spec")
    plan = PluginPlan("0", (1, 0), False, (record,))
    return Registry(LoadedPlugins(plan, (LoadedPlugin(record, (info,), (), ()),)))
