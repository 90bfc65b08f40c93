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
    CONV_STATE,
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
from kvist_mamba.kernels.rows import Rows

_DTYPES = ("float32", "float16", "bfloat16")


class TritonBackend(AttentionBackend):
    """All rows of a step at once, states addressed by page. Computes in float32.

    Serves every kind of mixer with pages for drafts. Pages are arranged as the reference arranges them, so either may
    go on where the other stopped. The values of padding rows are zero.
    """

    name = "mamba-triton"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major. Raises SpecError for states of float64, and for those that take drafts back by replay."""
        recurrent_layers(spec, cls.name, _DTYPES)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        self._memory = context.memory
        self._layers = recurrent_layers(context.spec, self.name, _DTYPES)
        self._groups = {layer: context.memory.layout.part(layer, CONV_STATE)[0].index for layer in self._layers}
        self._rows = {group: Rows(context.memory.device) for group in self._groups.values()}
        self._step: Step | None = None

    def begin(self, step: Step) -> None:
        """Stage the pages of the step's states, once for all layers. Raises StateError for a row without a page."""
        for group, rows in self._rows.items():
            rows.stage(step, group)
        self._step = step

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Advance the layer's states by the step's tokens. ``inputs`` is a :class:`RecurrentInputs`; the result is a
        new tensor ``[token_count, width]`` in the dtype of the convolution's inputs.

        Raises StateError before the first ``begin``, SpecError for inputs that do not fit the layer.
        """
        assert isinstance(inputs, RecurrentInputs)
        layer, rows = self._layers[layer_id], self._rows[self._groups[layer_id]]
        check_inputs(layer, inputs, self._step)
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

    def _view(self, layer: RecurrentLayer, stream: str) -> torch.Tensor:
        """``[page, *shape of the state]`` in the dtype that it is stored in."""
        shape, dtype = layer.stored(stream)
        return self._memory.view(layer.id, stream, shape, getattr(torch, dtype))
