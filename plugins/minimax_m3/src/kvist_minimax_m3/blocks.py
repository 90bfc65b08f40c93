"""Scores of blocks, and which of them a query reads: the plain form of the rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvist_minimax_m3.selection import Selection

#: Products of index queries and index keys that are held at a time.
_PRODUCTS = 1 << 24


def block_scores(
    index_query: torch.Tensor, index_key: torch.Tensor, positions: torch.Tensor, block_tokens: int
) -> torch.Tensor:
    """Largest product of each index query with the keys of each block that it may see, -inf for a block without any.

    index_query ``[Q, heads, E]``, index_key float32 ``[K, E]``. positions: int64 ``[Q]``, of the queries, counted from
    the first of the keys; a query may stand before it.
    Returns float32 ``[Q, heads, ceil(K / block_tokens)]``.
    """
    query_count, heads, _ = index_query.shape
    key_count = len(index_key)
    block_count = -(-key_count // block_tokens)
    scores = index_key.new_empty(query_count, heads, block_count)
    key_positions = torch.arange(key_count, device=index_key.device)
    part = max(1, _PRODUCTS // (heads * key_count))
    for first in range(0, query_count, part):
        queries = slice(first, first + part)
        products = index_query[queries].float().flatten(0, 1) @ index_key.T
        products = products.unflatten(0, (-1, heads))
        products.masked_fill_((key_positions > positions[queries, None])[:, None], float("-inf"))
        products = F.pad(products, (0, block_count * block_tokens - key_count), value=float("-inf"))
        scores[queries] = products.unflatten(-1, (block_count, block_tokens)).amax(-1)
    return scores


def select_blocks(scores: torch.Tensor, positions: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The blocks that each query reads.

    scores: float32 ``[Q, heads, blocks]``, -inf where a query sees no key of a block. positions: int64 ``[Q]``.
    Returns int32 ``[Q, heads, topk]``, ascending without repetition, then -1. Leading blocks come first, then local
    ones, then those with the highest scores; among equals the lowest ids. The query's own block need not be among them.
    """
    block_count = scores.shape[-1]
    block = torch.arange(block_count, device=scores.device)
    own = (positions // selection.block_tokens)[:, None, None]
    local = (block <= own) & (block > own - selection.local_blocks)
    leading = (block <= own) & (block < selection.init_blocks)
    # Both are beyond any score of finite keys.
    ranked = scores.masked_fill(local, torch.finfo(scores.dtype).max).masked_fill(leading, float("inf"))
    ranked, ids = ranked.sort(dim=-1, descending=True, stable=True)
    ids = ids.masked_fill(ranked == float("-inf"), block_count)[..., : selection.topk]
    return _with_tail(ids, block_count, selection.topk)


def select_for_heads(
    scores: torch.Tensor, positions: torch.Tensor, selection: Selection, key_heads: int
) -> torch.Tensor:
    """What each slice of query heads reads, by the rule's ``group_reduce``.

    scores: ``[Q, index heads, blocks]``. Returns int32 ``[Q, S, width]`` as :func:`select_blocks` does; slice ``s`` are
    the query heads from ``s * (query heads / S)`` on. ``S`` is the number of index heads, or of key heads where the
    index heads of one agree; ``width`` is topk, for ``"union"`` topk times the index heads of a key head.
    """
    query_count, heads, block_count = scores.shape
    if heads == key_heads or selection.group_reduce == "per_index_head":
        return select_blocks(scores, positions, selection)
    if selection.group_reduce == "max":
        return select_blocks(scores.unflatten(1, (key_heads, -1)).amax(2), positions, selection)
    ids = select_blocks(scores, positions, selection).unflatten(1, (key_heads, -1)).flatten(2)
    # One column more for the -1s.
    chosen = torch.zeros(query_count, key_heads, block_count + 1, dtype=torch.bool, device=scores.device)
    chosen.scatter_(-1, ids.masked_fill(ids < 0, block_count).long(), True)
    block = torch.arange(block_count, device=scores.device)
    return _with_tail(torch.where(chosen[..., :-1], block, block_count), block_count, ids.shape[-1])


def _with_tail(ids: torch.Tensor, no_block: int, width: int) -> torch.Tensor:
    """Sorted ascending, ``no_block`` turned into -1 behind the others, cut or filled up to ``width``."""
    ids = ids.sort(dim=-1).values[..., :width]
    ids = F.pad(ids, (0, width - ids.shape[-1]), value=no_block)
    return ids.masked_fill(ids == no_block, -1).to(torch.int32)
