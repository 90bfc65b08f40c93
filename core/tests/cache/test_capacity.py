"""What ``capacity`` says fits, fits when it is tried, and one more does not."""

from __future__ import annotations

import numpy as np
import pytest
from cache_requests import cached, compute, manager_of
from cache_traffic import MIXES, retentions_of, traffic_of

from kvist.errors import CapacityError, RequestError, StateError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.values import make_layout, make_spec, tokens

#: Group sizes that differ, so that slabs hold several pages and have to move.
UNEQUAL = {
    "wide history+window": (History(), History(), History(), Window(9)),
    "history+wide state": (History(), State(), State(), State(), State(), State()),
    "sinks+window+history": (Window(7, sinks=3), Window(4), Window(4), History()),
}
ALL = {**MIXES, **UNEQUAL}


def fits(manager: PagedCacheManager, length: int, count: int, chunk: int | None = None) -> bool:
    """Open that many sequences of fresh tokens and compute them side by side; leaves them closed and uncached."""
    sequences = []
    try:
        for _ in range(count):
            sequences.append(manager.open(np.zeros(length, np.int32), reuse=False))
        for start in range(0, length, chunk or length):
            runs = [Run(sequence, min(chunk or length, length - start)) for sequence in sequences]
            plan = manager.plan(runs)
            if not plan.fits:
                return False
            if chunk is not None:
                manager.complete(plan.commit())
        return True
    except (CapacityError, RequestError):
        return False
    finally:
        for sequence in sequences:
            manager.close(sequence)
        manager.check()


def busy(mix: str, seed: int, block: int) -> PagedCacheManager:
    """A manager after some random traffic: partly held, partly cached, no step in flight."""
    rng = np.random.default_rng([9, seed, block])
    spec = make_spec(block, *retentions_of(ALL[mix], block), vocab_size=4)
    layout = make_layout(spec, int(rng.integers(40, 90)) // block)
    manager = PagedCacheManager(layout)
    manager.shuffle_free_pages(rng)
    traffic = traffic_of(manager, rng)
    for _ in range(int(rng.integers(0, 60))):
        traffic.operate()
    while traffic.flights:
        traffic.finish_oldest()
    return manager


@pytest.mark.parametrize("mix", ALL)
@pytest.mark.parametrize("seed", range(6))
def test_what_it_says_is_what_a_plan_takes(mix: str, seed: int) -> None:
    manager = busy(mix, seed, (1, 3, 4)[seed % 3])
    before = manager.stats()
    capacity = manager.capacity()
    most, counts = capacity.tokens, {length: capacity.requests(length) for length in (1, 2, 3, 5, 9, 17, 40)}
    assert manager.stats() == before
    manager.check()
    for length, count in counts.items():
        assert count == 0 or fits(manager, length, count)
        assert not fits(manager, length, count + 1)
    if most is not None:
        assert most == 0 or fits(manager, most, 1)
        assert not fits(manager, most + 1, 1)


@pytest.mark.parametrize("mix", ALL)
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_what_it_says_of_chunks_can_be_computed_in_chunks(mix: str, chunk: int, seed: int) -> None:
    for length in (1, 7, 13, 30):
        for more in (0, 1):
            # Trying evicts, so each try gets a manager of its own.
            manager = busy(mix, seed, 3 + seed)
            count = manager.capacity(chunk).requests(length) + more
            if not more:
                assert count == 0 or fits(manager, length, count, chunk)
            elif len({group.page_bytes for group in manager.layout.groups}) == 1:
                assert not fits(manager, length, count, chunk)
    capacity = busy(mix, seed, 3 + seed).capacity(chunk)
    most = capacity.tokens
    if most is not None:
        assert capacity.requests(most + 1) == 0
        assert most == 0 or capacity.requests(most) >= 1


def test_a_window_counts_for_what_it_holds() -> None:
    manager = manager_of(12, Window(8))
    assert manager.capacity().tokens == 48
    # Three blocks at any time: the window's two or three, the chunk's one.
    assert manager.capacity(chunk_tokens=1).requests(1000) == 4
    assert manager.capacity(chunk_tokens=1).tokens is None
    assert manager.capacity().requests(1000) == 0


def test_a_state_counts_for_one_page_of_any_length() -> None:
    manager = manager_of(5, State())
    capacity = manager.capacity()
    assert (capacity.tokens, capacity.requests(1), capacity.requests(10**6)) == (None, 5, 5)


def test_groups_tell_free_cached_and_available() -> None:
    manager = manager_of(10)
    cached(manager, range(1, 9))
    held = manager.open(tokens(range(50, 62)))
    compute(manager, held)
    (group,) = manager.capacity().groups
    assert (group.free, group.cached, group.available) == (5, 2, 7)
    assert manager.capacity().tokens == 28
    assert [manager.capacity().requests(length) for length in (1, 4, 5, 28, 29)] == [7, 7, 3, 1, 0]


def test_slabs_that_can_move_are_available() -> None:
    row = RowFormat((1, 4), "float32")
    wide = [Stream(f"s{number}", row, History()) for number in range(6)]
    spec = CacheSpec((Layer(0, (*wide, Stream("w", row, Window(5)))),), 4, "test")
    manager = PagedCacheManager(Layout.build(spec, 1 << 15))
    history, window = manager.layout.groups
    assert history.page_bytes > window.page_bytes
    capacity = manager.capacity().groups
    # Nobody has taken anything: each could have the whole arena.
    assert [group.available for group in capacity] == [manager.layout.page_capacity(each) for each in (history, window)]
    sequence = manager.open(tokens(range(1, 9)))
    compute(manager, sequence)
    after = manager.capacity().groups
    assert all(now.available < then.available for now, then in zip(after, capacity))
    manager.close(sequence)
    # What is cached can be evicted, and then its slabs can move.
    assert [group.available for group in manager.capacity().groups] == [group.available for group in capacity]


def test_the_models_length_limits_too() -> None:
    manager = manager_of(100, max_tokens=50)
    capacity = manager.capacity()
    assert (capacity.tokens, capacity.requests(50), capacity.requests(51)) == (50, 7, 0)
    assert manager_of(3, max_tokens=50).capacity().tokens == 12


def test_nothing_fits_a_full_cache() -> None:
    manager = manager_of(2)
    held = manager.open(tokens(range(1, 9)))
    compute(manager, held)
    capacity = manager.capacity()
    assert (capacity.tokens, capacity.requests(1), capacity.groups[0].available) == (0, 0, 0)


def test_an_answer_is_good_until_the_manager_changes() -> None:
    manager = manager_of(4)
    capacity = manager.capacity()
    manager.open(tokens(1, 2))
    for ask in (lambda: capacity.tokens, lambda: capacity.requests(4)):
        with pytest.raises(StateError) as caught:
            ask()
        assert str(caught.value) == (
            "this capacity is stale: the manager changed after it was asked for\nhint: ask again"
        )


def test_senseless_questions_are_refused() -> None:
    manager = manager_of(4)
    with pytest.raises(RequestError, match=r"requests\(0\): a sequence has at least one token"):
        manager.capacity().requests(0)
    with pytest.raises(RequestError, match=r"capacity\(chunk_tokens=0\) must be at least 1"):
        manager.capacity(0)
