"""Events replay to exactly what can be found: on hand-made sequences, and under random traffic."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from cache_requests import DEFAULT, P, cached, compute, manager_of
from cache_traffic import MIXES, retentions_of, traffic_of

from kvist.errors import SpecError, StateError
from kvist.events import DEVICE, Entry, Listener, Removed, Stored, apply
from kvist.keys import block_keys, format_digest, scope_seed
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Scope, State, Window
from kvist.step import NO_PAGE
from kvist.testing.values import make_layout, make_spec, tokens


def index_of(manager: PagedCacheManager) -> set[Entry]:
    """Every entry, from the tree alone: keys are hashed again from the tokens of each path."""
    block = manager.layout.block_tokens
    digest = format_digest(manager.layout)
    found: set[Entry] = set()
    for scope, root in manager._tree.roots.items():
        stack = [(child, scope_seed(digest, scope)) for child in root.children.values()]
        while stack:
            extent, previous = stack.pop()
            keys = block_keys(previous, np.ascontiguousarray(extent.tokens), block)
            for number, key in enumerate(keys):
                for group, pages in enumerate(extent.pages):
                    if pages[number] != NO_PAGE:
                        entry = (key, group, DEVICE)
                        assert entry not in found, "one block is in the index twice"
                        found.add(entry)
            stack.extend((child, keys[-1]) for child in extent.children.values())
    return found


class Follower:
    """A listener's reader: a set, and the number it is good for."""

    def __init__(self, manager: PagedCacheManager, max_blocks: int = 1 << 16) -> None:
        self.manager = manager
        self.listener = manager.listen(max_blocks)
        self.index: set[Entry] = set()
        self.number = self.listener.number
        self.snapshots = 0

    def follow(self) -> list:
        """Catch up. Returns the events."""
        if self.listener.behind:
            with pytest.raises(StateError, match="this listener is behind"):
                self.listener.take()
            snapshot = self.listener.snapshot()
            self.index = set()
            for stored in snapshot.stored:
                assert stored.number == snapshot.number
                self.apply(stored)
            self.number = snapshot.number
            self.snapshots += 1
        events = self.listener.take()
        for event in events:
            assert event.number == self.number + 1
            self.number = event.number
            self.apply(event)
        assert self.number == self.listener.number
        return events

    def apply(self, event) -> None:
        assert event.keys and event.groups
        entries = {(key, group, event.tier) for key in event.keys for group in event.groups}
        assert len(entries) == len(event.keys) * len(event.groups)
        if isinstance(event, Stored):
            assert not entries & self.index, "stored twice"
            layout = self.manager.layout
            assert event.keys == tuple(block_keys(event.parent, event.tokens, layout.block_tokens))
            assert not event.tokens.flags.writeable
        else:
            assert entries <= self.index, "removed what was not there"
        apply(self.index, [event])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_set_kept_from_events_is_the_index(mix: str, block: int, seed: int) -> None:
    rng = np.random.default_rng([52, seed, block, len(mix)])
    pages = int(rng.integers(30, 80)) * len(MIXES[mix]) // block
    layout = make_layout(make_spec(block, *retentions_of(MIXES[mix], block), vocab_size=4), pages)
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks=2) if seed == 1 else None)
    traffic = traffic_of(manager, rng)
    steady, tight, late = Follower(manager), Follower(manager, 2), None
    for number in range(200):
        traffic.operate()
        index = index_of(manager)
        steady.follow()
        assert steady.index == index
        if rng.random() < 0.1:
            tight.follow()
            assert tight.index == index
        if number == 100:
            late = Follower(manager)
        if late is not None:
            late.follow()
            assert (late.index, late.number) == (index, steady.number)
    assert steady.snapshots == 0
    assert tight.snapshots > 0 or History() not in MIXES[mix]
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    manager.clear()
    steady.follow()
    assert steady.index == index_of(manager) == set()


def test_a_block_computed_twice_is_stored_once_and_removed_once() -> None:
    """Two pages, one key: nobody may believe it gone while a copy can be found."""
    manager = manager_of(4)
    follower = Follower(manager)
    sequences = [manager.open(tokens(range(1, 5))) for _ in range(2)]
    manager.complete(manager.plan([Run(sequence, 4) for sequence in sequences]).commit())
    (stored,) = follower.follow()
    assert isinstance(stored, Stored)
    assert (stored.number, stored.start, stored.block_count, stored.groups) == (1, 0, 1, (0,))
    assert stored.tokens.tolist() == [1, 2, 3, 4]
    for sequence in sequences:
        manager.close(sequence)
        assert follower.follow() == []
        assert manager.probe(tokens(range(1, 6))) == 4
    # Whole memory for somebody else.
    cached(manager, range(20, 36))
    removed, added = follower.follow()
    assert isinstance(removed, Removed) and isinstance(added, Stored)
    assert (removed.number, removed.keys, removed.reason) == (2, stored.keys, "evicted")
    assert manager.probe(tokens(range(1, 6))) == 0


def test_a_router_computes_the_keys_itself() -> None:
    manager = manager_of(20)
    follower = Follower(manager)
    scope = Scope(adapter="w1", salt="tenant")
    prompt = tokens(range(1, 11))
    cached(manager, range(1, 11), scope=scope)
    seed = scope_seed(format_digest(manager.layout), scope)
    (stored,) = follower.follow()
    assert list(stored.keys) == block_keys(seed, prompt, P)
    assert (stored.scope, stored.parent) == (scope.digest(), seed)
    # A branch hangs on the block that it shares last.
    cached(manager, range(1, 9), range(50, 56), scope=scope)
    (branch,) = follower.follow()
    assert (branch.parent, branch.start, branch.block_count) == (stored.keys[1], 2, 1)


def test_an_open_block_is_told_when_it_is_whole() -> None:
    manager = manager_of(12)
    follower = Follower(manager)
    cached(manager, 1, 2, 3)
    assert follower.follow() == []
    assert manager.probe(tokens(range(1, 10))) == 3
    cached(manager, range(1, 7))
    (stored,) = follower.follow()
    assert stored.tokens.tolist() == [1, 2, 3, 4]
    cached(manager, range(1, 9))
    (stored,) = follower.follow()
    assert (stored.start, stored.tokens.tolist()) == (1, [5, 6, 7, 8])


def test_a_sparse_group_loses_its_page_alone() -> None:
    manager = manager_of(8, History(), Window(4))
    follower = Follower(manager)
    first = manager.open(tokens(range(1, 13)))
    compute(manager, first)
    events = follower.follow()
    assert [(event.groups, event.start, event.block_count) for event in events] == [
        ((0,), 0, 3),
        ((1,), 2, 1),
        ((1,), 1, 1),
    ]
    # Three blocks of two groups, one of the window's dropped: 5 of 8 pages are held, 1 of them cached as well.
    first.extend([99])
    compute(manager, first)
    second = manager.open(tokens(range(50, 58)))
    follower.follow()
    compute(manager, second, 4)
    lost = [event for event in follower.follow() if isinstance(event, Removed)]
    assert lost and all(event.groups == (1,) and event.reason == "evicted" for event in lost)
    assert follower.index == index_of(manager)


def test_removing_goes_from_the_end_and_storing_from_the_start() -> None:
    """With every event the entries of a dense group are whole prefixes."""
    manager = manager_of(40, History(), Window(3), restore=RestorePolicy(every_blocks=2))
    follower = Follower(manager)
    for branch in range(3):
        cached(manager, range(1, 13), range(100 * branch + 50, 100 * branch + 58))
    follower.follow()
    manager.clear()
    events = follower.listener.take()
    assert {event.reason for event in events} == {"cleared"}
    ends = [event.start + event.block_count for event in events if 0 in event.groups]
    assert ends[-1] == min(ends)
    apply(follower.index, events)
    assert follower.index == set()


def test_what_open_sequences_hold_is_removed_once_when_the_cache_is_cleared() -> None:
    manager = manager_of(12)
    follower = Follower(manager)
    sequence = manager.open(tokens(range(1, 10)))
    compute(manager, sequence)
    assert len(follower.follow()) == 1
    manager.clear()
    (removed,) = follower.follow()
    assert (removed.reason, removed.block_count) == ("cleared", 2)
    sequence.extend(range(10, 14))
    compute(manager, sequence)
    manager.close(sequence)
    assert follower.follow() == []


def test_a_late_listener_is_behind_until_it_takes_a_snapshot() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 9))
    listener = manager.listen()
    assert listener.behind
    with pytest.raises(StateError) as caught:
        listener.take()
    assert str(caught.value) == (
        "this listener is behind: it holds events of at most 65536 blocks, and has no others\n"
        "hint: replace your index by snapshot(), then go on with take(); take more often, or raise max_blocks"
    )
    snapshot = listener.snapshot()
    assert (snapshot.number, [stored.block_count for stored in snapshot.stored]) == (0, [2])
    cached(manager, range(30, 38))
    assert [event.number for event in listener.take()] == [1]


def test_overflow_is_told_and_healed_by_a_snapshot() -> None:
    manager = manager_of(40)
    slow, steady = Follower(manager, 3), Follower(manager)
    for start in (100, 200, 300):
        cached(manager, range(start, start + 8))
        steady.follow()
    assert slow.listener.behind
    slow.follow()
    assert (slow.snapshots, slow.number, slow.index) == (1, 3, steady.index)
    cached(manager, range(400, 408))
    assert [event.number for event in slow.follow()] == [4]


def test_nothing_is_computed_while_nobody_listens() -> None:
    manager = manager_of(40)
    cached(manager, range(1, 9))
    assert [extent.keys for extent in manager._tree.extents()] == [None]
    listener = manager.listen()
    listener.snapshot()
    listener.close()
    listener.close()
    assert manager._tree.watcher is None
    cached(manager, range(30, 38))
    assert sum(extent.keys is None for extent in manager._tree.extents()) == 1
    for call in (listener.take, listener.snapshot):
        with pytest.raises(StateError, match=r"closed listener"):
            call()


def test_who_comes_back_after_a_time_without_listeners_sees_a_gap() -> None:
    manager = manager_of(40)
    first = Follower(manager)
    cached(manager, range(1, 9))
    assert [event.number for event in first.follow()] == [1]
    first.listener.close()
    cached(manager, range(20, 28))
    second = Follower(manager)
    second.follow()
    # A reader of the first one's events that goes on with the second one's misses number 2.
    assert (second.number, second.index) == (2, index_of(manager))
    manager.clear()
    assert [event.number for event in second.follow()] == [3, 4]
    second.listener.close()
    # Nothing is in the index, so this one needs no snapshot, and the number tells that something happened.
    assert (manager.listen().behind, manager.listen().number) == (False, 5)


def test_listening_needs_keys_and_a_bound() -> None:
    spec = make_spec(P, History())
    nameless = CacheSpec(spec.layers, spec.block_tokens, "")
    with pytest.raises(SpecError, match="has no fingerprint"):
        PagedCacheManager(Layout.build(nameless, 1 << 20)).listen()
    with pytest.raises(SpecError) as caught:
        manager_of(4).listen(0)
    assert str(caught.value) == "listen(max_blocks=0) must be at least 1"


def test_events_can_go_to_another_process() -> None:
    manager = manager_of(20)
    listener = manager.listen()
    cached(manager, range(1, 9))
    manager.clear()
    stored, removed = pickle.loads(pickle.dumps(listener.take()))
    assert stored.keys == removed.keys
    assert stored.tokens.tolist() == list(range(1, 9))


KEYS_IN_A_PROCESS = """
import sys
from cache_requests import cached, manager_of
from kvist.spec import History, Scope, Window
manager = manager_of(40, History(), Window(4))
listener = manager.listen()
for start in eval(sys.argv[1]):
    cached(manager, range(start, start + 12), scope=Scope(adapter=f"w{start}"))
print(sorted(key.hex() for event in listener.take() for key in event.keys))
"""


def test_equal_content_has_equal_keys_in_all_processes() -> None:
    """Whatever the hash seed and the order of arrival."""
    paths = os.pathsep.join(sys.path)
    outputs = [
        subprocess.run(
            [sys.executable, "-c", KEYS_IN_A_PROCESS, order],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, order in (("1", "[100, 200]"), ("2", "[200, 100]"))
    ]
    assert outputs[0] == outputs[1] != "[]\n"


def test_a_listener_is_for_states_too() -> None:
    """A state belongs to the block at whose end its snapshot was taken."""
    manager = manager_of(20, State())
    follower = Follower(manager)
    sequence = manager.open(tokens(range(1, 10)))
    compute(manager, sequence, 8)
    manager.close(sequence)
    (stored,) = follower.follow()
    assert (stored.start, stored.tokens.tolist()) == (1, [5, 6, 7, 8])
    assert isinstance(follower.listener, Listener) and Scope() == DEFAULT
