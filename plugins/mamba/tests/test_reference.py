"""The reference functions against each other and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvist_mamba.reference import (
    causal_conv,
    conv_states,
    delta_net_chunked_scan,
    delta_net_scan,
    mamba1_scan,
    mamba2_chunked_scan,
    mamba2_scan,
)

DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def test_the_convolution_reads_its_state_and_keeps_raw_inputs():
    inputs, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[100.0, 10.0, 1.0]])
    sums, history = causal_conv(inputs, weight, torch.tensor([0.5]), torch.tensor([[8.0, 9.0]]))
    assert sums.tolist() == [[891.5], [912.5]]  # 8 9 1, then 9 1 2
    assert conv_states(history, 2, [1, 2]).tolist() == [[[9.0, 1.0]], [[1.0, 2.0]]]


def test_one_channel_of_mamba_by_hand():
    """Decay exp(-ln 2) = 1/2 per unit of dt: S = 1/2 * 4 + 1 * 3 * 2 = 8, then 1/4 * 8 + 2 * 1 * 2 = 6."""
    values, states = mamba1_scan(
        u=torch.tensor([[3.0], [1.0]]),
        dt=torch.tensor([[1.0], [2.0]]),
        b=torch.tensor([[2.0], [2.0]]),
        c=torch.tensor([[1.0], [10.0]]),
        a=torch.tensor([[-math.log(2)]]),
        d=torch.tensor([100.0]),
        state=torch.tensor([[4.0]]),
        after=[1, 2],
    )
    assert values.flatten().tolist() == pytest.approx([308.0, 160.0])
    assert states.flatten().tolist() == pytest.approx([8.0, 6.0])


def test_one_head_of_a_delta_net_by_hand():
    """The state, halved, knows 2 for this key; it is moved half of the way to 5: 3.5."""
    values, states = delta_net_scan(
        q=torch.tensor([[[7.0]]]),
        k=torch.tensor([[[3.0]]]),
        v=torch.tensor([[[5.0]]]),
        log_decay=torch.tensor([[-math.log(2)]]),
        beta=torch.tensor([[0.5]]),
        state=torch.tensor([[[4.0]]]),
        after=[1],
    )
    assert states.item() == pytest.approx(3.5, rel=1e-6)
    assert values.item() == pytest.approx(3.5, rel=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 64])
@pytest.mark.parametrize("after", [[29], [9, 29], [1, 2, 3, 16, 28], []])
def test_chunks_of_mamba2_change_nothing(chunk_tokens, after):
    """Also from an initial state, with two groups, and where states are wanted inside a chunk."""
    x, dt = random(29, 4, 5), random(29, 4, seed=1).exp()
    b, c = random(29, 2, 3, seed=2), random(29, 2, 3, seed=3)
    a, d, state = -random(4, seed=4).exp(), random(4, seed=5), random(4, 5, 3, seed=6)
    values, states = mamba2_scan(x, dt, b, c, a, d, state, after)
    chunked, chunked_states = mamba2_chunked_scan(x, dt, b, c, a, d, state, after, chunk_tokens)
    assert torch.allclose(chunked, values, rtol=1e-10, atol=1e-12)
    assert torch.allclose(chunked_states, states, rtol=1e-10, atol=1e-12)
    assert len(states) == len(after)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 64])
@pytest.mark.parametrize("after", [[29], [9, 29], [1, 2, 3, 16, 28], []])
def test_chunks_of_a_delta_net_change_nothing(chunk_tokens, after):
    """Also from an initial state, with two value heads for each key head, and where states are wanted in a chunk."""
    q, k, v = random(29, 2, 5), random(29, 2, 5, seed=1), random(29, 4, 3, seed=2)
    decay, beta = -random(29, 4, seed=3).exp(), random(29, 4, seed=4).sigmoid()
    state = random(4, 5, 3, seed=5)
    values, states = delta_net_scan(q, k, v, decay, beta, state, after)
    chunked, chunked_states = delta_net_chunked_scan(q, k, v, decay, beta, state, after, chunk_tokens)
    assert torch.allclose(chunked, values, rtol=1e-10, atol=1e-12)
    assert torch.allclose(chunked_states, states, rtol=1e-10, atol=1e-12)
    assert states.shape == (len(after), 4, 5, 3)


@pytest.mark.parametrize("strength", [1e-3, 0.3, 30.0])
def test_chunks_keep_their_precision_whatever_the_decay(strength):
    """Sums of a chunk's logarithms grow far beyond the differences that count; in float32, against float64."""
    x, dt = random(200, 4, 5), random(200, 4, seed=1).exp()
    b, c = random(200, 2, 3, seed=2), random(200, 2, 3, seed=3)
    a, d, state = -strength * random(4, seed=4).exp(), random(4, seed=5), random(4, 5, 3, seed=6)
    exact, exact_states = mamba2_scan(x, dt, b, c, a, d, state, [200])
    single = [each.float() for each in (x, dt, b, c, a, d, state)]
    for chunk_tokens in (32, 200):
        values, states = mamba2_chunked_scan(*single, [200], chunk_tokens)
        for found, wanted in ((values, exact), (states, exact_states)):
            assert ((found - wanted).abs().max() / wanted.abs().max()) < 2e-6
