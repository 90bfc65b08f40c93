"""Sampling: the right distribution, reproducible in every batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from everybody import Everybody

from kvist_transformers import Request, Sampling
from kvist_transformers.sampling import SamplingColumns, sample, uniforms


def columns(count, temperature=1.0, top_k=0, top_p=1.0):
    return SamplingColumns(
        np.full(count, temperature),
        np.full(count, top_k, np.int64),
        np.full(count, top_p),
        np.arange(count, dtype=np.uint64),
    )


def direct(logits, temperature, top_k, top_p):
    """The distribution after temperature, top-k and top-p, written from their definitions, one token at a time."""
    probabilities = torch.softmax(logits.double() / temperature, -1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if top_k:
        order = order[:top_k]
    total = sum(probabilities[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += probabilities[token]
    result = np.zeros(len(probabilities))
    for token in kept:
        result[token] = probabilities[token] / mass
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.7, 0, 1.0),
        (1.5, 5, 1.0),
        (1.0, 0, 0.8),
        (1.0, 6, 0.7),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-9),
        (1.0, 99, 0.9),
    ],
)
def test_distribution(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(12) * 2
    expected = direct(logits, temperature, top_k, top_p)
    count = 20_000
    drawn = sample(logits.expand(count, -1), columns(count, temperature, top_k, top_p), np.zeros(count, np.int64))
    frequency = np.bincount(drawn, minlength=12) / count
    assert (frequency[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(frequency - expected) <= 4.5 * deviation + 1e-12).all()


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p_over_a_flat_large_vocabulary(top_p):
    """More tokens than the shortcut looks at."""
    logits = torch.linspace(0, 1, 5000)[torch.randperm(5000, generator=torch.manual_seed(0))][None]
    expected = direct(logits[0], 1.0, 0, top_p)
    drawn = sample(logits.expand(3000, -1), columns(3000, 1.0, 0, top_p), np.zeros(3000, np.int64))
    assert len(set(drawn.tolist())) > 1000
    assert (expected[drawn] > 0).all()


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    mixed = columns(6, 1.0)
    mixed.temperature[::2] = 0
    drawn = sample(logits, mixed, np.zeros(6, np.int64))
    assert drawn[::2].tolist() == logits.argmax(-1)[::2].tolist()


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    logits = torch.randn(30, 3000) * 3
    rng = np.random.default_rng(0)
    mixed = SamplingColumns(
        rng.choice([0.0, 0.5, 1.3], 30),
        rng.choice([0, 3, 50], 30),
        rng.choice([0.3, 0.9, 1.0], 30),
        rng.integers(0, 1 << 63, 30).astype(np.uint64),
    )
    counters = rng.integers(0, 100, 30)
    together = sample(logits, mixed, counters)
    for row in range(30):
        alone = sample(logits[row : row + 1], mixed.take(np.array([row])), counters[row : row + 1])
        assert alone[0] == together[row]


def test_uniforms():
    seeds = np.arange(2000, dtype=np.uint64)
    by_seed = uniforms(seeds, np.zeros(2000, np.int64))
    by_count = uniforms(np.zeros(2000, np.uint64), np.arange(2000))
    for numbers in (by_seed, by_count):
        assert ((numbers >= 0) & (numbers < 1)).all()
        assert len(np.unique(numbers)) == 2000
        counts, _ = np.histogram(numbers, 20, (0, 1))
        assert ((counts > 60) & (counts < 145)).all()
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.08


def test_one_seed_gives_one_text_alone_in_a_batch_and_after_a_pause(tiny, engines, prompts):
    model = tiny("llama")
    asked = prompts(6, shared=12, seed=4)
    sampling = [Sampling(temperature=0.9, top_k=20 * (i % 2), top_p=0.95, seed=i) for i in range(6)]
    requests = [Request(prompt, max_new_tokens=20, sampling=how) for prompt, how in zip(asked, sampling)]
    engine = engines(model, block_tokens=4)
    together = [completion.tokens.tolist() for completion in engine.generate(requests)]
    for request, tokens in zip(requests, together):
        engine.close()
        engine = engines(model, block_tokens=16)
        [alone] = engine.generate([request])
        assert alone.tokens.tolist() == tokens
    engine.close()
    engine = engines(model, block_tokens=4, memory=30 * 2048, backend="torch-reference", admission=Everybody())
    squeezed = engine.generate(requests)
    assert engine.stats.pauses > 0
    assert [completion.tokens.tolist() for completion in squeezed] == together


def test_seeds_differ(tiny, engines):
    engine = engines(tiny("llama"))
    texts = [
        tuple(completion.tokens.tolist())
        for completion in engine.generate(
            [Request([5, 6, 7], max_new_tokens=12, sampling=Sampling(temperature=2.0, seed=seed)) for seed in range(5)]
            + [Request([5, 6, 7], max_new_tokens=12, sampling=Sampling(temperature=2.0)) for _ in range(3)]
        )
    ]
    assert len(set(texts)) == 8


def test_every_token_has_its_own_randomness(tiny, engines):
    """With a flat distribution a token is the random number itself."""
    engine = engines(tiny("llama"))
    flat = Sampling(temperature=1e9, seed=3)
    [completion] = engine.generate([Request([5, 6, 7], max_new_tokens=40, sampling=flat)])
    assert len(set(completion.tokens.tolist())) > 20
