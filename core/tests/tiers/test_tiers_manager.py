"""A manager with tiers: what is idle goes down in time, what comes up is what went down, and nothing waits."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest

from kvist.errors import SpecError, StateError, TierError
from kvist.manager import PagedCacheManager, Run, Tiers
from kvist.memory.copier import ManualCopier
from kvist.memory.mover import Tier
from kvist.restore import RestorePolicy
from kvist.spec import History, Scope, State, Window
from kvist.testing.tier_values import Cache
from kvist.testing.values import tokens
from kvist.wishes import Wish, Wishes

MIXES = {
    "history": (History(),),
    "window": (Window(6),),
    "state": (State(),),
    "history+window": (History(), Window(6)),
    "history+sinks+state": (History(), Window(6, sinks=2), State()),
    "ring": (History(), Window(2, ring=3)),
}
BELOW = {"host": (60, False), "disk": (0, True), "both": (60, True)}


def made(mix: str, below: str, tmp_path, **options) -> Cache:
    host, disk = BELOW[below]
    retentions = MIXES[mix]
    options = {
        "device_pages": 14 * len(retentions),
        "host_pages": host,
        "folder": tmp_path / "disk" if disk else None,
    } | options
    return Cache(*retentions, **options)


def drop_device(cache: Cache) -> None:
    """Let others take all that is idle on the device."""
    tree, ledger = cache.manager._tree, cache.manager._ledger
    for _ in range(100):
        leaves = list(tree.leaves())
        for leaf in leaves:
            for group, row in enumerate(tree.truncate(leaf, 0)):
                ledger.unpublish(group, row[row >= 0])
        if not leaves:
            break
    cache.check()
    cache.values.poison()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("below", BELOW)
def test_every_stream_travels(mix: str, below: str, tmp_path) -> None:
    """ev-01: what was computed is written down, evicted, loaded and read, in every group."""
    cache = made(mix, below, tmp_path)
    cache.cached(range(1, 23))
    assert cache.manager.copying == 0
    cache.flush()
    drop_device(cache)
    assert cache.manager.probe(tokens(range(1, 24))) == 0
    sequence = cache.manager.open(tokens(range(1, 24)))
    assert (sequence.reused, sequence.computed) == (0, 0)
    # An open last block has no content key.
    expected = 20 if below == "disk" else 22
    assert sequence.loadable == expected
    cache.load(sequence)
    assert sequence.computed == sequence.reused == sequence.loadable == expected
    cache.compute(sequence)
    cache.manager.close(sequence)
    stats = cache.manager.stats()
    assert stats.reused_tokens == expected
    assert sum(tier.reused_tokens for tier in stats.tiers) == expected
    cache.flush()


@pytest.mark.parametrize("mix", MIXES)
def test_a_restart_finds_the_prefix_on_disk(mix: str, tmp_path) -> None:
    """ev-01 over a restart: the index is rebuilt, the content is the same, nothing is written again."""
    cache = made(mix, "both", tmp_path)
    cache.cached(range(1, 23))
    cache.flush()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "disk").rglob("*.block")}
    assert written
    cache.copier.close()
    cache.disk.close()
    again = made(mix, "both", tmp_path)
    sequence = again.manager.open(tokens(range(1, 24)))
    assert sequence.loadable == 20
    again.load(sequence)
    again.compute(sequence)
    again.manager.close(sequence)
    assert [tier.reused_tokens for tier in again.manager.stats().tiers] == [0, 20]
    again.flush()
    assert all(path.stat().st_mtime_ns == time for path, time in written.items() if path.exists())
    # What came from the disk is on the host now.
    drop_device(again)
    sequence = again.manager.open(tokens(range(1, 24)))
    again.load(sequence)
    assert sequence.below.disk_tokens == 0


def test_nothing_happens_before_poll_and_nobody_waits_for_a_copy() -> None:
    cache = Cache(host_pages=16)
    cache.cached(range(1, 9))
    assert not cache.copier.queued
    cache.poll()
    assert len(cache.copier.queued) == cache.manager.copying == 1
    # The content is on the device all the time, and others reuse it.
    assert cache.manager.probe(tokens(range(1, 10))) == 8
    cache.cached(range(1, 10))
    cache.poll()
    assert cache.tier("host").groups[0].moved_down == 0
    cache.copier.run()
    cache.poll()
    assert cache.tier("host").groups[0].moved_down == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_copies_finish_in_any_order(order) -> None:
    cache = Cache(device_pages=24, host_pages=24)
    for number in range(3):
        cache.cached(range(100 * number, 100 * number + 10))
    cache.poll()
    tickets = list(cache.copier.queued)
    assert len(tickets) == 3 - (len(tickets) < 3)
    for place in order:
        if place < len(tickets):
            cache.copier.run(tickets[place])
            cache.poll()
    cache.flush()
    drop_device(cache)
    sequences = [cache.manager.open(tokens(range(100 * n, 100 * n + 11))) for n in range(3)]
    assert all(cache.manager.load(sequence) for sequence in sequences)
    tickets = list(cache.copier.queued)
    for done, place in enumerate(order, 1):
        cache.copier.run(tickets[place])
        cache.poll()
        assert sum(sequence.computed == 10 for sequence in sequences) == done
    for sequence in sequences:
        cache.compute(sequence)
        cache.manager.close(sequence)


def test_what_a_copy_reads_stays_until_it_has_finished() -> None:
    """ev-04: pages of a copy in progress never move; plans that need them do not fit until then."""
    cache = Cache(device_pages=8, host_pages=8)
    cache.cached(range(1, 9))
    cache.poll()
    taker = cache.manager.open(np.arange(100, 132), reuse=False)
    plan = cache.manager.plan([Run(taker, 32)])
    assert not plan.fits
    assert str(plan.shortages[0]) == "target/History() needs 8 pages and can get 6"
    cache.copier.run()
    cache.poll()
    assert cache.manager.plan([Run(taker, 32)]).fits
    cache.manager.close(taker)


def test_a_plan_made_before_a_copy_began_is_stale() -> None:
    cache = Cache(device_pages=8, host_pages=8)
    cache.cached(range(1, 9))
    taker = cache.manager.open(np.arange(100, 132), reuse=False)
    plan = cache.manager.plan([Run(taker, 32)])
    cache.poll()
    with pytest.raises(StateError, match="this plan is stale"):
        plan.commit()


def test_copies_down_leave_most_of_the_device_to_plans() -> None:
    cache = Cache(device_pages=16, host_pages=32)
    for number in range(4):
        cache.cached(range(100 * number, 100 * number + 16))
    cache.poll()
    assert sum(copy.block_count for copy in cache.copier.queued.values()) == 4
    cache.flush()
    assert cache.tier("host").groups[0].moved_down == 16


def test_a_loading_sequence_cannot_be_planned() -> None:
    cache = Cache(host_pages=16)
    cache.cached(range(1, 9))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 10)))
    assert cache.manager.load(sequence)
    assert not cache.manager.load(sequence)
    with pytest.raises(StateError) as error:
        cache.manager.plan([Run(sequence, 1)])
    assert str(error.value) == "plan() of a sequence that is loading\nhint: poll() until it is not"
    with pytest.raises(StateError, match="that is loading"):
        cache.manager.decode_batch().join(sequence)
    cache.copier.run()
    cache.poll()
    cache.compute(sequence)


def test_a_load_that_finds_no_room_changes_nothing() -> None:
    """ev-05: best effort, and the sequence is valid both ways."""
    cache = Cache(device_pages=8, host_pages=16)
    cache.cached(range(1, 17))
    cache.flush()
    drop_device(cache)
    taker = cache.manager.open(np.arange(100, 124), reuse=False)
    cache.compute(taker)
    sequence = cache.manager.open(tokens(range(1, 18)))
    before = cache.manager.stats()
    assert sequence.loadable == 16
    assert not cache.manager.load(sequence)
    cache.check()
    assert cache.manager.stats() == before and not cache.copier.queued
    cache.manager.close(taker)
    cache.load(sequence)
    cache.compute(sequence)


@pytest.mark.parametrize("end", ["close", "suspend", "truncate", "clear"])
def test_who_waits_for_a_load_may_leave(end: str) -> None:
    cache = Cache(device_pages=12, host_pages=16)
    cache.cached(range(1, 17))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 18)))
    assert cache.manager.load(sequence)
    getattr(cache.manager, end)(*{"clear": (), "truncate": (sequence, 5)}.get(end, (sequence,)))
    assert not sequence.loading
    cache.check()
    cache.copier.run()
    cache.poll()
    # It arrives for everybody, unless it must not.
    assert cache.manager.probe(tokens(range(1, 18))) == (0 if end == "clear" else 16)
    if end == "suspend":
        assert cache.manager.resume(sequence) == 16
    if end != "close":
        cache.compute(sequence)
        cache.manager.close(sequence)
    cache.flush()
    assert all(group.held == 0 for group in cache.manager.stats().groups)


def test_what_others_compute_while_it_comes_up_is_kept_once() -> None:
    cache = Cache(device_pages=24, host_pages=24)
    cache.cached(range(1, 17))
    cache.flush()
    drop_device(cache)
    first = cache.manager.open(tokens(range(1, 18)))
    assert cache.manager.load(first)
    other = cache.manager.open(tokens(range(1, 14)))
    cache.compute(other)
    cache.copier.run()
    cache.poll()
    assert first.computed == 16
    cache.compute(first)
    cache.manager.close(other)
    cache.manager.close(first)
    cache.flush()
    group = cache.manager.stats().groups[0]
    assert group.cached == 5


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("mix", MIXES)
def test_suspend_moves_down_and_resume_with_load_moves_up(mix: str, below: str, tmp_path) -> None:
    """st-03, sx-08: another request can use all of the device, and nothing is computed again."""
    cache = made(mix, below, tmp_path, restore=RestorePolicy(every_blocks=1))
    sequence = cache.manager.open(tokens(range(1, 20)))
    cache.compute(sequence)
    sequence.extend([20, 21])
    cache.compute(sequence)
    cache.manager.suspend(sequence)
    assert len(cache.copier.queued) == 1
    assert sequence.loadable == 0
    with pytest.raises(StateError, match="suspended sequence"):
        cache.manager.load(sequence)
    cache.flush()
    drop_device(cache)
    cache.evict_device()
    sequence.extend([22])
    assert cache.manager.resume(sequence) == 0
    # A state is kept at the end only, and the disk has whole blocks.
    assert sequence.loadable == (21 if below != "disk" else 16 if "state" in mix else 20)
    loadable = sequence.loadable
    cache.load(sequence)
    assert sequence.computed == loadable
    cache.compute(sequence)
    stats = cache.manager.stats()
    assert stats.resumed_tokens == sum(tier.resumed_tokens for tier in stats.tiers) == loadable
    assert sum(tier.reused_tokens for tier in stats.tiers) == 0
    cache.manager.close(sequence)


def test_what_is_suspended_cannot_be_lost_while_it_moves_down() -> None:
    """ev-03: held until it is below, then evictable."""
    cache = Cache(device_pages=8, host_pages=8)
    sequence = cache.manager.open(tokens(range(1, 17)))
    cache.compute(sequence)
    cache.manager.suspend(sequence)
    taker = cache.manager.open(np.arange(100, 132), reuse=False)
    assert not cache.manager.plan([Run(taker, 32)]).fits
    cache.copier.run()
    cache.poll()
    cache.compute(taker)
    cache.manager.close(taker)
    assert cache.manager.resume(sequence) == 0
    cache.load(sequence)
    assert sequence.computed == 16


def test_what_is_suspended_without_room_below_is_given_up_at_once() -> None:
    cache = Cache(device_pages=8, host_pages=8, pending_max=1)
    cache.cached(range(50, 58))
    cache.poll()
    sequence = cache.manager.open(tokens(range(1, 9)))
    cache.compute(sequence)
    assert cache.copier.room == 0
    cache.manager.suspend(sequence)
    taker = cache.manager.open(np.arange(100, 124), reuse=False)
    cache.compute(taker)
    assert cache.manager.resume(sequence) == 0
    assert sequence.loadable == 0
    cache.manager.close(taker)
    cache.compute(sequence)


def test_the_host_keeps_what_was_used_last() -> None:
    cache = Cache(device_pages=24, host_pages=6)
    for number in range(3):
        cache.cached(range(100 * number, 100 * number + 8))
        cache.flush()
    cache.cached(range(8))
    cache.flush()
    cache.cached(range(300, 308))
    cache.flush()
    drop_device(cache)
    loadable = [cache.manager.open(tokens(range(100 * n, 100 * n + 9))).loadable for n in range(4)]
    assert loadable[0] == loadable[3] == 8
    assert loadable[1] == 0
    host = cache.tier("host").groups[0]
    assert (host.capacity, host.evicted > 0) == (6, True)
    assert host.used <= host.capacity


def test_a_host_smaller_than_a_prompt_keeps_its_beginning() -> None:
    cache = Cache(device_pages=16, host_pages=3)
    cache.cached(range(1, 33))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 34)))
    assert sequence.loadable in (8, 12)
    cache.load(sequence)
    cache.compute(sequence)


def test_what_is_too_short_is_not_worth_a_copy() -> None:
    cache = Cache(device_pages=24, host_pages=24, minimum_blocks=3)
    cache.cached(range(1, 9))
    cache.cached(range(100, 116))
    cache.flush()
    assert cache.tier("host").groups[0].moved_down == 4
    drop_device(cache)
    assert cache.manager.open(tokens(range(100, 117))).loadable == 16
    cache.cached(range(100, 108))
    # Two blocks only are missing.
    assert cache.manager.open(tokens(range(100, 117))).loadable == 8


def test_sequences_without_reuse_leave_no_trace_below() -> None:
    cache = Cache(host_pages=16)
    sequence = cache.manager.open(tokens(range(1, 18)), reuse=False)
    cache.compute(sequence)
    assert sequence.loadable == sequence.computed
    cache.manager.suspend(sequence)
    cache.manager.resume(sequence)
    cache.manager.close(sequence)
    cache.flush()
    assert not cache.mover.moves


def test_scopes_never_meet_below(tmp_path) -> None:
    cache = Cache(host_pages=32, folder=tmp_path)
    cache.cached(range(1, 9), scope=Scope(salt="a"))
    cache.flush()
    drop_device(cache)
    assert cache.manager.open(tokens(range(1, 10)), Scope(salt="b")).loadable == 0
    sequence = cache.manager.open(tokens(range(1, 10)), Scope(salt="a"))
    cache.load(sequence)
    cache.compute(sequence)


def test_sources_of_a_prompt_add_up_over_the_tiers(tmp_path) -> None:
    """sx-07: device, host and disk in one hit, in blocks and in the open last one."""
    cache = Cache(History(), Window(6), device_pages=60, host_pages=60, folder=tmp_path, restore=RestorePolicy(1))
    cache.cached(range(1, 25))
    cache.flush()
    cache.manager._lower.host.forget()
    drop_device(cache)
    cache.cached(range(1, 17))
    cache.flush()
    drop_device(cache)
    cache.cached(range(1, 9))
    sequence = cache.manager.open(tokens(range(1, 26)))
    device = sequence.computed
    assert (device, sequence.loadable) == (8, 24)
    cache.load(sequence)
    assert (sequence.below.host_tokens, sequence.below.disk_tokens) == (8, 8)
    cache.compute(sequence)
    cache.manager.close(sequence)
    stats = cache.manager.stats()
    assert [tier.reused_tokens for tier in stats.tiers] == [8, 8]


def test_the_cold_tiers_count_every_block_once(tmp_path) -> None:
    """sx-06"""
    cache = Cache(History(), Window(6), device_pages=60, host_pages=60, folder=tmp_path, restore=RestorePolicy(1))
    cache.cached(range(1, 25))
    cache.flush()
    for _ in range(2):
        host, disk = cache.manager.stats().tiers
        assert [group.used for group in host.groups] == [group.moved_down for group in host.groups] == [6, 6]
        assert [group.used for group in disk.groups] == [group.moved_down for group in disk.groups] == [6, 6]
        assert host.used_bytes == sum(group.used * group.page_bytes for group in host.groups)
        # Known below already, so nothing moves down again.
        drop_device(cache)
        sequence = cache.manager.open(tokens(range(1, 25)))
        cache.load(sequence)
        cache.manager.close(sequence)
        cache.flush()


def test_a_snapshot_without_room_below_is_left_out() -> None:
    """ss-05: what does not fit below is skipped, and nothing fails."""
    cache = Cache(History(), State(), device_pages=40, host_pages=2, restore=RestorePolicy(1))
    cache.cached(range(1, 25))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 26)))
    if sequence.loadable:
        cache.load(sequence)
    cache.compute(sequence)


@pytest.mark.parametrize("ran", [False, True])
def test_pages_that_a_step_still_writes_are_no_place_for_a_load(ran: bool) -> None:
    """A fork that is closed before it ran leaves a copy for the next step, and its page is free."""
    cache = Cache(device_pages=10, host_pages=16)
    cache.cached(range(1, 17))
    cache.flush()
    drop_device(cache)
    parent = cache.manager.open(tokens(range(50, 56)))
    cache.compute(parent)
    child = cache.manager.fork(parent)
    cache.manager.close(child)
    sequence = cache.manager.open(tokens(range(1, 18)))
    assert cache.manager.load(sequence)
    (copy,) = cache.copier.queued.values()
    owed = cache.manager._pages_in_use()[0]
    assert owed and not set(owed) & set(copy.target_pages[0].tolist())
    cache.copier.run()
    cache.poll()
    parent.extend([99])
    cache.compute(parent)
    cache.compute(sequence)


def test_what_a_fork_never_copied_is_not_written_down() -> None:
    """ev-07, 35c: published, and not there before the next step."""
    cache = Cache(device_pages=24, host_pages=24)
    parent = cache.manager.open(tokens(range(1, 7)))
    cache.compute(parent)
    child = cache.manager.fork(parent)
    cache.manager.close(child)
    cache.poll()
    assert not cache.copier.queued
    parent.extend([7])
    cache.compute(parent)
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 7), 50))
    cache.load(sequence)
    cache.compute(sequence)


@pytest.mark.parametrize("failing", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("mix", MIXES)
def test_copies_down_that_fail_are_not_there(mix: str, failing, tmp_path) -> None:
    """ev-07: accounting stays right, and what did arrive is of use."""
    cache = made(mix, "host", tmp_path, restore=RestorePolicy(1))
    cache.cached(range(1, 13))
    cache.poll()
    while cache.copier.queued:
        ticket = next(iter(cache.copier.queued))
        count = cache.copier.queued[ticket].block_count
        cache.copier.fail(ticket, *[position for position in failing if position < count])
        cache.manager.poll()
        cache.check()
    assert cache.tier("host").failed_blocks > 0
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 14)))
    if sequence.loadable:
        cache.load(sequence)
    cache.compute(sequence)


def test_a_closed_copier_changes_nothing() -> None:
    cache = Cache(host_pages=16)
    cache.cached(range(1, 9))
    cache.flush()
    cache.cached(range(20, 28))
    cache.copier.close()
    with pytest.raises(StateError, match="the copier is closed"):
        cache.manager.poll()
    cache.check()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 10)))
    with pytest.raises(StateError, match="the copier is closed"):
        cache.manager.load(sequence)
    cache.check()
    cache.compute(sequence)


def test_without_tiers_nothing_is_loadable() -> None:
    cache = Cache(host_pages=4)
    manager = PagedCacheManager(cache.layout)
    sequence = manager.open(tokens(range(1, 10)))
    assert sequence.loadable == sequence.computed == 0 and not sequence.loading
    assert not manager.load(sequence)
    manager.poll()
    assert manager.copying == 0 and manager.stats().tiers == () == manager.clear().tiers


def test_tiers_that_do_not_fit_are_refused(tmp_path) -> None:
    cache = Cache(host_pages=4, folder=tmp_path)
    other = Cache(History(), Window(4), device_pages=20, host_pages=4)
    with pytest.raises(SpecError, match="without a tier"):
        Tiers(cache.copier)
    with pytest.raises(SpecError, match="must be at least 1"):
        Tiers(cache.copier, cache.layout, minimum_blocks=0)
    with pytest.raises(TierError, match="other pages than the device"):
        PagedCacheManager(cache.layout, tiers=Tiers(cache.copier, other.layout))
    with pytest.raises(TierError, match="another format than this cache's"):
        PagedCacheManager(other.layout, tiers=Tiers(cache.copier, disk=cache.disk))
    nameless = attrs.evolve(cache.layout, spec=attrs.evolve(cache.layout.spec, fingerprint=""))
    with pytest.raises(SpecError, match="no fingerprint"):
        PagedCacheManager(nameless, tiers=Tiers(ManualCopier(cache.mover), disk=cache.disk))


def test_another_process_s_sequence_does_not_load() -> None:
    cache, other = Cache(host_pages=4), Cache(host_pages=4)
    sequence = other.manager.open(tokens(range(1, 9)))
    with pytest.raises(StateError, match="another manager's sequence"):
        cache.manager.load(sequence)


def test_a_sequence_that_has_run_does_not_load() -> None:
    cache = Cache(device_pages=24, host_pages=24)
    cache.cached(range(1, 17))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 18)))
    cache.compute(sequence, 2)
    assert not cache.manager.load(sequence)
    cache.compute(sequence)


def test_the_disk_is_read_through_the_host_s_copies(tmp_path) -> None:
    cache = Cache(device_pages=24, host_pages=24, folder=tmp_path)
    cache.cached(range(1, 17))
    cache.flush()
    assert cache.mover.moves == ["device to host, 4 blocks", "host to disk, 4 blocks"]
    assert [copy for copy in cache.mover.moves if "device to disk" in copy] == []
    assert cache.mover.rows[Tier.HOST][0].shape[0] == 25


def test_windows_that_go_down_stay_until_the_copy_has_finished() -> None:
    """ev-04 for groups whose pages may go although the run that they belong to is held."""
    cache = Cache(History(), Window(6), device_pages=16, host_pages=16)
    cache.cached(range(1, 13))
    cache.poll()
    taker = cache.manager.open(np.arange(100, 200)[:40], reuse=False)
    while cache.manager.plan([Run(taker, 4)]).fits:
        cache.compute(taker, 4)
    moving = sum(int((pages >= 0).sum()) for copy in cache.copier.queued.values() for pages in copy.source_pages)
    assert sum(group.held for group in cache.manager.stats().groups) >= moving
    cache.values.poison()
    cache.copier.run()
    cache.poll()
    cache.manager.close(taker)


def test_a_full_disk_keeps_beginnings(tmp_path) -> None:
    cache = Cache(device_pages=60, folder=tmp_path, disk_blocks=3)
    cache.cached(range(1, 21))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 22)))
    assert sequence.loadable == 12
    cache.load(sequence)
    cache.compute(sequence)


def test_a_gap_on_the_disk_ends_what_it_has(tmp_path) -> None:
    cache = Cache(device_pages=60, folder=tmp_path)
    cache.cached(range(1, 17))
    cache.flush()
    content = cache.manager._lower._content
    keys = content.keys(cache.manager._tree.walk(Scope(), tokens(range(1, 17))))
    assert cache.disk.remove(keys[1])
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 18)))
    assert sequence.loadable == 4
    cache.load(sequence)
    # What is missing in the middle comes back when it is computed.
    cache.compute(sequence)
    cache.manager.close(sequence)
    cache.flush()
    drop_device(cache)
    assert cache.manager.open(tokens(range(1, 18))).loadable == 16


def test_a_snapshot_of_an_open_block_is_no_snapshot_of_the_whole_one() -> None:
    cache = Cache(History(), State(), device_pages=60, host_pages=60)
    cache.cached(range(1, 7))
    cache.flush()
    drop_device(cache)
    cache.cached(range(1, 14))
    sequence = cache.manager.open(tokens(range(1, 9), 50, 51))
    # The prompt's own restore point, and not the end of its open block.
    assert (sequence.computed, sequence.loadable) == (0, 4)
    cache.load(sequence)
    cache.compute(sequence)


@pytest.mark.parametrize("backoff", range(9))
def test_a_load_brings_what_the_backoff_leaves(backoff: int) -> None:
    cache = Cache(device_pages=60, host_pages=60, backoff_tokens=backoff)
    cache.cached(range(1, 21))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 23)))
    assert sequence.loadable == 20 - backoff
    cache.load(sequence)
    assert sequence.computed == 20 - backoff
    cache.compute(sequence)


def test_a_run_that_was_cut_and_goes_on_differently_has_other_keys(tmp_path) -> None:
    cache = Cache(device_pages=8, folder=tmp_path)
    cache.cached(range(1, 13))
    cache.flush()
    taker = cache.manager.open(np.arange(100, 128), reuse=False)
    cache.compute(taker)
    cache.manager.close(taker)
    assert cache.manager.probe(tokens(range(1, 13))) == 4
    cache.cached(range(1, 5), range(50, 58))
    cache.flush()
    drop_device(cache)
    sequence = cache.manager.open(tokens(range(1, 5), range(50, 59)))
    assert sequence.loadable == 12
    cache.load(sequence)
    cache.compute(sequence)


def test_what_failed_and_cannot_be_dropped_is_not_promised_again() -> None:
    cache = Cache(device_pages=60, host_pages=60)
    cache.cached(range(1, 13))
    cache.flush()
    drop_device(cache)
    first, second = (cache.manager.open(tokens(range(1, 14))) for _ in range(2))
    assert cache.manager.load(first) and cache.manager.load(second)
    cache.copier.fail(next(iter(cache.copier.queued)))
    cache.poll()
    # The other copy still reads what this one could not.
    assert (first.computed, first.loadable, first.loading) == (0, 0, False)
    cache.compute(first)
    cache.flush()
    assert second.computed == 12
    cache.compute(second)


def test_paths_that_do_not_fit_below_together_do_not_push_each_other_out_for_ever() -> None:
    cache = Cache(device_pages=24, host_pages=9)
    cache.cached(range(100, 132))
    cache.cached(range(200, 232))
    cache.flush()
    assert cache.tier("host").groups[0].moved_down <= 16
    moved = cache.tier("host").groups[0].moved_down
    for _ in range(20):
        cache.poll()
        cache.copier.run()
    assert cache.tier("host").groups[0].moved_down == moved


def test_what_comes_up_again_has_the_wish_of_who_asked_for_it() -> None:
    cache = Cache(device_pages=8, host_pages=16)
    wishes = Wishes(((0, 8, Wish(5)),))
    cache.cached(range(1, 9), wishes=wishes)
    cache.flush()
    cache.evict_device()
    sequence = cache.manager.open(tokens(range(1, 10)), wishes=wishes)
    cache.load(sequence)
    cache.compute(sequence)
    cache.manager.close(sequence)
    cache.flush()
    for number in range(8):
        cache.cached(range(100 * number + 100, 100 * number + 108))
    assert cache.manager.probe(tokens(range(1, 10))) == 8
