"""The inputs of DeepSeek-V4's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(eq=False)
class DeepseekV4Inputs:
    """One layer's inputs, flattened over all rows of the step (``T`` = step.token_count).

    ``D`` is the head size, ``R`` of its last elements rotate; ``I`` is the size of an index row; ``r`` is the layer's
    ratio, ``s`` its number of series, 2 where windows overlap; ``J`` counts index heads.

    query: ``[T, heads, D]``, normed and rotated. kv: ``[T, D]``, normed and rotated: key and value of all heads.
    scale: factor on the scores. sinks: ``[heads]``, learned logits that take their share of the softmax.

    For a layer with compressed rows:
    state: ``[T, 2, s * D]``, what each token contributes: content, then gate without a position's bias. With two
        series the first half of each belongs to the row of the *next* window, the second to its own.
    position_bias: ``[r, s * D]``, added to the gates, by position modulo ``r``.
    norm: ``[D]``, weight of a compressed row's norm. eps: of all norms.
    frequencies: ``[R / 2]``, angles per position of the layer's rope, float32. A compressed row, index rows too, is
        rotated by the first position of its window.

    For a layer with an index:
    index_query: ``[T, J, I]``, rotated. index_weights: ``[T, J]``, factor of each head's scores, all scaling included.
    index_state: ``[T, 2, s * I]``, index_position_bias: ``[r, s * I]``, index_norm: ``[I]``: as the above.
    topk: how many compressed rows a query reads.
    """

    query: torch.Tensor
    kv: torch.Tensor
    scale: float
    sinks: torch.Tensor
    state: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float = 1e-6
    frequencies: torch.Tensor | None = None
    index_query: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None
    index_state: torch.Tensor | None = None
    index_position_bias: torch.Tensor | None = None
    index_norm: torch.Tensor | None = None
    topk: int = 0
