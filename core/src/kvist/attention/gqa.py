"""Inputs and spec of the grouped-query family: MHA, GQA and MQA, causal, with windows and sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(eq=False)
class GQAInputs:
    """One layer's inputs, flattened over all rows of the step (``T`` = step.token_count).

    query: ``[T, query heads, head size]``; query head ``h`` reads key head ``h // (query heads / key heads)``.
    key: ``[T, key heads, head size]``, stored in stream ``"k"``.
    value: ``[T, key heads, value head size]``, stored in stream ``"v"``.
    scale: factor on the scores.
    window: the query at position ``p`` reads positions ``p - window + 1 .. p``; ``None`` reads all up to ``p``.
    sink_tokens: leading positions read although they left the window.
    sink_logits: ``[query heads]``, one learned extra logit per head that takes part in the softmax and carries no
        value; ``None`` for none.
    softcap: scores become ``softcap * tanh(scores / softcap)``; ``None`` for none.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None = None
    sink_tokens: int = 0
    sink_logits: torch.Tensor | None = None
    softcap: float | None = None
