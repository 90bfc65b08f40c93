"""Whatever becomes idle goes down, whatever happens before its copy begins, while it runs, and between its batches."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.manager import Run
from kvist.restore import RestorePolicy
from kvist.spec import History, Retention, State, Window
from kvist.testing.tier_values import Cache
from kvist.testing.values import tokens

BELOW = {"host": (60, False), "disk": (0, True), "both": (60, True)}


def made(*retentions: Retention, below: str, tmp_path, device_pages: int, **options) -> Cache:
    host, disk = BELOW[below]
    folder = tmp_path / "disk" if disk else None
    return Cache(*retentions, device_pages=device_pages, host_pages=host, folder=folder, **options)


def comes_up(cache: Cache, *parts: int | range) -> int:
    """Copy what there is to copy, let others take the device, load all that is then promised of these tokens, and
    compute the rest: every row is the right one. Returns what was promised."""
    cache.flush()
    takers = []
    while not takers or takers[-1].computed:
        takers.append(cache.manager.open(np.arange(1000, 1004), reuse=False))
        if cache.manager.plan([Run(takers[-1], 4)]).fits:
            cache.compute(takers[-1])
    for taker in takers:
        cache.manager.close(taker)
    sequence = cache.manager.open(tokens(*parts))
    assert sequence.computed == 0
    promised = sequence.loadable
    if promised:
        cache.load(sequence)
        assert sequence.computed == promised
    cache.compute(sequence)
    cache.manager.close(sequence)
    return promised


@pytest.mark.parametrize("below", BELOW)
def test_what_eviction_leaves_of_a_path_goes_down(below: str, tmp_path) -> None:
    """Two prompts with the same first two blocks, computed side by side; what comes after those is evicted before any
    copy."""
    cache = made(History(), below=below, tmp_path=tmp_path, device_pages=10)
    other = cache.manager.open(tokens(range(1, 9), range(50, 58)))
    cache.cached(range(1, 17))
    cache.compute(other)
    cache.manager.close(other)
    taker = cache.manager.open(np.arange(100, 132), reuse=False)
    cache.compute(taker)
    cache.manager.close(taker)
    assert cache.manager.probe(tokens(range(1, 18))) == 8
    assert comes_up(cache, range(1, 18)) == 8


def keeping(cache: Cache, end: int, *positions: int):
    """A sequence with the tokens 1 to ``end`` that will keep what resuming at these positions takes."""
    sequence = cache.manager.open(tokens(range(1, end + 1)), restore_at=positions)
    assert sequence.computed == 0
    return sequence


@pytest.mark.parametrize("retention", [State(), Window(3)], ids=["state", "window"])
@pytest.mark.parametrize("below", BELOW)
def test_a_page_that_is_added_during_a_copy_goes_down(below: str, retention: Retention, tmp_path) -> None:
    cache = made(History(), retention, below=below, tmp_path=tmp_path, device_pages=80)
    other = keeping(cache, 16, 4)
    cache.cached(range(1, 17))
    cache.poll()
    (first,) = cache.copier.queued.values()
    assert first.block_count == 4
    # Nobody but the copy has the run when the other one leaves a page in its first block.
    cache.compute(other)
    cache.manager.close(other)
    assert comes_up(cache, range(1, 5), 99, 98) == 4
    assert comes_up(cache, range(1, 18)) == 16


@pytest.mark.parametrize("below", ["host", "disk"])
def test_pages_that_are_added_between_batches_do_not_keep_the_rest_from_going_down(below: str, tmp_path) -> None:
    cache = made(History(), Window(3), below=below, tmp_path=tmp_path, device_pages=40)
    other = keeping(cache, 48, 4, 8, 12, 16)
    cache.cached(range(1, 49))
    cache.poll()
    (first,) = cache.copier.queued.values()
    # A quarter of the device; two blocks are to follow.
    assert first.block_count == 10
    cache.compute(other)
    cache.manager.close(other)
    assert comes_up(cache, range(1, 17), 99) == 16
    assert comes_up(cache, range(1, 49), 99) == 48


@pytest.mark.parametrize("backoff", [0, 1, 3, 4, 7, 8])
@pytest.mark.parametrize("below", ["host", "disk"])
@pytest.mark.parametrize("retention", [State(), Window(6)], ids=["state", "window"])
def test_without_a_history_a_load_brings_what_the_backoff_leaves(
    retention: Retention, below: str, backoff: int, tmp_path
) -> None:
    """What nobody is to reuse at the end has no page, and is known all the same."""
    cache = made(
        retention,
        below=below,
        tmp_path=tmp_path,
        device_pages=20,
        backoff_tokens=backoff,
        restore=RestorePolicy(every_blocks=1),
    )
    cache.cached(range(1, 21))
    left = 20 - backoff
    # A state is kept at the end of every block, a window is there everywhere.
    assert comes_up(cache, range(1, 23)) == (left - left % 4 if retention.exact else left)
