"""Compressed rows: pooled, normed and rotated. The plain form of sections 1.3 to 1.6 of the model's description."""

from __future__ import annotations

import torch


def rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Turn the last ``2 * len(frequencies)`` elements of each row in adjacent pairs by its position.

    rows: ``[n, ..., elements]``. positions: ``[n]``. frequencies: ``[pairs]``, float32 as the angles are.
    """
    angles = positions.float()[:, None] * frequencies.float()
    angles = angles.view(len(rows), *[1] * (rows.ndim - 2), -1)
    cos, sin = angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
    plain, turned = rows.split([rows.shape[-1] - 2 * len(frequencies), 2 * len(frequencies)], dim=-1)
    first, second = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((plain, pairs.flatten(-2)), dim=-1)


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square, then multiply with ``weight``."""
    return weight.to(rows.dtype) * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def pool(states: torch.Tensor, ratio: int, overlap: bool) -> torch.Tensor:
    """Weigh contents by the softmax of their gates, for each element on its own.

    states: ``[windows * ratio, 2, s * size]`` of whole windows, content and gate with bias. With ``overlap`` one window
    more in front, whose first half is pooled with the second half of the next one; for the very first window of a
    sequence, which has none in front, its gates are -inf and its contents 0.

    Returns ``[windows, size]`` in the dtype of ``states``.
    """
    content, gate = states.unflatten(0, (-1, ratio)).unbind(2)
    if overlap:
        size = content.shape[-1] // 2
        content = torch.cat((content[:-1, :, :size], content[1:, :, size:]), dim=1)
        gate = torch.cat((gate[:-1, :, :size], gate[1:, :, size:]), dim=1)
    return (content * gate.softmax(dim=1)).sum(dim=1)


def window_in_front(states: torch.Tensor, ratio: int) -> torch.Tensor:
    """What stands in for the window before the first one: nothing, with no weight."""
    absent = states.new_zeros(ratio, *states.shape[1:])
    absent[:, 1] = float("-inf")
    return absent
