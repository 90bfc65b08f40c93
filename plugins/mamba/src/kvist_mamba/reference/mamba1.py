"""The selective scan of Mamba, token by token: at a model's width, preparing many tokens at once takes as long."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist_mamba.reference.chunks import stacked


def mamba1_scan(
    u: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    after: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S = exp(dt A) S + dt u B``, ``y = S C + d u`` (arXiv 2312.00752, algorithm 2).

    u, dt ``[T, E]``, dt with bias and softplus; b, c ``[T, N]``; a ``[E, N]``; d ``[E]``; state ``[E, N]``.
    Returns y ``[T, E]`` and the states ``[len(after), E, N]``.
    """
    values, states, wanted = [], [], set(after)
    for t in range(len(u)):
        decay = torch.exp(dt[t, :, None] * a)
        state = decay * state + (dt[t] * u[t])[:, None] * b[t]
        values.append((state * c[t]).sum(-1) + d * u[t])
        if t + 1 in wanted:
            states.append(state)
    return torch.stack(values), stacked(states, state)
