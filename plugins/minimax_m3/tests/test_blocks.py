"""The selector against vectors worked by hand, and against a brute force that sorts Python tuples."""

from __future__ import annotations

import math

import pytest
import torch

from kvist_minimax_m3.blocks import block_scores, select_blocks, select_for_heads
from kvist_minimax_m3.selection import Selection

SCORES = [0.2, 0.9, -1.0, 0.5, -5.0]
NONE = -math.inf

#: position, largest score of each visible block, topk, local, init, selected
VECTORS = [
    pytest.param(17, SCORES, 3, 1, 0, [1, 3, 4], id="own block forced, then the best"),
    pytest.param(3, [0.2], 3, 1, 0, [0, -1, -1], id="one visible block"),
    pytest.param(17, SCORES, 2, 2, 0, [3, 4], id="forced blocks fill the budget"),
    pytest.param(17, SCORES, 2, 1, 1, [0, 4], id="leading block before local, both before scores"),
    pytest.param(17, SCORES, 1, 1, 1, [0], id="leading block before local when one fits"),
    pytest.param(17, SCORES, 2, 0, 0, [1, 3], id="own block may be absent"),
    pytest.param(2, [0.3], 1, 3, 0, [0], id="local blocks before the first collapse"),
    pytest.param(17, [0.5, 0.9, 0.5, 0.5, -5.0], 2, 0, 0, [0, 1], id="lowest id of equals"),
    pytest.param(17, [-0.0, 0.0, -0.0, 0.0, -5.0], 3, 0, 0, [0, 1, 2], id="zeros of both signs are equals"),
    pytest.param(9, [0.1, 0.2, 0.3, NONE, NONE], 4, 1, 0, [0, 1, 2, -1], id="blocks of the future"),
    pytest.param(9, [0.1, 0.2, 0.3, NONE, NONE], 4, 0, 5, [0, 1, 2, -1], id="leading blocks of the future"),
]


@pytest.mark.parametrize(("position", "scores", "topk", "local", "init", "selected"), VECTORS)
def test_vectors(position, scores, topk, local, init, selected):
    rule = Selection(4, topk, local, init)
    ids = select_blocks(torch.tensor([[scores]]), torch.tensor([position]), rule)
    assert (ids.dtype, ids.tolist()) == (torch.int32, [[selected]])


def test_keys_behind_the_query_are_not_seen():
    """Position 16 is the first of block 4: keys 17 .. 19 would win and must not count."""
    key = torch.tensor([0.2] * 4 + [0.9] * 4 + [-1.0] * 4 + [0.5] * 4 + [-7.0, 99.0, 99.0, 99.0])[:, None]
    scores = block_scores(torch.ones(1, 1, 1), key, torch.tensor([16]), 4)
    assert torch.equal(scores, torch.tensor([[[0.2, 0.9, -1.0, 0.5, -7.0]]]))
    assert select_blocks(scores, torch.tensor([16]), Selection(4, 3)).tolist() == [[[1, 3, 4]]]


def test_how_index_heads_of_one_key_head_agree():
    scores = torch.tensor([[SCORES, [0.8, 0.1, 0.0, 0.85, -5.0]]])

    def selected(reduce):
        return select_for_heads(scores, torch.tensor([17]), Selection(4, 2, 1, 0, reduce), key_heads=1).tolist()

    assert selected("per_index_head") == [[[1, 4], [3, 4]]]
    assert selected("union") == [[[1, 3, 4, -1]]]
    assert selected("max") == [[[1, 4]]]


@pytest.mark.parametrize("reduce", ["per_index_head", "union", "max"])
def test_one_index_head_per_key_head_needs_no_agreement(reduce):
    scores = torch.randn(5, 3, 9)
    positions = torch.full((5,), 35)
    rule = Selection(4, 3, 1, 0, reduce)
    assert torch.equal(
        select_for_heads(scores, positions, rule, key_heads=3), select_blocks(scores, positions, Selection(4, 3))
    )


def brute_force(query, keys, position, rule):
    """One query and head: the ids that a stable sort of (class, score) leaves, by plain Python floats."""
    own = position // rule.block_tokens
    forced_local = {max(own - i, 0) for i in range(rule.local_blocks)}
    ranks = []
    for block in range(own + 1):
        first = block * rule.block_tokens
        score = max(
            sum(a * b for a, b in zip(query, key)) for key in keys[first : min(first + rule.block_tokens, position + 1)]
        )
        kind = 0 if block < rule.init_blocks else 1 if block in forced_local else 2
        ranks.append((kind, -score if kind == 2 else 0.0, block))
    ids = sorted(block for _, _, block in sorted(ranks)[: rule.topk])
    return ids + [-1] * (rule.topk - len(ids))


@pytest.mark.parametrize("local", [0, 1, 3])
@pytest.mark.parametrize("init", [0, 1, 2])
def test_every_position_against_the_brute_force(local, init):
    """Products of small integers are exact, and so many of them are equal that ties decide often."""
    generator = torch.Generator().manual_seed(3 * local + init)
    query = torch.randint(-2, 3, (40, 2, 3), generator=generator).float()
    key = torch.randint(-2, 3, (40, 3), generator=generator).float()
    rule, positions = Selection(4, 4, local, init), torch.arange(40)
    ids = select_blocks(block_scores(query, key, positions, 4), positions, rule).tolist()
    for position in range(40):
        for head in range(2):
            want = brute_force(query[position, head].tolist(), key.tolist(), position, rule)
            assert ids[position][head] == want


def test_scores_in_parts_are_the_same(monkeypatch):
    query, key, positions = torch.randn(13, 2, 8), torch.randn(21, 8), torch.arange(8, 21)
    whole = block_scores(query, key, positions, 4)
    monkeypatch.setattr("kvist_minimax_m3.blocks._PRODUCTS", 3 * 2 * 21)
    torch.testing.assert_close(block_scores(query, key, positions, 4), whole, rtol=1e-6, atol=1e-6)
