"""The gated delta rule: token by token, and in chunks as fast kernels compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist_mamba.reference.chunks import Decay, chunks, stacked

#: Added to the squared length of queries and keys before the root.
_EPSILON = 1e-6


def split_delta_net(
    conv: torch.Tensor, heads: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q | k | v`` of ``[T, 2 Hk dk + Hv dv]`` as ``[T, Hk, dk]``, ``[T, Hk, dk]``, ``[T, Hv, dv]``."""
    keys = (conv.shape[1] - heads * value_size) // 2
    q, k, v = torch.split(conv, [keys, keys, heads * value_size], dim=1)
    count = len(conv)
    q, k = (each.reshape(count, keys // key_size, key_size) for each in (q, k))
    return q, k, v.reshape(count, heads, value_size)


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
    q, k = _per_head(q, v.shape[1]) * q.shape[2] ** -0.5, _per_head(k, v.shape[1])
    values, states, wanted = [], [], set(after)
    for t in range(len(v)):
        state = torch.exp(log_decay[t])[:, None, None] * state
        known = (state * k[t, :, :, None]).sum(1)
        change = beta[t, :, None] * (v[t] - known)
        state = state + k[t, :, :, None] * change[:, None, :]
        values.append((state * q[t, :, :, None]).sum(1))
        if t + 1 in wanted:
            states.append(state)
    return torch.stack(values), stacked(states, state)


def delta_net_chunked_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    after: Sequence[int],
    chunk_tokens: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as :func:`delta_net_scan`: what a chunk's tokens add follows from one triangular system of equations
    (arXiv 2412.06464, section 3.3)."""
    q, k = _per_head(q, v.shape[1]) * q.shape[2] ** -0.5, _per_head(k, v.shape[1])
    values, states = [], []
    for part in chunks(len(v), chunk_tokens, after):
        value, state = _chunk(q[part], k[part], v[part], Decay(log_decay[part]), beta[part], state)
        values.append(value)
        if part.stop in after:
            states.append(state)
    return torch.cat(values), stacked(states, state)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: Decay, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk; q, k ``[T, Hv, dk]``.

    With ``u_i = beta_i (v_i - S_i^T k_i)``, where ``S_i`` is the state that token ``i`` finds after its decay:
    ``u_i + beta_i sum_{j<i} between_ij (k_i k_j) u_j = beta_i (v_i - before_i S^T k_i)``.
    """
    between, before = decay.between.permute(2, 0, 1), decay.before[:, :, None]
    likeness = torch.einsum("ihk,jhk->hij", beta[:, :, None] * k, k) * between
    wanted = beta[:, :, None] * (v - before * torch.einsum("hkv,ihk->ihv", state, k))
    added = torch.linalg.solve_triangular(likeness, wanted.transpose(0, 1), upper=False, unitriangular=True)
    weights = torch.einsum("ihk,jhk->hij", q, k) * between
    value = (weights @ added).transpose(0, 1) + before * torch.einsum("hkv,ihk->ihv", state, q)
    kept = torch.einsum("jhk,hjv->hkv", decay.left[:, :, None] * k, added)
    return value, decay.before[-1, :, None, None] * state + kept


def _per_head(vectors: torch.Tensor, heads: int) -> torch.Tensor:
    """``[T, heads, size]``, of length 1."""
    unit = vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPSILON)
    return unit.repeat_interleave(heads // vectors.shape[1], dim=1)
