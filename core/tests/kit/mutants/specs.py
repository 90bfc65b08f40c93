"""Spec factories with a fault each, as a stranger's would have it. ``make()`` gives the suite that is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
from kit.mutants.base import Mutant

from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.mixes import Chunk
from kvist.testing.spec import CacheSpecTests

CONFIG = {"layers": 3, "heads": 4, "kv_heads": 2, "head_size": 8, "window": 6, "chunk": 5, "state": 16, "theta": 10_000}


def sound(config: Mapping[str, Any], *, block_tokens: int, dtype: str, **changes: Any) -> CacheSpec:
    """A layer of each kind. changes: what a faulty factory does differently."""
    row = RowFormat((config["kv_heads"], config["head_size"]), dtype)
    kept = [History(), Window(config["window"]), changes.get("chunk", Chunk)(config["chunk"])]
    layers = [
        Layer(number, [Stream(name, row, each, sharding=Heads(config["kv_heads"])) for name in ("k", "v")])
        for number, each in enumerate(kept)
    ]
    layers.append(Layer(len(layers), [Stream("state", RowFormat((config["state"],), "float32"), State())]))
    digest = hashlib.sha256(json.dumps([dict(config), dtype], sort_keys=True).encode()).hexdigest()
    spec = CacheSpec(layers, block_tokens, digest)
    return attrs.evolve(spec, **{name: value for name, value in changes.items() if name != "chunk"})


class Sound(CacheSpecTests):
    """What the author of :func:`sound` has counted by hand."""

    factory = "kit.mutants.specs:sound"

    def configs(self):
        return [CONFIG, {**CONFIG, "kv_heads": 4, "head_size": 4}]

    def bytes_per_token(self, config):
        # Keys and values of three layers, float32.
        return 3 * 2 * config["kv_heads"] * config["head_size"] * 4

    def state_bytes(self, config):
        return 16 * 4

    def variants(self, config):
        return [{**config, "theta": 500_000}, {**config, "layers": 4}]


_seen: list[int] = []


def counts_its_calls(config, *, block_tokens, dtype):
    _seen.append(1)
    return sound(config, block_tokens=block_tokens, dtype=dtype, fingerprint=f"model-{len(_seen)}")


def takes_from_its_config(config, *, block_tokens, dtype):
    config.setdefault("theta_type", "default")
    return sound(config, block_tokens=block_tokens, dtype=dtype)


def likes_blocks_of_16(config, *, block_tokens, dtype):
    return sound(config, block_tokens=max(16, block_tokens), dtype=dtype)


def counts_query_heads(config, *, block_tokens, dtype):
    digest = sound(config, block_tokens=block_tokens, dtype=dtype).fingerprint
    return sound({**config, "kv_heads": config["heads"]}, block_tokens=block_tokens, dtype=dtype, fingerprint=digest)


def forgets_a_stream(config, *, block_tokens, dtype):
    spec = sound(config, block_tokens=block_tokens, dtype=dtype)
    layers = [
        attrs.evolve(layer, streams=layer.streams[:1] if layer.id == 1 else layer.streams) for layer in spec.layers
    ]
    return attrs.evolve(spec, layers=layers)


@attrs.frozen
class DropsEarly(Chunk):
    """Takes the last token of a chunk for the first of the next one."""

    def droppable(self, length, rollback, block_tokens):
        return super().droppable(length + 1, rollback, block_tokens)


@attrs.frozen
class ForgetsRollback(Chunk):
    """Drops what is read again after tokens are taken back."""

    def droppable(self, length, rollback, block_tokens):
        return super().droppable(length, 0, block_tokens)


@attrs.frozen
class KeepsTooLittle(Chunk):
    """Says that the block being filled need not be there."""

    def required(self, length, block_tokens):
        return super().required(length - length % block_tokens, block_tokens)


@attrs.frozen(eq=False)
class ComparesByIdentity(Chunk):
    """A retention that is equal to nothing but itself."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def drops_early(config, *, block_tokens, dtype):
    return sound(config, block_tokens=block_tokens, dtype=dtype, chunk=DropsEarly)


def forgets_rollback(config, *, block_tokens, dtype):
    return sound(config, block_tokens=block_tokens, dtype=dtype, chunk=ForgetsRollback)


def keeps_too_little(config, *, block_tokens, dtype):
    return sound(config, block_tokens=block_tokens, dtype=dtype, chunk=KeepsTooLittle)


def compares_by_identity(config, *, block_tokens, dtype):
    return sound(config, block_tokens=block_tokens, dtype=dtype, chunk=ComparesByIdentity)


def leaves_out_the_dtype(config, *, block_tokens, dtype):
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()
    return sound(config, block_tokens=block_tokens, dtype=dtype, fingerprint=digest)


def leaves_out_a_field(config, *, block_tokens, dtype):
    return sound({**config, "theta": 0}, block_tokens=block_tokens, dtype=dtype)


def hashes_with_hash(config, *, block_tokens, dtype):
    digest = f"{hash((*sorted(config.items()), dtype)) & 0xFFFFFFFF:x}"
    return sound(config, block_tokens=block_tokens, dtype=dtype, fingerprint=digest)


def _against(factory: Callable[..., CacheSpec]) -> type[CacheSpecTests]:
    return type("Mutated", (Sound,), {"factory": f"{__name__}:{factory.__name__}"})


_FAULTS = (
    ("a counter in the fingerprint", "CM-01", counts_its_calls),
    ("writes defaults into its config", "CM-01", takes_from_its_config),
    ("rounds block sizes up", "CM-02", likes_blocks_of_16),
    ("counts query heads for rows", "CM-03", counts_query_heads),
    ("forgets the values of a layer", "CM-03", forgets_a_stream),
    ("drops a block one token early", "CM-04", drops_early),
    ("drops what a rollback reads", "CM-04", forgets_rollback),
    ("does not require the open block", "CM-04", keeps_too_little),
    ("retentions equal to nothing", "CM-04", compares_by_identity),
    ("one fingerprint for two element types", "CM-05", leaves_out_the_dtype),
    ("one fingerprint for two rotations", "CM-05", leaves_out_a_field),
    ("another fingerprint in every process", "CM-06", hashes_with_hash),
)
MUTANTS = tuple(Mutant(name, clause, partial(_against, factory)) for name, clause, factory in _FAULTS)
