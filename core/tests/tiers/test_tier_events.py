"""What listeners are told of host and disk, on hand-made sequences; random traffic is in test_random_tiers.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvist.events import Moved, Removed, Stored, apply
from kvist.keys import block_keys, format_digest, scope_seed
from kvist.memory.disk import DiskStore
from kvist.memory.diskstats import Change
from kvist.spec import History, Scope, Window
from kvist.testing.tier_values import Cache
from kvist.testing.values import tokens


def keys_of(cache: Cache, *parts: int | range) -> tuple[bytes, ...]:
    seed = scope_seed(format_digest(cache.layout), Scope())
    return tuple(block_keys(seed, tokens(*parts), cache.layout.block_tokens))


def test_what_goes_down_moves_and_stays_above_until_it_is_evicted() -> None:
    cache = Cache(device_pages=16, host_pages=16)
    listener = cache.manager.listen()
    cache.cached(range(1, 10))
    (stored,) = listener.take()
    assert (stored.tier, stored.keys) == ("device", keys_of(cache, range(1, 9)))
    cache.flush()
    (moved,) = listener.take()
    assert isinstance(moved, Moved)
    assert (moved.source, moved.target, moved.number) == ("device", "host", 2)
    assert (moved.keys, moved.scope, moved.start) == (stored.keys, stored.scope, 0)
    cache.evict_device()
    gone = listener.take()
    assert {(type(event), event.tier, event.reason) for event in gone} == {(Removed, "device", "evicted")}
    assert [key for event in gone for key in event.keys] == [*reversed(stored.keys)]
    sequence = cache.manager.open(tokens(range(1, 10)))
    cache.load(sequence)
    (back,) = listener.take()
    assert isinstance(back, Stored)
    assert (back.tier, back.keys, back.parent) == ("device", stored.keys, stored.parent)
    assert back.tokens is not None and back.tokens.tolist() == list(range(1, 9))


def test_a_full_host_tells_what_it_gives_up() -> None:
    cache = Cache(device_pages=16, host_pages=2)
    listener = cache.manager.listen()
    cache.cached(range(1, 9))
    cache.flush()
    cache.cached(range(11, 19))
    cache.flush()
    host = [event for event in listener.take() if "host" in (getattr(event, "tier", ""), getattr(event, "target", ""))]
    index: set = set()
    apply(index, host)
    gone = [(event.reason, event.tier) for event in host if isinstance(event, Removed)]
    assert set(gone) == {("evicted", "host")}
    assert index == {(key, 0, "host") for key in keys_of(cache, range(11, 19))}


def test_after_a_restart_a_listener_begins_with_what_is_on_disk(tmp_path) -> None:
    cache = Cache(device_pages=16, folder=tmp_path)
    cache.cached(range(1, 13))
    cache.flush()
    cache.copier.close()
    cache.disk.close()
    again = Cache(device_pages=16, folder=tmp_path)
    listener = again.manager.listen()
    assert listener.behind
    snapshot = listener.snapshot()
    index: set = set()
    apply(index, snapshot.stored)
    assert index == {(key, 0, "disk") for key in keys_of(again, range(1, 13))}
    for record in snapshot.stored:
        assert (record.tier, record.scope, record.start, record.parent, record.tokens) == ("disk", *[None] * 4)
    # What comes up is told with all that is known of it then.
    sequence = again.manager.open(tokens(range(1, 14)))
    again.load(sequence)
    (stored,) = listener.take()
    assert (stored.tier, stored.number) == ("device", snapshot.number + 1)
    assert stored.tokens is not None and stored.tokens.tolist() == list(range(1, 13))


def test_a_damaged_file_is_told_as_a_failure(tmp_path) -> None:
    cache = Cache(device_pages=16, folder=tmp_path)
    cache.cached(range(1, 13))
    cache.flush()
    cache.evict_device()
    listener = cache.manager.listen()
    listener.snapshot()
    second = keys_of(cache, range(1, 13))[1]
    (file,) = tmp_path.rglob(f"*{second.hex()}*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    sequence = cache.manager.open(tokens(range(1, 14)))
    cache.load(sequence)
    stored, removed = listener.take()
    assert (removed.tier, removed.reason, removed.keys) == ("disk", "failed", (second,))
    assert (stored.tier, stored.block_count) == ("device", 1)


def test_what_the_host_could_not_give_is_told_with_all_behind_it() -> None:
    cache = Cache(device_pages=16, host_pages=16)
    cache.cached(range(1, 13))
    cache.flush()
    cache.evict_device()
    listener = cache.manager.listen()
    listener.snapshot()
    sequence = cache.manager.open(tokens(range(1, 14)))
    assert cache.manager.load(sequence)
    cache.copier.fail(next(iter(cache.copier.queued)), 1)
    cache.poll()
    stored, removed = listener.take()
    assert (stored.tier, stored.block_count) == ("device", 1)
    assert (removed.tier, removed.reason, removed.keys) == ("host", "failed", keys_of(cache, range(1, 13))[1:])


def test_clearing_is_told_for_every_tier(tmp_path) -> None:
    cache = Cache(device_pages=16, host_pages=16, folder=tmp_path)
    listener = cache.manager.listen()
    cache.cached(range(1, 9))
    cache.flush()
    index: set = set()
    apply(index, listener.take())
    assert {tier for _, _, tier in index} == {"device", "host", "disk"}
    cache.manager.clear()
    events = listener.take()
    assert {(event.tier, event.reason) for event in events} == {
        (tier, "cleared") for tier in ("device", "host", "disk")
    }
    apply(index, events)
    assert index == set()


def test_a_block_gains_a_group_on_disk(tmp_path) -> None:
    """The window's page of a block is kept later than the history's: one entry more, none twice."""
    cache = Cache(History(), Window(4), device_pages=32, folder=tmp_path)
    listener = cache.manager.listen()
    cache.cached(range(1, 17))
    cache.flush()
    cache.cached(range(1, 9))
    cache.flush()
    moved = [event for event in listener.take() if isinstance(event, Moved)]
    entries = [(key, group) for event in moved for key in event.keys for group in event.groups]
    assert len(entries) == len(set(entries))
    keys = keys_of(cache, range(1, 17))
    assert {(keys[1], 0), (keys[1], 1), (keys[3], 1)} <= set(entries)


def test_nothing_is_kept_while_nobody_listens(tmp_path) -> None:
    cache = Cache(device_pages=16, host_pages=16, folder=tmp_path)
    listener = cache.manager.listen()
    cache.cached(range(1, 9))
    cache.flush()
    listener.take()
    listener.close()
    assert cache.manager._lower.host.tree.watcher is None
    cache.cached(range(11, 19))
    cache.flush()
    assert cache.disk.changes() == []
    # Whoever comes back sees that something is missing.
    second = cache.manager.listen()
    assert second.behind and second.snapshot().number == listener.number + 1
    cache.cached(range(21, 29))
    cache.flush()
    assert cache.disk.changes() == [], "poll() tells what a copier's thread has done"
    assert {event.target for event in second.take() if isinstance(event, Moved)} == {"host", "disk"}


def test_changes_of_other_threads_are_in_order_and_complete(tmp_path) -> None:
    """Writers push each other out of a small disk while somebody follows."""
    disk = DiskStore(tmp_path, b"f" * 32, [8], 20 * 4096)
    disk.follow(True)

    def write(first: int) -> None:
        for number in range(60):
            disk.put(bytes([first, number]) * 16, [np.int64(number).tobytes()])

    threads = [threading.Thread(target=write, args=(first,)) for first in range(3)]
    index: set[bytes] = set()

    def follow(changes: list[Change]) -> None:
        for change in changes:
            assert change.groups == 1
            assert (change.key in index) == (change.reason is not None)
            (index.add if change.reason is None else index.remove)(change.key)

    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        follow(disk.changes())
    entries, changes = disk.entries()
    follow(changes)
    assert index == {key for key, _ in entries} and len(index) == 20
    disk.follow(False)
    disk.clear()
    assert disk.changes() == []
    disk.close()


@pytest.mark.parametrize("taken", [False, True])
def test_a_snapshot_tells_others_what_it_contains(taken: bool, tmp_path) -> None:
    """A change that only the copier knows yet: the late listener has it in its snapshot, the other one as an event."""
    cache = Cache(device_pages=16, folder=tmp_path)
    first = cache.manager.listen()
    cache.cached(range(1, 9))
    late = cache.manager.listen()
    if taken:
        first.take()
    cache.poll()
    cache.copier.run()
    snapshot = late.snapshot()
    index: set = set()
    apply(index, snapshot.stored)
    events = first.take()
    assert isinstance(events[-1], Moved) and events[-1].number == snapshot.number == first.number
    assert {tier for _, _, tier in index} == {"device", "disk"}
    assert late.take() == []
