"""The gated delta rule, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Added to the squared length of queries and keys before the root.
_EPSILON = 1e-6


def split_delta_net(
    conv: torch.Tensor, heads: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q | k | v`` of ``[T, 2 Hk dk + Hv dv]`` as ``[T, Hk, dk]``, ``[T, Hk, dk]``, ``[T, Hv, dv]``."""
    keys = (conv.shape[1] - heads * value_size) // 2
    q, k, v = torch.split(conv, [keys, keys, heads * value_size], dim=1)
    count = len(conv)
    return q.reshape(count, -1, key_size), k.reshape(count, -1, key_size), v.reshape(count, heads, value_size)


def delta_net_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    after: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S = exp(g) S``, ``S = S + k beta (v - S^T k)``, ``y = S^T q`` per value head (arXiv 2412.06464, equation 10).

    q, k ``[T, Hk, dk]``, brought to length 1 here; v ``[T, Hv, dv]``; log_decay, beta ``[T, Hv]``; state
    ``[Hv, dk, dv]``. Returns y ``[T, Hv, dv]`` and the states ``[len(after), Hv, dk, dv]``.
    """
    heads = v.shape[1]
    q = _unit(q).repeat_interleave(heads // q.shape[1], dim=1) * q.shape[2] ** -0.5
    k = _unit(k).repeat_interleave(heads // k.shape[1], dim=1)
    values, states, wanted = [], [], set(after)
    for t in range(len(v)):
        state = torch.exp(log_decay[t])[:, None, None] * state
        known = (state * k[t, :, :, None]).sum(1)
        change = beta[t, :, None] * (v[t] - known)
        state = state + k[t, :, :, None] * change[:, None, :]
        values.append((state * q[t, :, :, None]).sum(1))
        if t + 1 in wanted:
            states.append(state)
    return torch.stack(values), torch.stack(states)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPSILON)
