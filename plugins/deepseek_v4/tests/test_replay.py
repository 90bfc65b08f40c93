"""Windows and states computed again from surviving history: exact, at the cost that is told, nothing written over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache, tokens
from deepseek_v4_models import model_logits

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.manager import RestorePolicy
from kvist.memory.device import DeviceMemory
from kvist.spec import Window
from kvist_deepseek_v4 import replay
from kvist_deepseek_v4.formats import pages_of
from kvist_deepseek_v4.plugin import FAMILY
from kvist_deepseek_v4.replay import Offer, Replay, first_kept, replay_tokens
from kvist_deepseek_v4.restore import replay_bound
from kvist_deepseek_v4.spec import cache_spec, mtp_spec

FLASH = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0]}
PRO = {"model_type": "deepseek_v4", "num_hidden_layers": 61, "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0]}


@pytest.mark.parametrize(("config", "bound"), [(FLASH, 5461), (PRO, 7747)], ids=["flash", "pro"])
def test_what_it_costs(config, bound):
    """Published: 5,461 and 7,747 tokens. A page of a window of 128 begins one token before what resuming needs."""
    layers = config["num_hidden_layers"]
    spec = cache_spec(config, dtype="bfloat16")
    assert replay_bound(spec, 1 << 20) == bound == (layers - 1) * 127 + 127
    assert replay_bound(spec, (1 << 20) + 127) == bound and replay_bound(spec, 300) == 300
    for block_tokens, drafts, pages in ((128, 0, 128), (256, 0, 128), (256, 2, 256)):
        layout = Layout.build(cache_spec(config, block_tokens=block_tokens, dtype="bfloat16", drafts=drafts), 1 << 38)
        assert first_kept(layout, 1 << 20) == (1 << 20) - pages
        assert replay_tokens(layout, 1 << 20) == (layers - 1) * 127 + pages
    tiny = cache_spec({**FLASH, "num_hidden_layers": 2, "compress_ratios": [0, 4]}, dtype="bfloat16")
    # Two windows of 127 rows, whatever is open; with a window of 3 it is the 4 closed and the 3 open states.
    assert replay_bound(tiny, 1003) == 254
    short = {**FLASH, "num_hidden_layers": 1, "compress_ratios": [4], "sliding_window": 3}
    assert replay_bound(cache_spec(short), 1003) == 7


def forget(cache: Cache, sequence, retentions=None) -> None:
    """Of a closed sequence, take what is cached of its windows out of the cache; all of them, or those."""
    for extent, _ in cache.manager._tree.walk(sequence.scope, sequence.tokens):
        for group in cache.layout.groups:
            if group.sparse and (retentions is None or group.retention in retentions):
                pages = extent.pages[group.index]
                cache.manager._ledger.unpublish(group.index, pages[pages >= 0].copy())
                pages[:] = -1
    cache.poison([])


def lost(cache: Cache, prompt: np.ndarray, retentions=None):
    """A closed sequence whose history is cached, and nothing of its windows."""
    sequence = cache.manager.open(prompt)
    cache.compute(sequence, 17)
    cache.manager.close(sequence)
    forget(cache, sequence, retentions)
    return sequence


def cached(cache: Cache, sequence) -> dict[int, torch.Tensor]:
    """By group, the bytes of all pages that the cache has of a closed sequence's tokens."""
    walked = [extent.pages for extent, _ in cache.manager._tree.walk(sequence.scope, sequence.tokens)]
    found = {}
    for group in cache.layout.groups:
        pages = np.concatenate([each[group.index] for each in walked])
        found[group.index] = cache.memory.pages(group.index)[torch.from_numpy(pages[pages >= 0]).long()].clone()
    return found


def replayed(cache: Cache, chunk: int, seen: list[int] | None = None) -> Replay:
    def run(backend, ids, positions):
        cache.adapter.bind({FAMILY: backend})
        try:
            cache.adapter.forward(ids, positions, positions[:0])
        finally:
            cache.adapter.bind(cache.backends)
        if seen is not None:
            seen.extend(positions.tolist())

    return Replay(cache.manager, cache.memory, run, chunk_tokens=chunk)


@pytest.mark.parametrize(
    ("block", "dtype", "chunk"), [(16, "float32", 7), (32, "float32", 200), (64, "float32", 7), (32, "fp8", 9)]
)
def test_it_is_exact_and_costs_what_it_says(block, dtype, chunk):
    prompt = np.concatenate([tokens(140, 1), tokens(30, 2)])
    seen: list[int] = []
    with Cache(block=block, blocks=64, dtype=dtype) as cache:
        if dtype == "float32":
            first = lost(cache, prompt[:140])
            wanted = model_logits(prompt)
        else:
            # Rounded rows are not transformers': what counts is what the cache puts out when nothing is lost.
            whole = cache.manager.open(prompt, reuse=False)
            [wanted] = cache.logits([(whole, prompt, 0)])
            cache.manager.close(whole)
            first = cache.manager.open(prompt[:140])
            cache.logits([(first, prompt[:140], 0)])
            cache.manager.close(first)
            forget(cache, first)
        length = 140 // block * block
        made, before = replayed(cache, chunk, seen), cached(cache, first)
        assert cache.manager.probe(prompt) == 0
        # Four layers' windows, and the states that pages of 16 tokens, or rings of as many, hold.
        assert made.offer(prompt) == Offer(length, 4 * 7 + 16, 0)
        sequence = made.open(prompt)
        assert sequence.computed == length and seen == list(range(length - 4 * 7 - 16, length))
        after = cached(cache, first)
        for group in cache.layout.groups:
            assert len(before[group.index]) == (0 if group.sparse else -(-140 // block))
            assert group.sparse or torch.equal(after[group.index], before[group.index])
        cache.manager.check()
        got = []
        while (at := sequence.computed) < 170:
            end = min(at + 13, 170)
            got += cache.logits([(sequence, prompt[at:end], 0)])
        assert float((torch.cat(got) - wanted[length:]).abs().max()) < 1e-4
        cache.manager.close(sequence)
        # Others find what was rebuilt, and it is as good for them.
        again = cache.manager.open(np.concatenate([prompt[:length], tokens(20, 3)]))
        assert again.reused == length
        if dtype == "float32":
            cache.compute(again, 5)


def test_too_few_tokens_would_be_wrong(monkeypatch):
    """What others offer, the last window alone, is an approximation, and not offered here."""
    prompt = tokens(120, 4)
    monkeypatch.setattr(replay, "replay_tokens", lambda layout, length: 16)
    with Cache(block=16) as cache:
        lost(cache, prompt[:100])
        sequence = replayed(cache, 50).open(prompt)
        [got] = cache.logits([(sequence, prompt[96:], 0)])
        assert float((got - model_logits(prompt)[96:]).abs().max()) > 0.1


def test_one_kind_alone_is_rebuilt_beside_the_others():
    """What is still there is neither written nor asked for again."""
    prompt = tokens(110, 5)
    with Cache(block=32, restore=RestorePolicy(every_blocks=1)) as cache:
        first = lost(cache, prompt[:100], {Window(8, ring=8)})
        made = replayed(cache, 64)
        assert made.offer(prompt) == Offer(96, 44, 0)
        kept = cached(cache, first)
        sequence = made.open(prompt)
        cache.compute(sequence, 5)
        after = cached(cache, first)
        for group in cache.layout.groups:
            if group.retention == Window(8, ring=8):
                assert len(kept[group.index]) == 0 and len(after[group.index]) == 1
            else:
                assert torch.equal(after[group.index], kept[group.index])


def test_nothing_to_rebuild_is_a_plain_open():
    prompt = tokens(60, 6)
    with Cache(block=16) as cache:
        made = replayed(cache, 64)
        assert made.offer(prompt) is None
        sequence = made.open(prompt)
        assert sequence.computed == 0
        cache.compute(sequence)
        cache.manager.close(sequence)
        assert made.offer(prompt) is None and made.offer(prompt[:10]) is None
        assert made.open(np.concatenate([prompt, [3, 4]])).computed == 60


def test_a_run_that_fails_leaves_nothing_behind():
    prompt = tokens(100, 7)

    def run(*_):
        raise RuntimeError("no model")

    with Cache(block=16) as cache:
        lost(cache, prompt)
        held = list(cache.manager._ledger.arena.taken_count)
        with pytest.raises(RuntimeError, match="no model"):
            Replay(cache.manager, cache.memory, run).open(prompt)
        cache.manager.check()
        assert list(cache.manager._ledger.arena.taken_count) == held and cache.manager.probe(prompt) == 0


def test_other_models_in_the_cache_are_refused():
    config = {**FLASH, "num_hidden_layers": 2, "compress_ratios": [0, 4, 0]}
    spec, draft = (make(config, dtype="bfloat16") for make in (cache_spec, mtp_spec))
    layout = Layout.build(spec, 1 << 24, pages_of(spec), drafts=[draft])
    with pytest.raises(SpecError) as caught:
        Replay(None, DeviceMemory(layout), lambda *_: None)
    assert str(caught.value) == (
        "replay computes the target model's layers only, and the cache has others: mtp\n"
        "hint: open the sequence without replay"
    )
