"""Small backends of four kinds, cut into methods so that a fault is one method of a subclass; and their suites."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.geometry import GQALayer, gqa_layer, gqa_layers
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError, StateError
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.step import Step
from kvist.testing.attention import AttentionBackendTests, Case, GQABackendTests


class Toy(AttentionBackend):
    """What the four have in common."""

    def __init__(self, context: BackendContext) -> None:
        self.memory = context.memory
        self.block_tokens = context.memory.layout.block_tokens
        self.layers = {layer.id: layer for layer in context.spec.layers}
        self.step: Step | None = None

    def begin(self, step: Step) -> None:
        self.step = step

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        if self.step is None:
            raise StateError("no step")
        layer = self.layers[layer_id]
        starts = self.step.query_starts
        output = self.new_output(layer, inputs)
        for row in range(self.step.row_count):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            length = int(self.step.lengths[row])
            positions = torch.arange(length - (tokens.stop - tokens.start), length)
            self.row(layer, inputs, row, tokens, positions, output)
        return output

    def new_output(self, layer: Layer, inputs: Any) -> torch.Tensor:
        raise NotImplementedError

    def row(
        self, layer: Layer, inputs: Any, row: int, tokens: slice, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        raise NotImplementedError

    def stream(self, layer: Layer, name: str) -> torch.Tensor:
        """``[page, rows, ...]`` of one stream."""
        stream = next(stream for stream in layer.streams if stream.name == name)
        _, part = self.memory.layout.part(layer.id, name)
        return self.memory.view(layer.id, name, (part.row_count, *stream.row.shape), getattr(torch, stream.row.dtype))

    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        """The row's entries in the table of a stream's group."""
        group, _ = self.memory.layout.part(layer.id, name)
        assert self.step is not None
        return torch.from_numpy(self.step.tables[group.index][self.step.slots[row]].astype(np.int64))


class Plain(Toy):
    """Grouped-query attention."""

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        gqa_layers(spec, "plain")
        return RowMajor()

    def new_output(self, layer: Layer, inputs: GQAInputs) -> torch.Tensor:
        return inputs.query.new_empty(*inputs.query.shape[:2], self.geometry(layer).value_size)

    @staticmethod
    def geometry(layer: Layer) -> GQALayer:
        return gqa_layer(layer, "plain")

    def row(
        self, layer: Layer, inputs: GQAInputs, row: int, tokens: slice, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        for name, new in (("k", inputs.key[tokens]), ("v", inputs.value[tokens])):
            self.write(self.stream(layer, name), self.pages(layer, name, row), positions, new)
        mask = self.mask(positions, self.readable(positions), inputs)
        read = torch.nonzero(mask.any(0))[:, 0]
        key, value = (
            self.read(self.stream(layer, name), self.pages(layer, name, row), read).float() for name in ("k", "v")
        )
        output[tokens] = self.attend(inputs.query[tokens].float(), key, value, mask[:, read], inputs).to(output.dtype)

    def readable(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(int(positions[-1]) + 1)

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        view[pages[positions // self.block_tokens], positions % self.block_tokens] = new.to(view.dtype)

    def read(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return view[pages[positions // self.block_tokens], positions % self.block_tokens]

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        distance = queries[:, None] - keys[None, :]
        visible = distance >= 0
        if inputs.window is not None:
            visible &= (distance < inputs.window) | (keys[None, :] < inputs.sink_tokens)
        return visible

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, inputs: GQAInputs
    ) -> torch.Tensor:
        key, value = self.of_query_heads(key, query.shape[1]), self.of_query_heads(value, query.shape[1])
        scores = self.capped(torch.einsum("qhe,khe->hqk", query, key) * inputs.scale, inputs)
        scores = scores.masked_fill(~mask, float("-inf"))
        return torch.einsum("hqk,khv->qhv", self.weights(scores, inputs), value)

    def of_query_heads(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        return rows.repeat_interleave(count // rows.shape[1], dim=1)

    def capped(self, scores: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        return scores if inputs.softcap is None else inputs.softcap * torch.tanh(scores / inputs.softcap)

    def weights(self, scores: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        if inputs.sink_logits is None:
            return torch.softmax(scores, -1)
        sinks = inputs.sink_logits.float()[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]


class PlainSuite(GQABackendTests):
    backend = Plain
    features = frozenset({"window", "sink_tokens", "sink_logits", "softcap"})


@attrs.frozen(eq=False)
class DecayInputs:
    """key, value, query: ``[T, size]``; decay: ``[size]``, learned."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    decay: torch.Tensor


class Decay(Toy):
    """A linear recurrence: ``S = decay * S + key (x) value``, output ``query @ S``; and the sum of the last key."""

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        for layer in spec.layers:
            if [stream.name for stream in layer.streams] != ["memory", "last"]:
                raise SpecError(f"layer {layer.id} needs the streams memory and last")
        return RowMajor()

    def new_output(self, layer: Layer, inputs: DecayInputs) -> torch.Tensor:
        return torch.empty_like(inputs.value)

    def row(
        self, layer: Layer, inputs: DecayInputs, row: int, tokens: slice, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        pages = self.pages(layer, "memory", row)
        views = self.stream(layer, "memory")[:, 0], self.stream(layer, "last")[:, 0]
        memory, last = self.start(views, pages, positions)
        drafts = self.drafts(row)
        for count, token in enumerate(range(tokens.start, tokens.stop), 1):
            memory = inputs.decay[:, None] * memory + inputs.key[token][:, None] * inputs.value[token][None, :]
            output[token] = inputs.query[token] @ memory + last
            last = inputs.key[token].clone()
            if drafts:
                self.save_draft(views, pages, count, (memory, last))
        if not drafts:
            self.save(views, pages, (memory, last))

    def start(self, views: Any, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return views[0][pages[0]].clone(), views[1][pages[0]].clone()

    def save(self, views: Any, pages: torch.Tensor, states: Any) -> None:
        views[0][pages[0]], views[1][pages[0]] = states

    def save_draft(self, views: Any, pages: torch.Tensor, count: int, states: Any) -> None:
        views[0][pages[count]], views[1][pages[count]] = states

    def drafts(self, row: int) -> int:
        assert self.step is not None
        return int(self.step.drafts[row]) if len(self.step.drafts) else 0


def _state_layer(number: int, size: int) -> Layer:
    streams = (("memory", (size, size)), ("last", (size,)))
    return Layer(number, tuple(Stream(name, RowFormat(shape, "float32"), State()) for name, shape in streams))


class DecaySuite(AttentionBackendTests):
    backend = Decay
    cases = (
        Case(name="states", spec=CacheSpec((_state_layer(0, 4), _state_layer(5, 7), _state_layer(6, 4)), 8, "toy")),
    )
    constants = frozenset({"decay"})

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> DecayInputs:
        size = layer.streams[0].row.shape[0]
        draw = (torch.randn(token_count, size, generator=generator) for _ in range(3))
        return DecayInputs(*draw, decay=torch.linspace(0.2, 0.9, size))

    def reference(self, case: Case, layer: Layer, inputs: DecayInputs) -> torch.Tensor:
        """In closed form: token j's share in token i's memory is ``decay ** (i - j)``."""
        age = torch.arange(len(inputs.key))[:, None] - torch.arange(len(inputs.key))[None, :]
        share = inputs.decay[None, None, :] ** age.clamp(min=0)[..., None] * (age >= 0)[..., None]
        output = torch.einsum("ie,ije,je,jv->iv", inputs.query, share, inputs.key, inputs.value)
        output[1:] += inputs.key[:-1]
        return output


@attrs.frozen(eq=False)
class PooledInputs:
    """query, row: ``[T, size]``."""

    query: torch.Tensor
    row: torch.Tensor


class Pooled(Toy):
    """One head over a window of rows, and over the mean of each four tokens that are complete."""

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        for layer in spec.layers:
            if [stream.name for stream in layer.streams] != ["near", "far"]:
                raise SpecError(f"layer {layer.id} needs the streams near and far")
        return RowMajor()

    def new_output(self, layer: Layer, inputs: PooledInputs) -> torch.Tensor:
        return torch.empty_like(inputs.query)

    def row(
        self, layer: Layer, inputs: PooledInputs, row: int, tokens: slice, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        near, far = self.stream(layer, "near"), self.stream(layer, "far")
        near_pages, far_pages = self.pages(layer, "near", row), self.pages(layer, "far", row)
        window, ratio = layer.streams[0].retention.tokens, layer.streams[1].tokens_per_row
        block, per_block = self.block_tokens, self.block_tokens // ratio
        near[near_pages[positions // block], positions % block] = inputs.row[tokens]
        for pool in self.closed(positions, ratio):
            members = torch.arange(pool * ratio, (pool + 1) * ratio)
            mean = self.mean(near[near_pages[members // block], members % block], members, positions)
            self.write_pool(far, far_pages, pool, per_block, mean)
        for position, token in zip(positions.tolist(), range(tokens.start, tokens.stop)):
            rows = torch.arange(max(0, position - window + 1), position + 1)
            pools = torch.arange(self.visible_pools(position, ratio))
            keys = torch.cat(
                [
                    near[near_pages[rows // block], rows % block],
                    far[far_pages[pools // per_block], pools % per_block],
                ]
            )
            output[token] = torch.softmax(keys @ inputs.query[token], 0) @ keys

    def closed(self, positions: torch.Tensor, ratio: int) -> list[int]:
        """Pools whose last token is among the step's."""
        return [int(position) // ratio for position in positions if int(position) % ratio == ratio - 1]

    def mean(self, rows: torch.Tensor, members: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows.mean(0)

    def write_pool(self, far: torch.Tensor, pages: torch.Tensor, pool: int, per_block: int, mean: torch.Tensor) -> None:
        far[pages[pool // per_block], pool % per_block] = mean

    def visible_pools(self, position: int, ratio: int) -> int:
        return (position + 1) // ratio


class PooledSuite(AttentionBackendTests):
    backend = Pooled
    cases = (
        Case(
            name="compressed",
            spec=CacheSpec(
                tuple(
                    Layer(
                        number,
                        (
                            Stream("near", RowFormat((size,), "float32"), Window(6)),
                            Stream("far", RowFormat((size,), "float32"), History(), tokens_per_row=ratio),
                        ),
                    )
                    for number, size, ratio in ((0, 8, 4), (2, 6, 2), (3, 8, 4))
                ),
                8,
                "toy",
            ),
        ),
    )

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> PooledInputs:
        size = layer.streams[0].row.shape[0]
        return PooledInputs(*(torch.randn(token_count, size, generator=generator) for _ in range(2)))

    def reference(self, case: Case, layer: Layer, inputs: PooledInputs) -> torch.Tensor:
        near, far = layer.streams
        ratio, count = far.tokens_per_row, len(inputs.row)
        pools = inputs.row[: count // ratio * ratio].unflatten(0, (-1, ratio)).mean(1)
        keys = torch.cat([inputs.row, pools])
        position = torch.arange(count)
        ends = (torch.arange(len(pools)) + 1) * ratio - 1
        distance = position[:, None] - position[None, :]
        mask = torch.cat([(distance >= 0) & (distance < near.retention.tokens), ends[None, :] <= position[:, None]], 1)
        return torch.softmax((inputs.query @ keys.T).masked_fill(~mask, float("-inf")), 1) @ keys


class Ring(Toy):
    """One head over a window whose rows lie in a ring; the step's own rows come from its inputs."""

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        for layer in spec.layers:
            if [stream.name for stream in layer.streams] != ["row"]:
                raise SpecError(f"layer {layer.id} needs the stream row")
        return RowMajor()

    def new_output(self, layer: Layer, inputs: PooledInputs) -> torch.Tensor:
        return torch.empty_like(inputs.query)

    def row(
        self, layer: Layer, inputs: PooledInputs, row: int, tokens: slice, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        view, pages = self.stream(layer, "row"), self.pages(layer, "row", row)
        window, ring = layer.streams[0].retention.tokens, layer.streams[0].retention.ring
        first, block = int(positions[0]), self.block_tokens
        before = torch.arange(max(0, first - window + 1), first)
        keys = self.keys(view, pages, before, ring, inputs.row[tokens], positions)
        where = torch.cat([before, positions])
        distance = positions[:, None] - where[None, :]
        scores = inputs.query[tokens] @ keys.T
        hidden = (distance < 0) | (distance >= window)
        output[tokens] = torch.softmax(scores.masked_fill(hidden, float("-inf")), 1) @ keys
        for position, new in zip(positions.tolist(), inputs.row[tokens]):
            view[pages[position // block], self.slot(position, ring)] = new

    def keys(
        self,
        view: torch.Tensor,
        pages: torch.Tensor,
        before: torch.Tensor,
        ring: int,
        own: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return torch.cat([view[pages[before // self.block_tokens], self.slot(before, ring)], own])

    def slot(self, position: Any, ring: int) -> Any:
        return position % ring


class RingSuite(AttentionBackendTests):
    backend = Ring
    cases = (
        Case(
            name="ring",
            spec=CacheSpec(
                tuple(
                    Layer(number, (Stream("row", RowFormat((8,), "float32"), Window(5, ring=ring)),))
                    for number, ring in ((0, 7), (1, 8), (2, 7))
                ),
                16,
                "toy",
            ),
        ),
    )

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> PooledInputs:
        return PooledInputs(*(torch.randn(token_count, 8, generator=generator) for _ in range(2)))

    def reference(self, case: Case, layer: Layer, inputs: PooledInputs) -> torch.Tensor:
        position = torch.arange(len(inputs.row))
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < layer.streams[0].retention.tokens)
        return torch.softmax((inputs.query @ inputs.row.T).masked_fill(~mask, float("-inf")), 1) @ inputs.row
