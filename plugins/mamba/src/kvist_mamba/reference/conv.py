"""The causal convolution, one channel at a time, that stands before every scan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist_mamba.reference.chunks import stacked


def causal_conv(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs ``[T, channels]``, weight ``[channels, K]``, bias ``[channels]``, state ``[channels, K - 1]``: the raw
    inputs before the first one, oldest first.

    Returns the sums ``[T, channels]`` without activation, and the history ``[channels, K - 1 + T]``: state and inputs
    side by side, of which :func:`conv_states` takes what to keep.
    """
    history = torch.cat([state, inputs.T], dim=1)
    # [channels, T, K]: a window for each token, its own input last.
    windows = history.unfold(1, weight.shape[1], 1)
    sums = (windows * weight[:, None, :]).sum(-1).T
    return (sums if bias is None else sums + bias), history


def conv_states(history: torch.Tensor, columns: int, after: Sequence[int]) -> torch.Tensor:
    """The state after so many tokens: ``[len(after), channels, columns]`` with ``columns = K - 1``."""
    return stacked([history[:, count : count + columns] for count in after], history[:, :columns])
