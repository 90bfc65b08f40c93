"""The scan of Mamba-2: token by token, and in chunks as fast kernels compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist_mamba.reference.chunks import Decay, chunks, stacked


def split_mamba2(
    conv: torch.Tensor, heads: int, size: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x | B | C`` of ``[T, H P + 2 G N]`` as ``[T, H, P]``, ``[T, G, N]``, ``[T, G, N]``."""
    shared = (conv.shape[1] - heads * size) // 2
    x, b, c = torch.split(conv, [heads * size, shared, shared], dim=1)
    count = len(conv)
    groups = shared // columns
    return x.reshape(count, heads, size), b.reshape(count, groups, columns), c.reshape(count, groups, columns)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    after: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S = exp(dt A) S + dt x B``, ``y = S C + d x`` for each head (arXiv 2405.21060, equation 1 with scalar A).

    x ``[T, H, P]``; dt ``[T, H]`` with bias, softplus and limits; b, c ``[T, G, N]``; a, d ``[H]``; state
    ``[H, P, N]``. Returns y ``[T, H, P]`` and the states ``[len(after), H, P, N]``.
    """
    b, c = _per_head(b, len(a)), _per_head(c, len(a))
    values, states, wanted = [], [], set(after)
    for t in range(len(x)):
        decay = torch.exp(dt[t] * a)[:, None, None]
        state = decay * state + (dt[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
        values.append((state * c[t, :, None, :]).sum(-1) + d[:, None] * x[t])
        if t + 1 in wanted:
            states.append(state)
    return torch.stack(values), stacked(states, state)


def mamba2_chunked_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    after: Sequence[int],
    chunk_tokens: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as :func:`mamba2_scan`, as matrix products within chunks (arXiv 2405.21060, section 6).

    Chunks begin at the sequence's first token here and end early where a state is wanted; neither changes the result
    by more than the order of sums does.
    """
    b, c = _per_head(b, len(a)), _per_head(c, len(a))
    values, states = [], []
    for part in chunks(len(x), chunk_tokens, after):
        value, state = _chunk(x[part], dt[part], b[part], c[part], a, state)
        values.append(value)
        if part.stop in after:
            states.append(state)
    return torch.cat(values) + d[:, None] * x, stacked(states, state)


def _chunk(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk without the skip ``d x``; b, c ``[T, H, N]``."""
    decay = Decay(dt * a)
    scaled = dt[:, :, None] * x
    weights = torch.einsum("ihn,jhn->ijh", c, b) * decay.between
    value = torch.einsum("ijh,jhp->ihp", weights, scaled)
    value += decay.before[:, :, None] * torch.einsum("hpn,ihn->ihp", state, c)
    added = torch.einsum("jhp,jhn->hpn", decay.left[:, :, None] * scaled, b)
    return value, decay.before[-1, :, None, None] * state + added


def _per_head(shared: torch.Tensor, heads: int) -> torch.Tensor:
    return shared.repeat_interleave(heads // shared.shape[1], dim=1)
