"""DeepSeek-V4's kernels beside plain torch, at V4-Flash's sizes: one layer that compresses 4 tokens, and one of 128."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from kernel_case import Kernel

from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.step import Step


@attrs.frozen
class Sizes:
    """A batch of decoding sequences of ``context`` tokens, and one prompt's last chunk. The context is a multiple of
    128: every sequence closes a window of each kind."""

    context: int = 32_768
    sequences: int = 16
    chunk: int = 512
    heads: int = 64
    size: int = 512
    rope: int = 64
    index_heads: int = 64
    index_size: int = 128
    topk: int = 512
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes(
    context=256,
    sequences=2,
    chunk=5,
    heads=4,
    size=32,
    rope=16,
    index_heads=4,
    index_size=32,
    topk=8,
    dtype=torch.float32,
)

#: Layers of the spec.
_SPARSE, _HEAVY = 0, 1
_RATIOS = {_SPARSE: 4, _HEAVY: 128}


class _Cache:
    """A cache full of random rows, with shuffled pages, and a step of the last ``queries`` tokens of each sequence."""

    def __init__(self, device: torch.device, sizes: Sizes, sequences: int, queries: int) -> None:
        from kvist_deepseek_v4.kernels.batch import Batch
        from kvist_deepseek_v4.rows import StreamRows
        from kvist_deepseek_v4.spec import cache_spec

        self.sizes, self.device, self.queries = sizes, device, queries
        self._generator = torch.Generator(device).manual_seed(0)
        config = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [4, 128]}
        config |= {"head_dim": sizes.size, "index_head_dim": sizes.index_size, "qk_rope_head_dim": sizes.rope}
        dtype = str(sizes.dtype).removeprefix("torch.")
        spec = cache_spec(config, block_tokens=128, dtype=dtype)
        blocks = sizes.context // 128
        page_bytes = sum(group.page_bytes for group in Layout.build(spec, 1 << 40).groups)
        layout = Layout.build(spec, (sequences * blocks + 64) * page_bytes)
        memory = DeviceMemory(layout, device)
        self.rows = {
            layer.id: {each.name: StreamRows.of(memory, layer.id, each) for each in layer.streams}
            for layer in spec.layers
        }
        for streams in self.rows.values():
            for rows in streams.values():
                # Random rows, but in page 0 nobody's.
                rows.views[0][1:] = self.random(*rows.views[0][1:].shape).to(rows.views[0].dtype)
        order = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32) + 1
        self.table = order.reshape(sequences, blocks)
        slots = np.arange(sequences, dtype=np.int32)
        step = Step(
            0,
            slots,
            np.full(sequences, queries, np.int32),
            np.full(sequences, sizes.context, np.int32),
            sequences if queries == 1 else 0,
            (self.table,) * len(layout.groups),
            (np.zeros((0, 2), np.int32),) * len(layout.groups),
        )
        self.batch = Batch(device, layout, set(range(len(layout.groups))))
        self.batch.stage(step)
        self.tokens = sequences * queries
        self.positions = torch.from_numpy(step.positions).to(device)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def gathered(self, layer: int, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[sequences, ...]`` of each sequence out of their pages."""
        stream = self.rows[layer][name]
        table = torch.from_numpy(self.table).to(self.device).long()
        sequence = torch.arange(len(table), device=self.device).view(-1, *[1] * (rows.ndim - 1))
        return stream.views[0][table[sequence, rows // stream.block_rows], rows % stream.slots]


def kernels(device: torch.device, sizes: Sizes) -> Iterator[Kernel]:
    """States, compressed rows, scores, selection and attention of a decoding batch, and attention of a chunk."""
    tolerance = 1e-4 if sizes.dtype == torch.float32 else 2e-2
    decode = _Cache(device, sizes, sizes.sequences, 1)
    yield _states(decode)
    for layer, figure in ((_SPARSE, "compressed_4"), (_HEAVY, "compressed_128")):
        yield _compressed(decode, layer, f"kernels.deepseek_v4_{figure}", tolerance)
    yield from _selection(decode, tolerance)
    ids = _ids(decode)
    yield _attention(decode, _SPARSE, ids, "kernels.deepseek_v4_decode", tolerance)
    yield _attention(decode, _HEAVY, None, "kernels.deepseek_v4_decode_128", tolerance)
    prefill = _Cache(device, sizes, 1, sizes.chunk)
    yield _attention(prefill, _SPARSE, _ids(prefill), "kernels.deepseek_v4_prefill", tolerance)


def _states(cache: _Cache) -> Kernel:
    from kvist_deepseek_v4.kernels.write import write_states

    rows, size = cache.rows[_SPARSE]["state"], cache.sizes.size
    own, bias = cache.random(cache.tokens, 2, 2 * size), cache.random(4, 2 * size)
    [view] = rows.views
    table = torch.from_numpy(cache.table).to(cache.device).long()
    pages, slots = table[:, cache.positions[0] // 128], cache.positions % rows.slots

    def ours() -> torch.Tensor:
        write_states(rows, own, bias, cache.batch)
        return view[pages, slots]

    def theirs() -> torch.Tensor:
        view[pages, slots] = torch.stack((own[:, 0], own[:, 1] + bias[cache.positions % 4]), dim=1)
        return view[pages, slots]

    return Kernel("kernels.deepseek_v4_states", ours, theirs, 1e-6)


def _compressed(cache: _Cache, layer: int, figure: str, tolerance: float) -> Kernel:
    from kvist_deepseek_v4.compress import norm, pool, rotate
    from kvist_deepseek_v4.kernels.compress import compress

    ratio, size = _RATIOS[layer], cache.sizes.size
    series = 2 if ratio == 4 else 1
    rows, states = cache.rows[layer]["compressed"], cache.rows[layer]["state"]
    own, bias = cache.random(cache.tokens, 2, series * size), cache.random(ratio, series * size)
    weight = 1 + 0.1 * cache.random(size)
    frequencies = 1.0 / torch.arange(1, cache.sizes.rope // 2 + 1, device=cache.device)
    window = (cache.sizes.context - 1) // ratio
    place = torch.full((len(cache.table),), window, device=cache.device)
    first = (window - series + 1) * ratio
    before = torch.arange(first, cache.sizes.context - 1, device=cache.device).expand(len(cache.table), -1)

    def ours() -> torch.Tensor:
        compress(states, rows, own, bias, weight, frequencies, 1e-6, cache.batch)
        return cache.gathered(layer, "compressed", place)

    def theirs() -> torch.Tensor:
        new = torch.stack((own[:, 0], own[:, 1] + bias[-1]), dim=1)
        known = torch.cat((cache.gathered(layer, "state", before), new[:, None]), dim=1)
        pooled = torch.cat([pool(each, ratio, series == 2) for each in known])
        return rotate(norm(pooled, weight, 1e-6), place * ratio, frequencies).to(cache.sizes.dtype)

    return Kernel(figure, ours, theirs, tolerance)


def _index(cache: _Cache) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = cache.sizes
    query = cache.random(cache.tokens, sizes.index_heads, sizes.index_size).to(sizes.dtype)
    return query, cache.random(cache.tokens, sizes.index_heads) / (sizes.index_heads * sizes.index_size) ** 0.5


def _scores(cache: _Cache, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All scores of the step in kernels, ``[T, rows]``."""
    from kvist_deepseek_v4.kernels.score import QUERIES, index_scores

    count = len(cache.batch.tiles(QUERIES).on_host)
    columns = cache.sizes.context // 4
    return index_scores(query, weights, cache.rows[_SPARSE]["index_k"], 4, cache.batch, 0, count, columns)


def _ids(cache: _Cache) -> torch.Tensor:
    from kvist_deepseek_v4.kernels.select import select

    return select(_scores(cache, *_index(cache)), cache.batch.positions, 4, cache.sizes.topk)


def _selection(cache: _Cache, tolerance: float) -> Iterator[Kernel]:
    from kvist_deepseek_v4.kernels.select import select
    from kvist_deepseek_v4.selection import index_scores as plain_scores
    from kvist_deepseek_v4.selection import select as plain_select

    query, weights = _index(cache)
    every = torch.arange(cache.sizes.context // 4, device=cache.device).expand(len(cache.table), -1)
    visible = (cache.positions + 1) // 4

    def theirs() -> torch.Tensor:
        keys = cache.gathered(_SPARSE, "index_k", every)
        scores = [
            plain_scores(query[token : token + 1], weights[token : token + 1], keys[token])
            for token in range(len(query))
        ]
        return torch.cat(scores)

    yield Kernel("kernels.deepseek_v4_scores", lambda: _scores(cache, query, weights), theirs, tolerance)
    scores = _scores(cache, query, weights)
    yield Kernel(
        "kernels.deepseek_v4_selection",
        lambda: select(scores, cache.batch.positions, 4, cache.sizes.topk),
        lambda: plain_select(scores, visible, cache.sizes.topk).int(),
    )


def _attention(cache: _Cache, layer: int, ids: torch.Tensor | None, figure: str, tolerance: float) -> Kernel:
    from kvist_deepseek_v4.kernels.attend import attend

    sizes, ratio = cache.sizes, _RATIOS[layer]
    streams: Mapping[str, Any] = cache.rows[layer]
    query = cache.random(cache.tokens, sizes.heads, sizes.size).to(sizes.dtype)
    own = cache.random(cache.tokens, sizes.size).to(sizes.dtype)
    sinks, scale = cache.random(sizes.heads), sizes.size**-0.5
    begin = sizes.context - cache.queries
    behind = torch.arange(max(0, begin - 127), begin, device=cache.device).expand(len(cache.table), -1)
    every = torch.arange(sizes.context // ratio, device=cache.device).expand(len(cache.table), -1)

    def ours() -> torch.Tensor:
        return attend(query, scale, sinks, streams["kv"], own, 128, streams["compressed"], ratio, ids, cache.batch)

    def theirs() -> torch.Tensor:
        window = torch.cat(
            (cache.gathered(layer, "kv", behind), own.unflatten(0, (len(cache.table), cache.queries))), dim=1
        )
        pool = cache.gathered(layer, "compressed", every)
        parts = []
        for token in range(cache.tokens):
            sequence, number = divmod(token, cache.queries)
            end = window.shape[1] - cache.queries + number + 1
            seen = int((cache.positions[token] + 1) // ratio)
            chosen = pool[sequence, :seen] if ids is None else pool[sequence, ids[token][ids[token] >= 0].long()]
            keys = torch.cat((window[sequence, max(0, end - 128) : end], chosen)).float()
            scores = torch.cat((query[token].float() @ keys.T * scale, sinks[:, None]), dim=1)
            parts.append(scores.softmax(-1)[:, :-1] @ keys)
        return torch.stack(parts).to(sizes.dtype)

    return Kernel(figure, ours, theirs, tolerance)
