"""Drafts, prefix hits inside a block, rollback, forks and tiers: through a real manager, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

VARIANTS = ["equal heads", "two index heads per key head", "two local blocks", "one block, none forced"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_verified_and_taken_back(variant, tiny, logits, tokens, machine):
    """A verify step is a short prefill: each draft sees the blocks of its own position. Junk drafts leave no trace."""
    model, prompt = tiny(variant), tokens(70)
    random = np.random.default_rng(1)
    expected = logits(model, prompt)
    page = 2
    with machine(model, page=page, pages=128) as cache:
        sequence = cache.manager.open(prompt[:21], reuse=False)
        cache.finish(sequence, lambda _: expected)
        while sequence.computed < 66:
            at, right = sequence.computed, int(random.integers(0, 4))
            drafts = np.concatenate([prompt[at + 1 : at + 1 + right], random.integers(2, 97, 4 - right)]).astype(
                np.int32
            )
            sequence.extend(prompt[at : at + 1])
            [got] = cache.step([(sequence, [prompt[at], *drafts], 4)], accepted=[1 + right])
            # Right drafts, and the first wrong one, were given the right history.
            assert float((got[: right + 1] - expected[at : at + right + 1]).abs().max()) < 1e-4
            sequence.extend(prompt[at + 1 : at + 1 + right])
            assert sequence.computed == at + 1 + right


@pytest.mark.parametrize(("variant", "page"), [*((variant, 4) for variant in VARIANTS), (VARIANTS[0], 1)])
def test_prefix_hits_at_every_position_of_a_block(variant, page, tiny, expecting, tokens, machine):
    model, base = tiny(variant), tokens(40)
    branches = [np.concatenate([base[:cut], tokens(30, seed=cut)]) for cut in range(20, 30)]
    expected = expecting(model, base, *branches)
    with machine(model, page=page, pages=640 // page) as cache:
        first = cache.manager.open(base)
        cache.finish(first, expected)
        cache.manager.close(first)
        for cut, branch in zip(range(20, 30), branches):
            sequence = cache.manager.open(branch)
            assert sequence.reused >= cut
            cache.finish(sequence, expected)
            cache.manager.close(sequence)


def test_truncated_and_written_again(tiny, expecting, tokens, machine):
    model, base = tiny("equal heads"), tokens(50)
    other = np.concatenate([base[:22], tokens(30, seed=9)])
    expected = expecting(model, base, other)
    with machine(model, page=4) as cache:
        sequence = cache.manager.open(base)
        cache.finish(sequence, expected)
        assert cache.manager.truncate(sequence, 22) == 22
        sequence.extend(other[22:])
        cache.finish(sequence, expected, chunk=5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forks_inside_a_block_never_see_each_other(variant, tiny, expecting, tokens, machine):
    model, base = tiny(variant), tokens(30)
    ways = [np.concatenate([base, tokens(25, seed=seed)]) for seed in (1, 2, 3)]
    expected = expecting(model, base, *ways)
    with machine(model, page=4, pages=96) as cache:
        sequences = [cache.manager.open(base)]
        cache.finish(sequences[0], expected)
        sequences += [cache.manager.fork(sequences[0]) for _ in range(2)]
        for sequence, way in zip(sequences, ways):
            sequence.extend(way[30:])
        while sequences[0].computed < 55:
            cache.compute([(each, 5) for each in sequences], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_offloaded_and_restored(variant, tiny, expecting, tokens, tiers):
    """Room for one sequence and a half: each prompt pushes the one before down to the host, and comes back from it."""
    model = tiny(variant)
    prompts = [tokens(60, seed=seed) for seed in range(3)]
    longer = [np.concatenate([prompt, tokens(11, seed=50)]) for prompt in prompts]
    expected = expecting(model, *prompts, *longer)
    with tiers(model, page=4, pages=26) as tiered:
        cache = tiered.cache
        for prompt in prompts:
            sequence = cache.manager.open(prompt)
            cache.finish(sequence, expected)
            cache.manager.close(sequence)
            tiered.settle()
        for prompt in longer[:2]:
            sequence = cache.manager.open(prompt)
            assert sequence.loadable > sequence.computed
            tiered.load(sequence)
            # The manager may leave what is not worth a copy to be computed.
            assert sequence.computed >= 56
            cache.finish(sequence, expected)
            cache.manager.close(sequence)
            tiered.settle()


def test_suspended_and_resumed(tiny, expecting, tokens, tiers):
    model = tiny("equal heads")
    prompts = [tokens(60, seed=seed) for seed in range(2)]
    expected = expecting(model, *prompts)
    with tiers(model, page=4, pages=26) as tiered:
        cache = tiered.cache
        first = cache.manager.open(prompts[0])
        cache.compute([(first, 50)], expected)
        cache.manager.suspend(first)
        tiered.settle()
        second = cache.manager.open(prompts[1])
        cache.finish(second, expected)
        cache.manager.close(second)
        tiered.settle()
        cache.manager.resume(first)
        tiered.load(first)
        assert first.computed >= 48
        cache.finish(first, expected)
        cache.manager.close(first)


def test_another_process_finds_every_stream_on_the_disk(tmp_path, tiny, expecting, tokens, tiers):
    model, prompt = tiny("equal heads"), tokens(60)
    longer = np.concatenate([prompt, tokens(20, seed=3)])
    expected = expecting(model, prompt, longer)
    with tiers(model, folder=tmp_path, page=4) as tiered:
        sequence = tiered.cache.manager.open(prompt)
        tiered.cache.finish(sequence, expected)
        tiered.cache.manager.close(sequence)
    with tiers(model, folder=tmp_path, page=4, seed=1) as tiered:
        sequence = tiered.cache.manager.open(longer)
        assert (sequence.computed, sequence.loadable) == (0, 60)
        tiered.load(sequence)
        assert sequence.computed == 60
        tiered.cache.finish(sequence, expected)
        tiered.cache.manager.close(sequence)
