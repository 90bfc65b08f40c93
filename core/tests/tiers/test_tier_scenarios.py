"""Faults that other systems had with tiers, as scenarios; numbers are those of the collection of bug reports."""

from __future__ import annotations

import errno
import itertools

import numpy as np
import pytest

from kvist.manager import Run
from kvist.memory import blockfile
from kvist.memory.mover import Tier
from kvist.spec import History, State, Window
from kvist.testing.tier_values import Cache
from kvist.testing.values import tokens

MIXES = {"history": (History(),), "history+window": (History(), Window(6)), "history+state": (History(), State())}


def restarted(cache: Cache, folder, *retentions, **options) -> Cache:
    """Another process on the same folder."""
    cache.copier.close()
    cache.disk.close()
    return Cache(*retentions, **({"device_pages": 40, "folder": folder} | options))


def test_two_pages_for_one_host_page() -> None:
    """35 (a): the second copy waits for the first, and the first one's key is gone with its content."""
    cache = Cache(device_pages=8, host_pages=1)
    cache.cached(range(1, 5))
    cache.cached(range(11, 15))
    cache.poll()
    assert len(cache.copier.queued) == 1
    cache.cached(range(21, 25))
    cache.poll()
    assert len(cache.copier.queued) == 1
    cache.flush()
    cache.evict_device()
    loadable = {begin: cache.manager.open(tokens(range(begin, begin + 5))).loadable for begin in (1, 11, 21)}
    assert sorted(loadable.values()) == [0, 0, 4]
    begin = next(begin for begin, length in loadable.items() if length)
    sequence = cache.manager.open(tokens(range(begin, begin + 5)))
    cache.load(sequence)
    cache.compute(sequence)


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_a_page_is_copied_from_while_it_is_brought_in(order) -> None:
    """35 (b): nobody finds a page before its content has come up, in any order of copies."""
    cache = Cache(device_pages=16, host_pages=16)
    cache.cached(range(1, 9))
    cache.flush()
    cache.evict_device()
    first = cache.manager.open(tokens(range(1, 10)))
    second = cache.manager.open(tokens(range(1, 8), 50))
    assert cache.manager.load(first) and cache.manager.load(second)
    third = cache.manager.open(tokens(range(1, 7), 60))
    assert third.computed == 0
    cache.compute(third)
    tickets = list(cache.copier.queued)
    for place in order:
        cache.copier.run(tickets[place])
        cache.poll()
    # From below come whole blocks; the beginning of a block is shared when it is on the device.
    assert (first.computed, second.computed) == (8, 7 if order == (0, 1) else 4)
    for sequence in (first, second):
        cache.compute(sequence)


def test_a_page_is_stored_before_it_is_filled() -> None:
    """35 (c): what a step is still to write goes down after that."""
    cache = Cache(device_pages=16, host_pages=16)
    sequence = cache.manager.open(tokens(range(1, 9)))
    step = cache.manager.plan([Run(sequence, 8)]).commit()
    cache.poll()
    assert not cache.copier.queued
    cache.manager.close(sequence)
    cache.poll()
    assert not cache.copier.queued
    cache.values.run(step, [sequence], {id(sequence): sequence.tokens})
    cache.manager.complete(step)
    cache.flush()
    assert cache.tier("host").groups[0].moved_down == 2


def test_the_disk_keeps_its_budget_and_works_again_after_it_was_full(tmp_path, monkeypatch) -> None:
    """37"""
    cache = Cache(device_pages=40, folder=tmp_path, disk_blocks=3)
    for number in range(13):
        cache.cached(range(10 * number, 10 * number + 4))
        cache.flush()
        assert cache.disk.stats().used_bytes <= 3 * 4096
        assert len(list(tmp_path.rglob("*.block"))) <= 3
    assert cache.tier("disk").groups[0].used == 3
    cleared = cache.manager.clear()
    assert [(tier.name, tier.freed_bytes, tier.held_bytes) for tier in cleared.tiers] == [("disk", 3 * 4096, 0)]
    before = cache.disk.stats()

    def full(self, key, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(blockfile.BlockFiles, "write", full)
        cache.cached(range(500, 508))
        cache.flush()
    after = cache.disk.stats()
    assert (after.entries, after.used_bytes) == (before.entries, before.used_bytes) == (0, 0)
    assert after.write_errors == 2 == cache.tier("disk").failed_blocks
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".block", ".part")]
    cache.cached(range(600, 608))
    cache.flush()
    assert cache.disk.stats().entries == 2
    cache.check()


def damage(folder, how: str) -> None:
    for path in folder.rglob("*.block"):
        data = path.read_bytes()
        if how == "missing":
            path.unlink()
        elif how == "short":
            path.write_bytes(data[:-1])
        else:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
@pytest.mark.parametrize("mix", MIXES)
def test_files_that_are_not_what_they_were(mix: str, how: str, tmp_path) -> None:
    """38 (a)(b)(c): a miss, the entry dropped, the counter raised, and the request computes normally."""
    cache = Cache(*MIXES[mix], device_pages=40, folder=tmp_path)
    cache.cached(range(1, 14))
    cache.flush()
    cache.evict_device()
    cache.manager._claims.forget()
    cache.flush()
    damage(tmp_path, how)
    sequence = cache.manager.open(tokens(range(1, 15)))
    assert sequence.loadable == 12
    assert cache.manager.load(sequence)
    cache.copier.run()
    cache.manager.poll()
    assert (sequence.computed, sequence.loadable, sequence.loading) == (0, 0, False)
    assert cache.tier("disk").failed_blocks == cache.disk.stats().damaged > 0
    assert cache.disk.stats().entries == 0
    cache.compute(sequence)
    cache.manager.close(sequence)
    cache.flush()


@pytest.mark.parametrize("mix", MIXES)
def test_a_restart_with_other_settings_finds_nothing_and_with_the_same_everything(mix: str, tmp_path) -> None:
    """38 (d)(e)"""
    cache = Cache(*MIXES[mix], device_pages=40, folder=tmp_path)
    cache.cached(range(1, 14))
    cache.flush()
    for retentions, options in (
        ((History(), History()), {}),
        (MIXES[mix], {"fingerprint": "new weights"}),
        (MIXES[mix], {"block": 2}),
    ):
        cache = restarted(cache, tmp_path, *retentions, **options)
        assert cache.manager.open(tokens(range(1, 15))).loadable == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.block")}
    cache = restarted(cache, tmp_path, *MIXES[mix])
    sequence = cache.manager.open(tokens(range(1, 15)))
    cache.load(sequence)
    assert sequence.computed == 12
    cache.compute(sequence)
    assert {path: path.stat().st_mtime_ns for path in files} == files


@pytest.mark.parametrize("below", ["disk", "host"])
def test_a_failed_copy_is_not_a_loaded_one(below: str, tmp_path) -> None:
    """39"""
    if below == "disk":
        cache = Cache(device_pages=24, folder=tmp_path)
    else:
        cache = Cache(device_pages=24, host_pages=24)
    cache.cached(range(1, 13))
    cache.flush()
    cache.evict_device()
    sequence = cache.manager.open(tokens(range(1, 14)))
    assert cache.manager.load(sequence)
    ((ticket, copy),) = cache.copier.queued.items()
    # The disk reads the deepest block first.
    cache.copier.fail(ticket, 1)
    assert copy.block_count == 3
    cache.poll()
    assert (sequence.computed, sequence.reused, sequence.loadable) == (4, 4, 4)
    assert cache.tier(below).failed_blocks == 1
    # What failed is dropped from its tier, and not tried for ever.
    other = cache.manager.open(tokens(range(1, 14)))
    assert (other.computed, other.loadable) == (4, 4)
    cache.manager.close(other)
    cache.compute(sequence)
    cache.manager.close(sequence)
    cache.flush()
    assert cache.tier(below).reused_tokens == 4
    # Then all three fail.
    cache.evict_device()
    sequence = cache.manager.open(tokens(range(1, 14)))
    assert cache.manager.load(sequence)
    cache.copier.fail(next(iter(cache.copier.queued)))
    cache.poll()
    assert (sequence.computed, sequence.reused) == (0, 0)
    cache.compute(sequence)
    cache.manager.close(sequence)
    assert cache.manager.stats().reused_tokens == 4
    assert cache.tier(below).failed_blocks == 4


@pytest.mark.parametrize("running", [False, True], ids=["copied", "being copied"])
def test_new_weights_invalidate_every_tier(running: bool, tmp_path) -> None:
    """41: nothing of the old weights is found in any tier, also of what is on its way, and after a restart."""
    cache = Cache(device_pages=60, host_pages=60, folder=tmp_path)
    cache.cached(range(1, 13))
    cache.flush()
    live = cache.manager.open(tokens(range(30, 42)))
    cache.compute(live)
    cache.cached(range(50, 62))
    waiting = None
    if running:
        # The host has it and the disk's copy is queued; others go down, and one comes up.
        cache.poll()
        cache.copier.run()
        cache.poll()
        cache.manager._claims.forget()
        waiting = cache.manager.open(tokens(range(1, 14)))
        cache.cached(range(70, 82))
        cache.poll()
        assert cache.manager.load(waiting)
        assert {copy.target for copy in cache.copier.queued.values()} == {Tier.DEVICE, Tier.HOST, Tier.DISK}
    else:
        cache.flush()
    undecided = cache.manager.open(tokens(range(50, 61), 0))
    cleared = cache.manager.clear()
    assert undecided.loadable == undecided.computed and not cache.manager.load(undecided)
    cache.manager.close(undecided)
    assert [tier.name for tier in cleared.tiers] == ["host", "disk"]
    assert cleared.tiers[1].freed_bytes > 0 and cleared.tiers[1].held_bytes == 0
    assert (cleared.tiers[0].held_bytes > 0) == running
    assert cleared.held[0] > 0
    cache.check()
    for _ in range(2):
        for begin in (1, 30, 50, 70):
            sequence = cache.manager.open(tokens(range(begin, begin + 13)))
            assert (sequence.computed, sequence.loadable) == (0, 0)
            cache.manager.close(sequence)
        cache.flush()
    if waiting is not None:
        assert not waiting.loading
        cache.compute(waiting)
        cache.manager.close(waiting)
    live.extend([42, 43])
    cache.compute(live)
    cache.manager.close(live)
    cache.flush()
    assert not list(tmp_path.rglob("*.block"))
    assert cache.manager.open(tokens(range(30, 44))).loadable == 0
    assert cache.tier("host").used_bytes == 0
    again = restarted(cache, tmp_path, host_pages=60)
    assert again.manager.open(tokens(range(1, 14))).loadable == 0


def test_a_copy_to_the_disk_that_runs_after_the_clear_keeps_nothing(tmp_path) -> None:
    """41: also where the process ends before anybody notices."""
    cache = Cache(device_pages=40, folder=tmp_path)
    cache.cached(range(1, 13))
    cache.poll()
    cache.manager.clear()
    cache.copier.run()
    assert not list(tmp_path.rglob("*.block"))
    again = restarted(cache, tmp_path)
    assert again.manager.open(tokens(range(1, 14))).loadable == 0


def test_who_computes_on_under_new_weights_is_found_under_them() -> None:
    """41: only what was there before is hidden."""
    cache = Cache(device_pages=40, host_pages=40)
    cache.cached(range(1, 13))
    cache.flush()
    cache.manager.clear()
    cache.cached(range(1, 13))
    cache.flush()
    cache.evict_device()
    sequence = cache.manager.open(np.arange(1, 14))
    cache.load(sequence)
    assert sequence.computed == 12
    cache.compute(sequence)
