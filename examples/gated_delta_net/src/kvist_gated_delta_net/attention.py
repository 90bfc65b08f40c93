"""Convolution and gated delta rule over states in pages, in plain torch.

The formulas are those of "Gated Delta Networks" (arXiv 2412.06464), as Qwen3-Next has them.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from kvist import CacheSpec, SpecError, Step
from kvist.attention.base import AttentionBackend, BackendContext
from kvist.errors import StateError
from kvist.layout import PageLayout, RowMajor
from kvist_gated_delta_net.spec import CONV, MEMORY


@attrs.frozen(eq=False)
class GatedDeltaInputs:
    """One linear layer's inputs, flattened over the rows of a step.

    mixed: ``[tokens, channels]``, queries, keys and values before the convolution.
    decay: ``[tokens, value heads]``, logarithm of what remains of the memory, at most 0.
    beta: ``[tokens, value heads]``, how much of the new value is written, 0 to 1.
    weight: ``[channels, width]``, the convolution's, learned; the last column meets the token itself.
    """

    mixed: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor


@attrs.frozen(eq=False)
class _Row:
    """tokens: the row's tokens in the batch. source: the page of the state before them. targets: pages of states to
    write, with the number of tokens after which each is taken."""

    tokens: slice
    source: int
    targets: list[tuple[int, int]]


@attrs.frozen(eq=False)
class _Layer:
    """conv: ``[page, channels, width - 1]``. memory: ``[page, value heads, key size, value size]``. Views."""

    conv: torch.Tensor
    memory: torch.Tensor
    group: int


class GatedDeltaBackend(AttentionBackend):
    """Token by token, in float32. Where a layer's states come from and go to is all that a cache changes."""

    name = "gated-delta-net-torch"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Rows as the spec describes them. Raises SpecError for layers without the two states."""
        for layer in spec.layers:
            names = [stream.name for stream in layer.streams]
            if names != [CONV, MEMORY]:
                raise SpecError(f"layer {layer.id} has streams {names}, expected {[CONV, MEMORY]}")
            conv, memory = (stream.row.shape for stream in layer.streams)
            if len(conv) != 2 or len(memory) != 3 or not all(stream.retention.exact for stream in layer.streams):
                raise SpecError(f"layer {layer.id}: its streams are no states of a gated delta net")
            if _key_heads(conv, memory)[1]:
                raise SpecError(f"layer {layer.id}: {conv[0]} channels do not fit a memory of {memory}")
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        layout = context.memory.layout
        self._layers = {}
        for layer in context.spec.layers:
            conv, memory = (
                context.memory.view(layer.id, stream.name, stream.row.shape, getattr(torch, stream.row.dtype))
                for stream in layer.streams
            )
            self._layers[layer.id] = _Layer(conv, memory, layout.part(layer.id, MEMORY)[0].index)
        self._groups = {layer.group for layer in self._layers.values()}
        self._rows: dict[int, list[_Row]] | None = None

    def begin(self, step: Step) -> None:
        """Which pages states are read from and written to, by group."""
        drafts = step.drafts if len(step.drafts) else np.zeros(step.row_count, np.int32)
        starts, rows = step.query_starts.tolist(), {}
        for group in self._groups:
            rows[group] = []
            for row, slot in enumerate(step.slots.tolist()):
                tokens, pages = slice(starts[row], starts[row + 1]), step.tables[group][slot]
                count = tokens.stop - tokens.start
                # Any of the drafts may be the last one that stays: keep the state after each token, and the first one.
                after = range(1, count + 1) if drafts[row] else [count]
                targets = [(each, int(pages[each if drafts[row] else 0])) for each in after]
                rows[group].append(_Row(tokens, int(pages[0]), targets))
        self._rows = rows

    def forward(self, layer_id: int, inputs: GatedDeltaInputs) -> torch.Tensor:
        """``[tokens, value heads, value size]`` in the dtype of ``mixed``, a new tensor."""
        if self._rows is None:
            raise StateError("forward() before begin()")
        layer = self._layers[layer_id]
        _, heads, _, value_size = layer.memory.shape
        output = inputs.mixed.new_empty(len(inputs.mixed), heads, value_size)
        for row in self._rows[layer.group]:
            mixed = inputs.mixed[row.tokens].to(layer.conv.dtype).T
            window = torch.cat([layer.conv[row.source], mixed], dim=1)
            convolved = F.silu(F.conv1d(window.float()[None], inputs.weight.float()[:, None], groups=len(window))[0]).T
            query, key, value = self._heads(layer, convolved)
            decay, beta = inputs.decay[row.tokens].float().exp(), inputs.beta[row.tokens].float()
            memory, states = layer.memory[row.source].float(), []
            for token in range(len(value)):
                memory = memory * decay[token, :, None, None]
                known = torch.einsum("hkv,hk->hv", memory, key[token])
                memory = memory + torch.einsum("hk,hv->hkv", key[token], beta[token, :, None] * (value[token] - known))
                output[row.tokens.start + token] = torch.einsum("hkv,hk->hv", memory, query[token])
                states.append(memory)
            for count, page in row.targets:
                layer.conv[page] = window[:, count : count + layer.conv.shape[2]]
                layer.memory[page] = states[count - 1].to(layer.memory.dtype)
        return output

    @staticmethod
    def _heads(layer: _Layer, convolved: torch.Tensor) -> list[torch.Tensor]:
        """Queries and keys of unit length, queries scaled, and values: each ``[tokens, value heads, size]``."""
        _, heads, key_size, value_size = layer.memory.shape
        key_heads = _key_heads(layer.conv.shape[1:], layer.memory.shape[1:])[0]
        parts = convolved.split([key_heads * key_size, key_heads * key_size, heads * value_size], dim=1)
        query, key, value = (
            part.unflatten(1, (-1, size)) for part, size in zip(parts, (key_size, key_size, value_size))
        )
        query, key = (
            (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads // key_heads, 1)
            for each in (query, key)
        )
        return [query * key_size**-0.5, key, value]


def _key_heads(conv: tuple[int, ...], memory: tuple[int, ...]) -> tuple[int, int]:
    """Key heads of a layer, and how many channels are left over."""
    heads, key_size, value_size = memory
    return divmod(conv[0] - heads * value_size, 2 * key_size)
