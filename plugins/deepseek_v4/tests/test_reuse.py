"""Prefix hits, forks, suspension, tiers and lost pages through a real manager: layers put out what transformers' do."""

from __future__ import annotations

import numpy as np
import pytest
from deepseek_v4_drive import Cache

from kvist.manager import RestorePolicy
from kvist.spec import History, Window

#: A restore point at each block's end.
EVERY = RestorePolicy(every_blocks=1)


def finished(cache: Cache, request, chunk=None):
    cache.finish(request, chunk)
    cache.manager.close(request.sequence)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("chunk", [None, 1])
def test_hits_at_every_page_multiple(block, chunk):
    """B shares 16 .. 64 tokens with A, from a slot of its own; the suffix is computed at once, or one by one."""
    with Cache(block=block, blocks=96, restore=EVERY) as cache:
        first = cache.open(80, 1)
        finished(cache, first, 13)
        for shared in range(block, 80, block):
            request = cache.open(shared + 19, 2 + shared, first, shared)
            assert request.sequence.reused == shared
            finished(cache, request, chunk)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("length", [21, 36, 37, 38, 39, 48, 63, 64, 65])
def test_a_turn_goes_on_where_it_ended(block, length):
    """The end of a turn can be resumed at in any phase of 4 and 16, inside a block too, and again from another slot."""
    with Cache(block=block, blocks=64) as cache:
        first = cache.open(length, 3)
        finished(cache, first, 11)
        other = cache.open(30, 4)
        for seed in (5, 6):
            request = cache.open(length + 21, seed, first, length)
            # By the second time the open block is a whole one, and its ring is that of its end.
            assert request.sequence.reused == length or seed == 6
            cache.step([(other, 3), (request, 2)])
            finished(cache, request, 5)


def test_what_the_first_shares_ends_the_hit_of_the_second():
    """Two prompts that are equal for 16 tokens and different after: a row of 16 tokens is found by all of them only."""
    with Cache(block=16, restore=EVERY) as cache:
        first = cache.open(40, 7)
        finished(cache, first)
        request = cache.open(40, 8, first, 31)
        assert request.sequence.reused == 16
        finished(cache, request)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("length", [16, 30, 33, 39, 64])
def test_forks_go_different_ways(block, length):
    with Cache(block=block) as cache:
        parent = cache.open(length, 9)
        cache.finish(parent, 7)
        ways = [parent]
        for seed in (1, 2):
            ways.append(cache.fork(parent, length + 25, seed))
        parent = cache.extend(parent, length + 25, 3)
        ways[0] = parent
        while ways[0].sequence.computed < length + 25:
            cache.step([(way, min(4, length + 25 - way.sequence.computed)) for way in ways])


@pytest.mark.parametrize("length", [33, 39, 48])
def test_suspended_and_resumed(length):
    with Cache(block=16) as cache:
        request = cache.open(length + 30, 10)
        cache.step([(request, length)])
        cache.manager.suspend(request.sequence)
        assert cache.manager.resume(request.sequence) == length
        cache.finish(request, 7)


def test_taken_back_and_written_again():
    with Cache(block=16, restore=EVERY) as cache:
        request = cache.open(60, 11)
        cache.finish(request, 9)
        assert cache.manager.truncate(request.sequence, 37) == 32
        again = cache.extend(request, 66, 12, keep=37)
        cache.finish(again, 5)


@pytest.mark.parametrize("kind", [Window(8, ring=8), Window(16)])
def test_one_kind_lost_is_a_shorter_hit(kind):
    """The tail of one kind at the deepest boundary goes: the hit ends at the one before, for all kinds."""
    with Cache(block=32, blocks=64, restore=EVERY) as cache:
        first = cache.open(100, 13)
        finished(cache, first, 17)
        deeper = cache.manager.probe(np.concatenate([first.sequence.tokens[:96], [5, 6]]))
        assert deeper == 96
        cache.lose(first, kind if kind in cache.retentions() else Window(16, ring=16), block=2)
        request = cache.open(110, 14, first, 96)
        assert request.sequence.reused == 64
        finished(cache, request, 9)


def test_history_has_no_gap():
    with Cache(block=16) as cache:
        assert {group.retention for group in cache.layout.groups if not group.sparse} == {History()}


def test_running_sequences_keep_their_windows_only():
    """Pages in use do not grow with the length but for the history, and all come back."""
    with Cache(block=16, blocks=64) as cache:
        request = cache.open(250, 15)
        held = []
        for _ in range(25):
            cache.step([(request, 10)])
            held.append(
                [(cache.manager._tables.arrays[g.index][request.sequence.slot] >= 0).sum() for g in cache.layout.groups]
            )
        sparse = [group.index for group in cache.layout.groups if group.sparse]
        assert max(max(counts[group] for group in sparse) for counts in held) <= 3
        cache.manager.close(request.sequence)
        cache.manager.clear()
        assert cache.manager.check() is None
        assert [cache.manager._ledger.arena.taken_count[group.index] for group in cache.layout.groups] == [0, 0, 0]
