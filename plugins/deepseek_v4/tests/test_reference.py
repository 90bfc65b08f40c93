"""Layers over pages put out what transformers' layers do over the whole sequence, within 1e-5, however it is cut.

Every cache here hands out shuffled pages; free pages, unwritten rows and all rows that resuming does not need are NaN.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache

from kvist.errors import RequestError, SpecError, StateError

#: Blocks of 16 tokens keep whole windows; of 32 tokens and more, rings.
BLOCKS = [16, 32, 64]


def cut(cache: Cache, request, chunks) -> None:
    for chunk in chunks:
        cache.step([(request, chunk)])


def compositions(total: int):
    """Every way to cut ``total`` tokens."""
    for borders in itertools.product((False, True), repeat=total - 1):
        chunk, chunks = 1, []
        for border in borders:
            if border:
                chunks.append(chunk)
                chunk = 0
            chunk += 1
        yield [*chunks, chunk]


@pytest.mark.slow
def test_every_cut_of_the_first_windows():
    """All 256 compositions of 9 tokens, two sparse windows and one more."""
    cuts = list(compositions(9))
    for part in (cuts[at : at + 64] for at in range(0, len(cuts), 64)):
        with Cache(block=16, blocks=100, alone=True, layers=[1]) as cache:
            first = cache.open(9, 1)
            requests = [first] + [cache.expect_like(first, 9) for _ in part[1:]]
            pending = [(request, list(chunks)) for request, chunks in zip(requests, part)]
            while pending:
                cache.step([(request, chunks.pop(0)) for request, chunks in pending])
                pending = [each for each in pending if each[1]]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("border", [7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_cuts_at_the_borders_of_windows(block, border):
    with Cache(block=block, alone=True) as cache:
        request = cache.open(70, 2)
        cut(cache, request, [border, 70 - border])
        other = cache.open(70, 2)
        cut(cache, other, [border, 1, 1, 70 - border - 2])


@pytest.mark.parametrize("block", BLOCKS)
def test_ragged_batches_of_different_phases(block):
    random = np.random.default_rng(block)
    with Cache(block=block, alone=True, seed=block) as cache:
        requests = [cache.open(count, count) for count in (70, 33, 5, 48)]
        while left := [each for each in requests if each.sequence.computed < len(each.sequence.tokens)]:
            chosen = random.permutation(len(left))[: random.integers(1, len(left) + 1)]
            work = []
            for request in (left[index] for index in chosen):
                rest = len(request.sequence.tokens) - request.sequence.computed
                work.append((request, min(rest, int(random.choice([1, 1, 2, 3, 4, 5, 9, 17])))))
            cache.step(work)


@pytest.mark.parametrize("block", BLOCKS)
def test_decode_over_closings_and_pages(block):
    """From 13 tokens on one by one: 14 sparse windows close, 4 heavy ones, and at least one block is filled."""
    with Cache(block=block, alone=True) as cache:
        request = cache.open(71, 3)
        cut(cache, request, [13] + [1] * 58)


@pytest.mark.parametrize("block", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_drafts_in_every_phase(block):
    """0 to d of d drafts stay, at every phase of both kinds of windows; the rest was noise."""
    drafts = 4
    with Cache(block=block, drafts=drafts, alone=True, blocks=400) as cache:
        first = cache.open(44, 6)
        requests = {}
        for start, kept in itertools.product(range(17, 33), range(drafts + 1)):
            requests[start, kept] = cache.expect_like(first, 44)
        cache.step([(request, start) for (start, _), request in requests.items()])
        cache.step([(request, 1, drafts, kept) for (_, kept), request in requests.items()])
        # Twice in a row, the second time with as many as stay and one that does not.
        cache.step([(request, 1, min(kept + 1, drafts), kept) for (_, kept), request in requests.items()])
        cache.step([(request, 1) for request in requests.values()])
        cache.step([(request, 44 - request.sequence.computed) for request in requests.values()])


def test_more_drafts_than_a_ring_takes_are_refused():
    with Cache(block=64, drafts=4, alone=True) as cache:
        request = cache.open(30)
        cut(cache, request, [20])
        cache.step([(request, 1, 4, 0)])
        with pytest.raises(RequestError) as caught:
            cache.step([(request, 1, 5, 0)])
        assert str(caught.value) == (
            "Run(drafts=5): a window's ring can take back 4 at most\n"
            "hint: draft fewer tokens, or give the ring of the spec more room"
        )


def test_the_selection_matters():
    """More is closed than an index selects, so a wrong one cannot pass the tests above; among equal scores the first
    rows win."""
    from kvist_deepseek_v4.selection import select

    with Cache(block=16, alone=True) as cache:
        request = cache.open(70, 5)
        cut(cache, request, [70])
        indexer = cache.model.model.layers[1].self_attn.compressor.indexer
        before, indexer.index_topk = indexer.index_topk, 100
        try:
            again = cache.open(70, 5)
            with pytest.raises(AssertionError, match=r"layer 1, positions 0\.\.69: off by"):
                cut(cache, again, [70])
        finally:
            indexer.index_topk = before
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert select(scores, torch.tensor([4, 2]), 2).tolist() == [[1, 2], [0, 1]]
    assert select(scores, torch.tensor([1, 0]), 3).tolist() == [[0, -1, -1], [-1, -1, -1]]
    assert select(torch.full((1, 3), -torch.inf), torch.tensor([2]), 5).tolist() == [[0, 1, -1]]
    assert select(scores[:, :0], torch.tensor([0, 0]), 2).shape == (2, 0)


def test_a_missing_page_is_named():
    with Cache(block=16, alone=True) as cache:
        request = cache.open(40)
        cut(cache, request, [36])
        # What a window needs is gone.
        group = next(group.index for group in cache.layout.groups if group.sparse)
        cache.manager._tables.arrays[group][request.sequence.slot, 1:2] = -1
        with pytest.raises(StateError) as caught:
            cache.backends["deepseek_v4"]._streams[0]["kv"].read(
                cache.manager._tables.arrays[group][request.sequence.slot], 29, 36
            )
        assert str(caught.value) == "layer 0: 'kv' of block 1 is read and has no page"


@pytest.mark.parametrize(
    ("layer", "change", "text"),
    [
        (1, {"query": torch.zeros(3, 4, 31)}, "layer 1: query is [3, 4, 31], expected [3, 4, 32]"),
        (0, {"state": torch.zeros(3, 2, 32)}, "layer 0: state is [3, 2, 32], expected not there"),
        (1, {"index_norm": None}, "layer 1: index_norm is not there, expected [16]"),
        (1, {"topk": 0}, "layer 1: topk=0 must be at least 1"),
        (1, {"frequencies": torch.zeros(9)}, "layer 1: frequencies are [9], expected 1 to 8 of them"),
        (0, {"query": torch.zeros(3, 0, 32), "sinks": torch.zeros(0)}, "layer 0: queries have no heads"),
    ],
)
def test_inputs_that_do_not_fit(layer, change, text):
    import attrs

    from kvist_deepseek_v4.inputs import DeepseekV4Inputs

    sliding = {"query": torch.zeros(3, 4, 32), "kv": torch.zeros(3, 32), "scale": 1.0, "sinks": torch.zeros(4)}
    sparse = {
        "state": torch.zeros(3, 2, 64),
        "position_bias": torch.zeros(4, 64),
        "norm": torch.ones(32),
        "frequencies": torch.ones(4),
        "index_query": torch.zeros(3, 16, 16),
        "index_weights": torch.zeros(3, 16),
        "index_state": torch.zeros(3, 2, 32),
        "index_position_bias": torch.zeros(4, 32),
        "index_norm": torch.ones(16),
        "topk": 3,
    }
    inputs = DeepseekV4Inputs(**sliding, **(sparse if layer else {}))
    with Cache(block=16, alone=True) as cache:
        backend = cache.backends["deepseek_v4"]
        with pytest.raises(StateError) as early:
            backend.forward(layer, inputs)
        assert str(early.value) == "forward() before begin(): the backend has no step"
        request = cache.open(9)
        cache.commit([(request.sequence, 3, 0)])
        with pytest.raises(SpecError) as caught:
            backend.forward(layer, attrs.evolve(inputs, **change))
        assert str(caught.value) == text
