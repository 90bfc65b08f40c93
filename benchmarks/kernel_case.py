"""One kernel to measure beside something that gives the same."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

PEER = "torch, same tensors"

Call = Callable[[], torch.Tensor]


@attrs.frozen
class Kernel:
    """One kernel to measure. Both calls give the same tensor, within ``tolerance``, when each is called for the first
    time: states go on from call to call."""

    figure: str
    ours: Call
    theirs: Call
    tolerance: float = 0.0
    peer: str = PEER
