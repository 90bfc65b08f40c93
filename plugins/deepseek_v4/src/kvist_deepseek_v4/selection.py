"""Which compressed rows a query reads."""

from __future__ import annotations

import torch

#: Products of index queries and index rows that are held at a time.
_PRODUCTS = 1 << 24


def visible_rows(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """How many compressed rows each query may read: those whose last token is not behind it, so that the token that
    closes a window already sees its row. int64 ``[Q]``."""
    return (positions + 1) // ratio


def index_scores(query: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The weighted sum over heads of what is positive of their products, in float32 (float64 for float64 queries).

    query: ``[Q, J, I]``. weights: ``[Q, J]``. rows: ``[M, I]``. Returns ``[Q, M]``.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.new_empty(len(query), len(rows), dtype=dtype)
    keys = rows.to(dtype).T
    part = max(1, _PRODUCTS // max(1, query.shape[1] * len(rows)))
    for first in range(0, len(query), part):
        queries = slice(first, first + part)
        products = torch.relu(query[queries].to(dtype) @ keys)
        scores[queries] = (products * weights[queries].to(dtype)[..., None]).sum(1)
    return scores


def select(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """The ``topk`` rows with the highest scores among the first ``visible[q]``; among equals the first ones.

    scores: ``[Q, M]``, of invisible rows anything. visible: int64 ``[Q]``.
    Returns int64 ``[Q, min(topk, M)]``, ascending, then -1.
    """
    count = scores.shape[1]
    row = torch.arange(count, device=scores.device)
    hidden = row >= visible[:, None]
    ids = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    # A hidden row comes behind all others, unless their scores are -inf too.
    ids = ids.masked_fill(ids >= visible[:, None], count).sort(dim=-1).values
    return ids.masked_fill(ids == count, -1)
