"""The recurrent mixers over pages in Triton kernels."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec
from kvist.step import Step
from kvist_mamba.geometry import RecurrentLayer, check_inputs, recurrent_layers
from kvist_mamba.inputs import (
    CHECKPOINT,
    CONV_HISTORY,
    CONV_STATE,
    GATE_HISTORY,
    RECURRENT_STATE,
    DeltaNetInputs,
    Mamba1Inputs,
    Mamba2Inputs,
    RecurrentInputs,
    ShortConvInputs,
)
from kvist_mamba.kernels.conv import convolve
from kvist_mamba.kernels.delta_net import delta_net_scan
from kvist_mamba.kernels.mamba1 import mamba1_scan
from kvist_mamba.kernels.mamba2 import mamba2_scan
from kvist_mamba.kernels.replay import ReplayRows
from kvist_mamba.kernels.rows import Rows
from kvist_mamba.reference import gates_of, with_tokens

_DTYPES = ("float32", "float16", "bfloat16")


class TritonBackend(AttentionBackend):
    """All rows of a step at once, states addressed by page. Computes in float32.

    Serves every kind of mixer and both ways to take drafts back. Pages are arranged as the reference arranges them, so
    either may go on where the other stopped. The values of padding rows are zero. With replay, a page whose checkpoint
    is not the row's is found on the device, where nothing can be raised: the row's values are NaN, its page stays.
    """

    name = "mamba-triton"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major. Raises SpecError for states of float64."""
        recurrent_layers(spec, cls.name, _DTYPES, replays=True)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        self._memory = context.memory
        self._layers = recurrent_layers(context.spec, self.name, _DTYPES, replays=True)
        self._groups = {layer: context.memory.layout.part(layer, CONV_STATE)[0].index for layer in self._layers}
        device = context.memory.device
        self._rows: dict[int, Rows] = {}
        #: By group of states with replay: its rows, and positions in one of its layers, for all have the same.
        self._replays: dict[int, tuple[ReplayRows, torch.Tensor]] = {}
        for layer, group in self._groups.items():
            history = self._layers[layer].history
            if history and group not in self._replays:
                self._replays[group] = ReplayRows(device, history), self._positions(layer)
            elif not history:
                self._rows.setdefault(group, Rows(device))
        self._step: Step | None = None

    def begin(self, step: Step) -> None:
        """Stage the pages of the step's states, once for all layers. Raises StateError for a row without a page."""
        for group, rows in self._rows.items():
            rows.stage(step, group)
        for group, (replay, positions) in self._replays.items():
            replay.stage(step, group)
            replay.turn(positions)
        self._step = step

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Advance the layer's states by the step's tokens. ``inputs`` is a :class:`RecurrentInputs`; the result is a
        new tensor ``[token_count, width]`` in the dtype of the convolution's inputs.

        Raises StateError before the first ``begin``, SpecError for inputs that do not fit the layer.
        """
        assert isinstance(inputs, RecurrentInputs)
        layer, group = self._layers[layer_id], self._groups[layer_id]
        check_inputs(layer, inputs, self._step)
        if layer.history:
            return self._replay(layer, inputs, self._replays[group][0])
        return self._advance(layer, inputs, self._rows[group])

    def _replay(self, layer: RecurrentLayer, inputs: RecurrentInputs, rows: ReplayRows) -> torch.Tensor:
        gates = gates_of(inputs, torch.float32)
        own = [inputs.conv_inputs] + ([] if gates is None else [gates])
        kept = [self._view(layer, stream) for stream, _ in zip((CONV_HISTORY, GATE_HISTORY), own)]
        joined = [rows.join(history, new) for history, new in zip(kept, own)]
        values = self._advance(layer, with_tokens(inputs, *joined), rows)
        for history, tokens in zip(kept, joined):
            rows.keep(history, tokens)
        rows.move(self._positions(layer.id))
        return rows.values(values)

    def _advance(self, layer: RecurrentLayer, inputs: RecurrentInputs, rows: Rows) -> torch.Tensor:
        raw = inputs.conv_inputs
        plain = isinstance(inputs, ShortConvInputs)
        conv_states = self._view(layer, CONV_STATE)
        conv = convolve(raw, inputs.conv_weight, inputs.conv_bias, conv_states, rows, activation=not plain)
        if plain:
            return conv.to(raw.dtype)
        states = self._view(layer, RECURRENT_STATE)
        if isinstance(inputs, Mamba1Inputs):
            # The projections between convolution and scan belong to the model, and compute in the model's dtype.
            dt, b, c = inputs.select(conv.to(raw.dtype))
            values = raw.new_zeros(conv.shape)
            mamba1_scan(conv, dt, b, c, inputs.a, inputs.d, inputs.dt_bias, states, rows, values)
        elif isinstance(inputs, Mamba2Inputs):
            values = raw.new_zeros(len(raw), math.prod(states.shape[1:3]))
            mamba2_scan(conv, inputs.dt, inputs.a, inputs.d, inputs.dt_bias, inputs.dt_limit, states, rows, values)
        else:
            assert isinstance(inputs, DeltaNetInputs)
            values = raw.new_zeros(len(raw), states.shape[1] * states.shape[3])
            delta_net_scan(conv, inputs.log_decay, inputs.beta, states, rows, values)
        return values

    def _positions(self, layer_id: int) -> torch.Tensor:
        """``[page, 1]``"""
        return self._memory.view(layer_id, CHECKPOINT, (1,), torch.int64)

    def _view(self, layer: RecurrentLayer, stream: str) -> torch.Tensor:
        """``[page, *shape of the state]`` in the dtype that it is stored in."""
        shape, dtype = layer.stored(stream)
        return self._memory.view(layer.id, stream, shape, getattr(torch, dtype))
