"""The inputs of MiniMax-M3's sparse layers. Its dense layers hand over :class:`~kvist.attention.gqa.GQAInputs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvist_minimax_m3.selection import Selection

if TYPE_CHECKING:
    import torch


@attrs.frozen(eq=False)
class SparseInputs:
    """One sparse layer's inputs, flattened over all rows of the step (``T`` = step.token_count), after norm and rope.

    query: ``[T, query heads, head size]``; query head ``h`` reads key head ``h // (query heads / key heads)``.
    key: ``[T, key heads, head size]``, stored in stream ``"k"``.
    value: ``[T, key heads, head size]``, stored in stream ``"v"``.
    index_query: ``[T, index heads, index size]``; index head ``i`` selects for query heads
        ``i * (query heads / index heads)`` and following.
    index_key: ``[T, index size]``, stored in stream ``"index_k"``; one for all index heads.
    scale: factor on the scores of attention. Scores of the index have none: it would not change their order.
    selection: the rule; the same for all layers of a step.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    index_query: torch.Tensor
    index_key: torch.Tensor
    scale: float
    selection: Selection
