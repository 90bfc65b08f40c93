"""A stand-in for the manager: random sequences, shuffled page tables, poisoned memory, steps built by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.gqa import GQAInputs
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream, Window
from kvist.step import NO_PAGE, Step

POISON = 0xFF  # bytes of ones are NaN in every float type


@attrs.frozen
class Case:
    """One model: what its layers are, and how attention reads them."""

    heads: int = 2
    group_size: int = 1
    key_size: int = 16
    value_size: int = 16
    block_tokens: int = 16
    dtype: str = "float32"
    compute: str = "float32"
    window: int | None = None
    sink_tokens: int = 0
    sink_logits: bool = False
    softcap: float | None = None
    scale: float = 0.25
    layers: int = 1

    def spec(self) -> CacheSpec:
        retention = History() if self.window is None else Window(self.window, self.sink_tokens)
        streams = tuple(
            Stream(name, RowFormat((self.heads, size), self.dtype), retention, sharding=Heads(self.heads))
            for name, size in (("k", self.key_size), ("v", self.value_size))
        )
        return CacheSpec(tuple(Layer(3 * n, streams) for n in range(self.layers)), self.block_tokens, "test")


def oracle(case: Case, query: Any, key: Any, value: Any, sink: Any, first: int, length: int) -> np.ndarray:
    """Dense float64 attention of positions ``first .. length - 1``, one query and head at a time, no paging."""
    output = np.zeros((length - first, query.shape[1], value.shape[2]))
    for position in range(first, length):
        read = np.arange(position + 1)
        if case.window is not None:
            read = read[(read > position - case.window) | (read < case.sink_tokens)]
        for head in range(query.shape[1]):
            scores = case.scale * key[read, head // case.group_size] @ query[position, head]
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            peak = max(scores.max(), sink[head]) if case.sink_logits else scores.max()
            weights = np.exp(scores - peak)
            total = weights.sum() + (np.exp(sink[head] - peak) if case.sink_logits else 0.0)
            output[position - first, head] = weights / total @ value[read, head // case.group_size]
    return output


class Cache:
    """Plays manager and engine for one backend and checks every output against :func:`oracle`."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        case: Case,
        total_tokens: Sequence[int],
        seed: int = 0,
        tolerance: float = 1e-5,
        spare_pages: int = 5,
    ) -> None:
        self.case = case
        self.tolerance = tolerance
        self.random = np.random.default_rng(seed)
        spec = case.spec()
        blocks = sum(-(-total // case.block_tokens) for total in total_tokens)
        layout = Layout.build(spec, 1 << 28, backend.page_layout(spec))
        page_bytes = layout.groups[0].page_bytes
        layout = Layout.build(spec, page_bytes * (blocks + spare_pages + 2), backend.page_layout(spec))
        self.memory = DeviceMemory(layout)
        self.memory.bytes.fill_(POISON)
        self.backend = backend(BackendContext(self.memory))
        self.group = layout.groups[0]
        self.free = list(self.random.permutation(np.arange(1, len(self.memory.pages(0)))))
        self.totals = list(total_tokens)
        self.computed = [0] * len(self.totals)
        # Slots of the table are in another order than the rows of any step.
        self.slots = self.random.permutation(len(self.totals)).astype(np.int32)
        width = max((-(-total // case.block_tokens) for total in self.totals), default=0)
        self.table = np.full((len(self.totals), width), NO_PAGE, np.int32)
        q_heads = case.heads * case.group_size
        self.layer_ids = [layer.id for layer in spec.layers]
        self.content = {
            (layer, index): (
                self._random(total, q_heads, case.key_size),
                self._random(total, case.heads, case.key_size, case.dtype),
                self._random(total, case.heads, case.value_size, case.dtype),
            )
            for layer in self.layer_ids
            for index, total in enumerate(self.totals)
        }
        self.sink = self.random.normal(size=q_heads) * 2
        self.steps = 0

    def _random(self, *shape: Any) -> np.ndarray:
        """Normal values that the compute dtype, and the storage dtype if named, hold exactly."""
        names = [self.case.compute] + ([shape[-1]] if isinstance(shape[-1], str) else [])
        value = torch.from_numpy(self.random.normal(size=[n for n in shape if not isinstance(n, str)]))
        for name in sorted(names, key=lambda name: getattr(torch, name).itemsize):
            value = value.to(getattr(torch, name)).double()
        return value.numpy()

    def step(self, chunks: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Compute ``(sequence, tokens)`` chunks in one step, check every layer, return the outputs."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
        block_tokens = self.case.block_tokens
        for index, tokens in chunks:
            end = self.computed[index] + tokens
            assert tokens >= 1
            assert end <= self.totals[index]
            row = self.table[self.slots[index]]
            for block in range(self.computed[index] // block_tokens, -(-end // block_tokens)):
                if row[block] == NO_PAGE:
                    row[block] = self.free.pop()
        step = Step(
            id=self.steps,
            slots=self.slots[[index for index, _ in chunks]],
            query_lengths=np.array([tokens for _, tokens in chunks], np.int32),
            lengths=np.array([self.computed[index] + tokens for index, tokens in chunks], np.int32),
            decode_rows=sum(tokens == 1 for _, tokens in chunks),
            tables=(self._read_only(self.table),),
            copies=(np.zeros((0, 2), np.int32),),
        )
        self.steps += 1
        self.backend.begin(step)
        outputs = []
        for layer in self.layer_ids:
            output = self.backend.forward(layer, self._inputs(layer, chunks)).clone()
            assert output.dtype == getattr(torch, self.case.compute)
            self._check(layer, chunks, output)
            outputs.append(output)
        for index, tokens in chunks:
            self.computed[index] += tokens
            self._drop(index)
        self.check_free_pages()
        return outputs

    def play(self, seed: int) -> None:
        """Random ragged steps until every sequence is computed: single tokens, splits at block borders, long chunks."""
        random = np.random.default_rng(seed)
        while open_ones := [n for n, total in enumerate(self.totals) if self.computed[n] < total]:
            chunks = []
            for index in random.permutation(open_ones)[: random.integers(1, len(open_ones) + 1)]:
                left = self.totals[index] - self.computed[index]
                to_border = self.case.block_tokens - self.computed[index] % self.case.block_tokens
                wish = random.choice([1, 1, 2, 5, to_border, to_border + 1, 40])
                chunks.append((int(index), int(min(left, wish))))
            self.step(chunks)

    def check_free_pages(self) -> None:
        """Pages that no table names are as they were."""
        used = {int(page) for page in self.table.ravel()}
        pages = self.memory.pages(0).numpy()
        for page in range(len(pages)):
            if page not in used:
                assert (pages[page] == POISON).all(), f"page {page} was written"

    @staticmethod
    def _read_only(table: np.ndarray) -> np.ndarray:
        view = table.view()
        view.flags.writeable = False
        return view

    def _drop(self, index: int) -> None:
        row = self.table[self.slots[index]]
        length = self.computed[index]
        live = {n for low, high in self.group.retention.live(length, self.case.block_tokens) for n in range(low, high)}
        for block, page in enumerate(row):
            if page != NO_PAGE and block not in live:
                self.memory.pages(0)[int(page)] = POISON
                self.free.insert(0, page)
                row[block] = NO_PAGE

    def _inputs(self, layer: int, chunks: Sequence[tuple[int, int]]) -> GQAInputs:
        compute = getattr(torch, self.case.compute)
        parts = []
        for which in range(3):
            pieces = [
                self.content[layer, index][which][self.computed[index] : self.computed[index] + tokens]
                for index, tokens in chunks
            ]
            empty = self.content[layer, 0][which][:0]
            parts.append(torch.from_numpy(np.concatenate([empty, *pieces])).to(compute))
        sink = torch.from_numpy(self.sink).to(torch.float32) if self.case.sink_logits else None
        return GQAInputs(*parts, self.case.scale, self.case.window, self.case.sink_tokens, sink, self.case.softcap)

    def _check(self, layer: int, chunks: Sequence[tuple[int, int]], output: torch.Tensor) -> None:
        start = 0
        sink = self.sink.astype(np.float32).astype(np.float64)
        for index, tokens in chunks:
            first = self.computed[index]
            expected = oracle(self.case, *self.content[layer, index], sink, first, first + tokens)
            got = output[start : start + tokens].double().numpy()
            np.testing.assert_allclose(got, expected, rtol=self.tolerance, atol=self.tolerance)
            start += tokens
        assert start == len(output)


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., Cache]:
    return Cache


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return Case
