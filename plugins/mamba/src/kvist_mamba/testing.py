"""Conformance tests for backends of recurrent layers: subclass :class:`RecurrentBackendTests`.

The clauses are in ``docs/reference/contract/backends.md``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kvist.spec import Layer
from kvist.testing.attention import AttentionBackendTests, Case
from kvist_mamba.inputs import (
    KINDS,
    STREAMS,
    DeltaNetInputs,
    Mamba1Inputs,
    Mamba2Inputs,
    RecurrentInputs,
    ShortConvInputs,
)
from kvist_mamba.spec import cache_spec

_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1000}
#: Two layers of each kind; what else the models have is served by others.
CONFIGS = {
    "mamba1": {"model_type": "mamba", "hidden_size": 12, "state_size": 5, "num_hidden_layers": 2},
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 10,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 5,
        "n_groups": 2,
        "state_size": 3,
    },
    "delta_net": {
        **_ATTENTION,
        "model_type": "qwen3_next",
        "hidden_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    },
    "short_conv": {
        **_ATTENTION,
        "model_type": "lfm2",
        "hidden_size": 16,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
    },
}


def recurrent_case(kind: str, dtype: str = "float32", **options: Any) -> Case:
    """Two layers of one kind of mixer. options: of :func:`kvist_mamba.cache_spec`."""
    name = "-".join([kind, dtype, *(["replay"] if options else [])])
    spec = cache_spec(CONFIGS[kind], block_tokens=8, dtype=dtype, **options).only(STREAMS)
    return Case(name=name, spec=spec, dtype=dtype, features=frozenset({kind}))


def _kind_of(case: Case) -> str:
    return next(iter(case.features))


def _shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    return {stream.name: stream.row.shape for stream in layer.streams}


class RecurrentBackendTests(AttentionBackendTests):
    """Fill in ``backend``, and ``features`` with the kinds of mixers that it serves."""

    cases = tuple(recurrent_case(kind) for kind in KINDS)
    constants = frozenset({"conv_weight", "conv_bias", "a", "d", "dt_bias"})

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> RecurrentInputs:
        """What is learned depends on the layer alone."""
        learned = torch.Generator().manual_seed(layer.id)
        dtype, kind, shape = getattr(torch, case.dtype), _kind_of(case), _shapes(layer)
        channels, columns = shape["conv_state"]

        def draw(*sizes: int, by: torch.Generator = learned) -> torch.Tensor:
            return torch.randn(*sizes, generator=by).to(dtype)

        conv = {
            "conv_inputs": draw(token_count, channels, by=generator),
            "conv_weight": draw(channels, columns + 1),
            "conv_bias": draw(channels) if kind.startswith("mamba") else None,
        }
        if kind == "short_conv":
            return ShortConvInputs(**conv)
        state = shape["recurrent_state"]
        if kind == "delta_net":
            log_decay = -F.softplus(torch.randn(token_count, state[0], generator=generator) - 1)
            return DeltaNetInputs(**conv, log_decay=log_decay, beta=draw(token_count, state[0], by=generator).sigmoid())
        heads = state[0]
        scan = {"a": -torch.rand(state[:1] if kind == "mamba2" else state, generator=learned), "d": draw(heads)}
        if kind == "mamba2":
            return Mamba2Inputs(**conv, **scan, dt=draw(token_count, heads, by=generator), dt_bias=draw(heads))
        # Products of one token at a time: those of a batch sum in an order that depends on its size.
        parts = [draw(size, heads) / heads**0.5 for size in (heads, state[1], state[1])]

        def select(u: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple((u[:, None, :] * part.to(u.dtype)).sum(-1) for part in parts)

        return Mamba1Inputs(**conv, **scan, select=select, dt_bias=draw(heads) - 2)

    def reference(self, case: Case, layer: Layer, inputs: RecurrentInputs) -> torch.Tensor:
        """Without any state: what each token reads of each one before it, as a sum over all of them."""
        count, channels = inputs.conv_inputs.shape
        raw = F.pad(inputs.conv_inputs.T[None], (inputs.conv_weight.shape[1] - 1, 0))
        conv = F.conv1d(raw, inputs.conv_weight[:, None], inputs.conv_bias, groups=channels)[0].T
        if isinstance(inputs, ShortConvInputs):
            return conv
        u, state = F.silu(conv), _shapes(layer)["recurrent_state"]
        if isinstance(inputs, Mamba1Inputs):
            dt, b, c = inputs.select(u)
            dt = F.softplus(dt + inputs.dt_bias)
            total = (dt[:, :, None] * inputs.a).cumsum(0)  # [T, E, N]
            later = torch.ones(count, count).tril()[:, :, None, None]
            decay = later * (total[:, None] - total[None, :]).clamp(max=0).exp()
            return torch.einsum("ijen,in,jn,je->ie", decay, c, b, dt * u) + inputs.d * u
        if isinstance(inputs, Mamba2Inputs):
            return self._mamba2(inputs, u, state)
        assert isinstance(inputs, DeltaNetInputs)
        return self._delta_net(inputs, u, state)

    def _mamba2(self, inputs: Mamba2Inputs, u: torch.Tensor, state: tuple[int, ...]) -> torch.Tensor:
        heads, size, columns = state
        groups = (u.shape[1] - heads * size) // (2 * columns)
        dt, outputs = F.softplus(inputs.dt + inputs.dt_bias), []
        for head in range(heads):
            x = u[:, head * size :][:, :size]
            first = heads * size + head // (heads // groups) * columns
            b, c = u[:, first:][:, :columns], u[:, first + groups * columns :][:, :columns]
            total = (dt[:, head] * inputs.a[head]).cumsum(0)
            left = (total[:, None] - total[None, :]).clamp(max=0).exp().tril()
            outputs.append((left * (c @ b.T)) @ (dt[:, head, None] * x) + inputs.d[head] * x)
        return torch.cat(outputs, dim=1)

    def _delta_net(self, inputs: DeltaNetInputs, u: torch.Tensor, state: tuple[int, ...]) -> torch.Tensor:
        heads, key_size, value_size = state
        keys = (u.shape[1] - heads * value_size) // 2
        outputs = []
        for head in range(heads):
            at = head // (heads // (keys // key_size)) * key_size
            q, k = (u[:, first + at :][:, :key_size] for first in (0, keys))
            q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
            v = u[:, 2 * keys + head * value_size :][:, :value_size]
            total = inputs.log_decay[:, head].cumsum(0)
            left = (total[:, None] - total[None, :]).clamp(max=0).exp().tril()
            beta = inputs.beta[:, head, None]
            system = torch.eye(len(u), dtype=u.dtype) + beta * (left * (k @ k.T)).tril(-1)
            written = torch.linalg.solve(system, beta * v)
            outputs.append(key_size**-0.5 * (left * (q @ k.T)) @ written)
        return torch.cat(outputs, dim=1)
