"""From a layer's inputs to its scan: what is done to all tokens at once, before the recurrence of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from kvist_mamba.inputs import DeltaNetInputs, Mamba1Inputs, Mamba2Inputs
from kvist_mamba.reference.delta_net import delta_net_chunked_scan, delta_net_scan, split_delta_net
from kvist_mamba.reference.mamba1 import mamba1_scan
from kvist_mamba.reference.mamba2 import mamba2_chunked_scan, mamba2_scan, split_mamba2

#: Tokens for each wanted state from which on a scan in chunks is the faster one.
_CHUNKED_FROM = 8

#: Tokens of one sequence, the state before, ``after`` -> values ``[tokens, width]`` and states.
Scan = Callable[[slice, torch.Tensor, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
ScanInputs = Mamba1Inputs | Mamba2Inputs | DeltaNetInputs


def scan_of(inputs: ScanInputs, conv: torch.Tensor, state: Sequence[int]) -> tuple[Scan, int]:
    """The scan and the width of its values.

    conv: ``[T, channels]``, the convolution's sums in the dtype to compute in. state: shape of the recurrent state.
    """
    conv = F.silu(conv)
    if isinstance(inputs, Mamba1Inputs):
        return _mamba1(inputs, conv), state[0]
    if isinstance(inputs, Mamba2Inputs):
        return _mamba2(inputs, conv, state), math.prod(state[:2])
    return _delta_net(inputs, conv, state), state[0] * state[2]


def _mamba1(inputs: Mamba1Inputs, conv: torch.Tensor) -> Scan:
    # The projections between convolution and scan belong to the model, and compute in the model's dtype.
    selected = inputs.select(conv.to(inputs.conv_inputs.dtype))
    dt, b, c = (each.to(conv.dtype) for each in selected)
    dt = F.softplus(dt + inputs.dt_bias.to(conv.dtype))
    a, d = inputs.a.to(conv.dtype), inputs.d.to(conv.dtype)

    def scan(tokens: slice, state: torch.Tensor, after: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return mamba1_scan(conv[tokens], dt[tokens], b[tokens], c[tokens], a, d, state, after)

    return scan


def _mamba2(inputs: Mamba2Inputs, conv: torch.Tensor, state: Sequence[int]) -> Scan:
    x, b, c = split_mamba2(conv, *state)
    dt = F.softplus(inputs.dt.to(conv.dtype) + inputs.dt_bias.to(conv.dtype)).clamp(*inputs.dt_limit)
    a, d = inputs.a.to(conv.dtype), inputs.d.to(conv.dtype)

    def scan(tokens: slice, state: torch.Tensor, after: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        run = mamba2_chunked_scan if _is_long(tokens, after) else mamba2_scan
        values, states = run(x[tokens], dt[tokens], b[tokens], c[tokens], a, d, state, after)
        return values.flatten(1), states

    return scan


def _delta_net(inputs: DeltaNetInputs, conv: torch.Tensor, state: Sequence[int]) -> Scan:
    q, k, v = split_delta_net(conv, *state)
    log_decay, beta = inputs.log_decay.to(conv.dtype), inputs.beta.to(conv.dtype)

    def scan(tokens: slice, state: torch.Tensor, after: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        run = delta_net_chunked_scan if _is_long(tokens, after) else delta_net_scan
        values, states = run(q[tokens], k[tokens], v[tokens], log_decay[tokens], beta[tokens], state, after)
        return values.flatten(1), states

    return scan


def _is_long(tokens: slice, after: Sequence[int]) -> bool:
    count: int = tokens.stop - tokens.start
    return count >= _CHUNKED_FROM * max(1, len(after))
