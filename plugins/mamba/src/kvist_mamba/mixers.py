"""transformers' recurrent mixers without their recurrence: what a backend takes, and what becomes of its value.

Projections and norms are the mixer's own submodules; what its ``forward`` computes between them is done here in the
same order. Padding, caches and fused kernels have no part in it. Written for the mixers of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from kvist_mamba.inputs import DeltaNetInputs, Mamba1Inputs, Mamba2Inputs, RecurrentInputs, ShortConvInputs

#: From the backend's value ``[T, width]`` to the mixer's output ``[T, hidden size]``.
Finish = Callable[[torch.Tensor], torch.Tensor]
#: From a mixer and hidden states ``[T, hidden size]`` to what its backend takes, and what is done with the value.
Prepare = Callable[[Any, torch.Tensor], tuple[RecurrentInputs, Finish]]


def recurrent_mixers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The modules of a model that own a convolution over tokens, by the number of their layer."""
    return {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    }


def _mamba1(mixer: Any, hidden: torch.Tensor) -> tuple[RecurrentInputs, Finish]:
    """mamba; with norms of what the scan selects by: falcon_mamba, jamba."""
    raw, gate = mixer.in_proj(hidden).chunk(2, dim=-1)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    norms = [getattr(mixer, name, None) for name in ("dt_layernorm", "b_layernorm", "c_layernorm")]

    def select(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = torch.split(mixer.x_proj(u), sizes, dim=-1)
        dt, b, c = (part if norm is None else norm(part) for norm, part in zip(norms, parts))
        # The bias is added in float32, by the backend.
        return F.linear(dt, mixer.dt_proj.weight), b, c

    inputs = Mamba1Inputs(
        **_conv(mixer.conv1d, raw),
        select=select,
        a=-torch.exp(mixer.A_log.float()),
        d=mixer.D,
        dt_bias=mixer.dt_proj.bias,
    )
    return inputs, lambda value: mixer.out_proj(value * F.silu(gate))


def _mamba2(mixer: Any, hidden: torch.Tensor) -> tuple[RecurrentInputs, Finish]:
    inputs, gate = _split_mamba2(mixer, mixer.in_proj(hidden))
    return inputs, lambda value: mixer.out_proj(mixer.norm(value, gate))


def _falcon_h1(mixer: Any, hidden: torch.Tensor) -> tuple[RecurrentInputs, Finish]:
    """Mamba-2 with multipliers, and perhaps without the norm."""
    inputs, gate = _split_mamba2(mixer, mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector[0])
    if mixer.mamba_rms_norm:
        return inputs, lambda value: mixer.out_proj(mixer.norm(value, gate))
    return inputs, lambda value: mixer.out_proj(value * F.silu(gate))


def _split_mamba2(mixer: Any, projected: torch.Tensor) -> tuple[RecurrentInputs, torch.Tensor]:
    gate, raw, dt = torch.split(projected, [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    inputs = Mamba2Inputs(
        **_conv(mixer.conv1d, raw),
        dt=dt,
        a=-torch.exp(mixer.A_log.float()),
        d=mixer.D,
        dt_bias=mixer.dt_bias,
        # Always obeyed here; transformers obeys it for several tokens at a time and not for one.
        dt_limit=mixer.time_step_limit,
    )
    return inputs, gate


def _delta_net(mixer: Any, hidden: torch.Tensor) -> tuple[RecurrentInputs, Finish]:
    hidden = hidden[None]
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden))
    *qkv, gate, b, a = (part[0] for part in parts)
    inputs = DeltaNetInputs(
        **_conv(mixer.conv1d, torch.cat([part.flatten(1) for part in qkv], dim=-1)),
        log_decay=-mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias),
        beta=b.sigmoid(),
    )

    def finish(value: torch.Tensor) -> torch.Tensor:
        normed = mixer.norm(value.reshape(-1, mixer.head_v_dim), gate.reshape(-1, mixer.head_v_dim))
        output: torch.Tensor = mixer.out_proj(normed.reshape(value.shape))
        return output

    return inputs, finish


def _short_conv(mixer: Any, hidden: torch.Tensor) -> tuple[RecurrentInputs, Finish]:
    before, after, x = mixer.in_proj(hidden).chunk(3, dim=-1)
    return ShortConvInputs(**_conv(mixer.conv, before * x)), lambda value: mixer.out_proj(after * value)


def _conv(conv: torch.nn.Conv1d, raw: torch.Tensor) -> dict[str, Any]:
    return {"conv_inputs": raw, "conv_weight": conv.weight[:, 0], "conv_bias": conv.bias}


#: By model type: the kind of its mixers, one of :data:`kvist_mamba.inputs.KINDS`, and how they are taken apart.
MIXERS: Mapping[str, tuple[str, Prepare]] = {
    "mamba": ("mamba1", _mamba1),
    "falcon_mamba": ("mamba1", _mamba1),
    "jamba": ("mamba1", _mamba1),
    "mamba2": ("mamba2", _mamba2),
    "bamba": ("mamba2", _mamba2),
    "falcon_h1": ("mamba2", _falcon_h1),
    "granitemoehybrid": ("mamba2", _mamba2),
    "nemotron_h": ("mamba2", _mamba2),
    "zamba2": ("mamba2", _mamba2),
    "qwen3_next": ("delta_net", _delta_net),
    "lfm2": ("short_conv", _short_conv),
}
