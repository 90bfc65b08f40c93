"""Paged logits equal transformers' own, computed at once without a cache, in all four variants.

Every machine here hands out shuffled pages and keeps NaN in pages that nobody owns. Prompts are much longer than what
a query selects (12 or 16 tokens): where everything is selected, the index proves nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

VARIANTS = ["equal heads", "two index heads per key head", "two local blocks", "one block, none forced"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_prompts_are_long_enough_to_notice(variant, tiny, logits, tokens):
    """With every block selected, logits differ from the token on where a block is left out."""
    model, prompt = tiny(variant), tokens(45)
    sparse = logits(model, prompt)
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    topk = indexers[0].topk_blocks
    try:
        for indexer in indexers:
            indexer.topk_blocks = 1000
        dense = model(input_ids=np_tensor(prompt), use_cache=False).logits[0].detach()
    finally:
        for indexer in indexers:
            indexer.topk_blocks = topk
    differs = ((sparse - dense).abs().amax(-1) > 1e-3).nonzero()[:, 0]
    assert topk * 4 <= differs[0] < topk * 4 + 4
    assert (sparse - dense).abs().max() > 1


def np_tensor(prompt):
    return torch.from_numpy(prompt.astype(np.int64))[None]


@pytest.mark.parametrize("page", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_inside_blocks_and_ragged_batches(variant, page, tiny, expecting, tokens, machine):
    model = tiny(variant)
    prompts = [tokens(count, seed=count) for count in (61, 45, 9, 30)]
    expected = expecting(model, *prompts)
    random = np.random.default_rng(page)
    with machine(model, page=page, pages=256 // page) as cache:
        sequences = [cache.manager.open(prompt, reuse=False) for prompt in prompts]
        while left := [each for each in sequences if each.computed < len(each.tokens)]:
            chosen = random.permutation(len(left))[: random.integers(1, len(left) + 1)]
            work = [
                (left[i], int(min(random.choice([1, 1, 2, 3, 5, 11]), len(left[i].tokens) - left[i].computed)))
                for i in chosen
            ]
            cache.compute(work, expected)
