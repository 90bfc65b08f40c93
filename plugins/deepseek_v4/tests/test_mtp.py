"""Multi-token prediction layers: windows of their own beside the model's, through the same steps, drafts and hits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from deepseek_v4_drive import Cache

from kvist.errors import RequestError
from kvist.manager import RestorePolicy

#: One layer of each kind of the model, and the predicting one.
LAYERS = (0, 1, 2, 5)


@pytest.mark.parametrize("block", [16, 64])
def test_it_goes_along_in_chunks_and_single_tokens(block):
    with Cache(block=block, alone=True, mtp=True, layers=LAYERS) as cache:
        assert [group.domain for group in cache.layout.groups] == ["target"] * (len(cache.layout.groups) - 1) + ["mtp"]
        one, other = cache.open(60, 1), cache.open(33, 2)
        cache.step([(one, 20), (other, 3)])
        for _ in range(6):
            cache.step([(other, 1), (one, 1)])
        cache.step([(one, 34), (other, 24)])


@pytest.mark.parametrize("block", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_drafts_in_every_phase(block):
    """0 to d of d drafts stay, at every phase of windows of 4 and 16 tokens; one more is refused."""
    drafts = 4
    with Cache(block=block, drafts=drafts, alone=True, blocks=500, mtp=True, layers=LAYERS[-1:]) as cache:
        first = cache.open(44, 6)
        requests = {}
        for start, kept in itertools.product(range(17, 33), range(drafts + 1)):
            requests[start, kept] = cache.expect_like(first, 44)
        cache.step([(request, start) for (start, _), request in requests.items()])
        if block == 64:
            with pytest.raises(RequestError) as caught:
                cache.step([(request, 1, drafts + 1, 0) for request in requests.values()])
            assert str(caught.value) == (
                "Run(drafts=5): what the spec keeps can take back 4 at most\n"
                "hint: draft fewer tokens, or give the spec's ring or history more room"
            )
        cache.step([(request, 1, drafts, kept) for (_, kept), request in requests.items()])
        cache.step([(request, 1, min(kept + 1, drafts), kept) for (_, kept), request in requests.items()])
        cache.step([(request, 44 - request.sequence.computed) for request in requests.values()])


@pytest.mark.parametrize("block", [16, 32])
def test_a_hit_needs_its_window_too(block):
    """Found together; without the predicting layer's window the hit is an earlier one, for all layers."""
    with Cache(block=block, blocks=96, mtp=True, layers=LAYERS, restore=RestorePolicy(every_blocks=1)) as cache:
        first = cache.open(100, 3)
        cache.finish(first, 13)
        cache.manager.close(first.sequence)
        request = cache.open(90, 4, first, 64)
        assert request.sequence.reused == 64
        cache.finish(request, 9)
        cache.manager.close(request.sequence)
        [group] = [group for group in cache.layout.groups if group.domain == "mtp"]
        for extent, _ in cache.manager._tree.walk(first.sequence.scope, first.sequence.tokens):
            at = 63 // block - extent.start // block
            if 0 <= at < extent.pages.shape[1] and extent.pages[group.index, at] >= 0:
                cache.manager._ledger.unpublish(group.index, extent.pages[group.index, at : at + 1].copy())
                extent.pages[group.index, at] = -1
        assert cache.manager.probe(np.concatenate([first.sequence.tokens[:64], [5, 6]])) == 64 - block
        request = cache.open(90, 5, first, 64)
        assert request.sequence.reused == 64 - block
        cache.finish(request, 30)
