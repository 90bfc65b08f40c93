"""The replay's engine on small traces, beside the brute-force model."""

from __future__ import annotations

import numpy as np
import pytest
from toy_traces import branching, line, toy_spec

from kvist.errors import CapacityError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.policies import LeastRecentlyUsed
from kvist.replay.engine import Engine
from kvist.replay.sizes import MemorySize, layout_of_blocks
from kvist.replay.traces import read_trace


def manager_of(pages: int, block_tokens: int, eviction=None, **config: int) -> PagedCacheManager:
    layout = layout_of_blocks(toy_spec(config, block_tokens=block_tokens), pages)
    return PagedCacheManager(layout, eviction=eviction)


def pairs(requests):
    return [(request.prompt(), request.output()) for request in requests]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("block_tokens", "pages"), [(4, 40), (8, 24), (3, 60), (1, 150)])
@pytest.mark.parametrize("policy", [None, LeastRecentlyUsed()], ids=["heap", "scored"])
def test_hits_equal_brute_force_under_eviction(bruteforce, write_trace, seed, block_tokens, pages, policy):
    requests = list(read_trace(write_trace(branching(seed, 120)), vocab_size=1000))
    longest = max(request.input_length + request.output_length for request in requests)
    pages = max(pages, 2 * -(-longest // block_tokens))
    manager = manager_of(pages, block_tokens, eviction=policy)
    result = Engine(manager, concurrency=3).run(requests)
    expected, cache = bruteforce.simulate(pairs(requests), page_count=pages, block_tokens=block_tokens, concurrency=3)
    assert result.reused == expected
    assert result.stats is not None
    assert result.stats.groups[0].evicted == cache.evicted > 0
    assert result.preemptions == 0
    manager.check()


@pytest.mark.parametrize("seed", range(3))
def test_the_brute_force_model_finds_the_same_victims_with_and_without_a_heap(bruteforce, write_trace, seed):
    requests = pairs(read_trace(write_trace(branching(seed, 100))))
    options = {"page_count": 40, "block_tokens": 4, "concurrency": 3}
    with_heap, cache = bruteforce.simulate(requests, **options)
    by_scanning, other = bruteforce.simulate(requests, scan=True, **options)
    assert with_heap == by_scanning
    assert cache.evicted == other.evicted > 0
    assert cache.used == len(cache.tree()) == cache.idle


def test_whole_block_reuse_never_beats_token_wise_reuse_without_eviction(bruteforce, write_trace):
    requests = pairs(read_trace(write_trace(branching(1, 100))))
    options = {"page_count": 10_000, "block_tokens": 4, "concurrency": 3}
    token_wise, _ = bruteforce.simulate(requests, **options)
    whole, _ = bruteforce.simulate(requests, token_wise=False, **options)
    assert all(block <= token < block + 4 for block, token in zip(whole, token_wise, strict=True))
    assert sum(whole) < sum(token_wise)


def test_counts(write_trace):
    # Request 1 shares 12 tokens with request 0, request 2 is request 0 again, request 3 wants no output.
    lines = [
        line(20, 3, [1, 2, 3], block_tokens=8),
        line(12, 2, [1, 2], block_tokens=8),
        line(20, 1, [1, 2, 3], block_tokens=8),
        line(9, 0, [5, 6], block_tokens=8),
    ]
    seen = []
    engine = Engine(manager_of(50, 4), concurrency=2, on_progress=seen.append)
    result = engine.run(read_trace(write_trace(lines), vocab_size=1000))
    assert result.reused == [0, 11, 19, 0]
    assert (result.served, result.refused, result.preemptions, result.cut_tokens) == (4, 0, 0, 0)
    assert (result.prompt_tokens, result.reused_tokens, result.output_tokens) == (61, 30, 6)
    assert result.hit_rate == 30 / 61
    assert result.peak_running == 2
    assert seen[-1] == 4
    assert seen == sorted(seen)
    assert result.stats is not None
    assert (result.stats.open_sequences, result.stats.groups[0].held) == (0, 0)
    assert result.prompt_us > 0
    assert result.decode_step_us >= result.decode_token_us > 0


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_chunks_change_no_hit_when_nothing_is_evicted(write_trace, chunk_tokens):
    requests = list(read_trace(write_trace(branching(5, 60)), vocab_size=1000))
    whole = Engine(manager_of(5000, 4)).run(requests)
    chunked = Engine(manager_of(5000, 4), chunk_tokens=chunk_tokens).run(requests)
    assert chunked.reused == whole.reused


def test_requests_longer_than_the_model_are_refused_or_cut(write_trace):
    lines = [line(40, 1, [1], block_tokens=40), line(30, 9, [2], block_tokens=30), line(8, 2, [3], block_tokens=8)]
    result = Engine(manager_of(50, 4, max_tokens=32)).run(read_trace(write_trace(lines), vocab_size=1000))
    assert result.reused == [-1, 0, 0]
    assert (result.refused, result.served, result.cut_tokens, result.output_tokens) == (1, 2, 7, 4)
    assert result.prompt_tokens == 38


def test_memory_too_small_for_one_request(write_trace):
    path = write_trace([line(8, 8, [1], block_tokens=8), line(64, 1, [2], block_tokens=64)])
    manager = manager_of(16, 4)
    with pytest.raises(CapacityError) as raised:
        Engine(manager).run(read_trace(path, vocab_size=1000))
    page_bytes = manager.layout.groups[0].page_bytes
    assert str(raised.value) == (
        f"request 1 of the trace never fits: 64 prompt tokens and 1 output tokens; they need {17 * page_bytes} bytes, "
        f"the cache has {16 * page_bytes}\n"
        "hint: give the cache more memory, or leave the request out of the trace"
    )


@pytest.mark.parametrize("seed", range(4))
def test_groups_that_share_an_arena(write_trace, seed):
    requests = list(read_trace(write_trace(branching(seed, 80)), vocab_size=1000))
    layout: Layout = MemorySize.parse("220 tokens").layout(toy_spec({"window": 6}, block_tokens=4))
    manager = PagedCacheManager(layout)
    result = Engine(manager, concurrency=6).run(requests)
    manager.check()
    assert result.served == 80
    assert result.output_tokens >= sum(request.output_length for request in requests)
    assert (np.array(result.reused) >= 0).all()
    assert result.stats is not None
    assert all(group.held == 0 for group in result.stats.groups)
