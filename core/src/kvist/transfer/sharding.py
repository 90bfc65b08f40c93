"""Tensor parallelism: which part of every row a rank keeps."""

from __future__ import annotations

import math

import attrs

from kvist.errors import SpecError
from kvist.spec import CacheSpec, Heads, Layer, Replicated, RowFormat, Stream


def sections_of(stream: Stream) -> tuple[int, ...]:
    """Units of the model's whole row, by section; each section is split over the ranks on its own. A row that is not
    split is one unit."""
    sharding = stream.sharding
    if isinstance(sharding, Replicated):
        return (1,)
    return (sharding.count,) if isinstance(sharding, Heads) else sharding.sizes


def shard_count(stream: Stream, rank_count: int) -> int:
    """Distinct parts that ``rank_count`` ranks split the rows into; every part is kept by as many ranks."""
    return 1 if isinstance(stream.sharding, Replicated) else math.gcd(rank_count, *sections_of(stream))


def rank_spec(spec: CacheSpec, rank_count: int) -> CacheSpec:
    """What each of ``rank_count`` tensor-parallel ranks keeps of ``spec``, which describes the whole model.

    A row of ``n`` heads is cut into ``gcd(n, rank_count)`` equal shards: 2 heads on 4 ranks are 2 shards, each kept by
    2 ranks. The streams' ``sharding`` stays that of the model. Raises SpecError for rows whose axis 0 is not what their
    sharding says, and for rows with scales that would have to be split.
    """
    if rank_count < 1:
        raise SpecError(f"{rank_count} tensor-parallel ranks")
    layers = [
        Layer(layer.id, [_shard(layer.id, stream, rank_count) for stream in layer.streams]) for layer in spec.layers
    ]
    return attrs.evolve(spec, layers=layers)


def _shard(layer_id: int, stream: Stream, rank_count: int) -> Stream:
    if isinstance(stream.sharding, Replicated):
        return stream
    where, units = f"layer {layer_id} stream {stream.name!r}", sum(sections_of(stream))
    if stream.row.shape[:1] != (units,):
        raise SpecError(f"{where}: its sharding is of {units} units, its rows have the shape {stream.row.shape}")
    count = shard_count(stream, rank_count)
    if count == 1:
        return stream
    if stream.row.scale is not None:
        raise SpecError(
            f"{where}: rows with scales cannot be split over {rank_count} ranks",
            hint="store the scales as a stream of their own, with a sharding of their own",
        )
    return attrs.evolve(stream, row=RowFormat((units // count, *stream.row.shape[1:]), stream.row.dtype))
