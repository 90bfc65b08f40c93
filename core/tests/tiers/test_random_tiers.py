"""Random traffic with tiers: copies finish in random order and some fail; what a sequence reads is its own."""

from __future__ import annotations

import numpy as np
import pytest
from cache_traffic import Traffic

from kvist.errors import CapacityError
from kvist.events import Entry, Moved, Removed, Stored, apply
from kvist.keys import block_keys, format_digest, scope_seed
from kvist.manager import Run
from kvist.memory.blockfile import stored_blocks
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window
from kvist.testing.tier_values import Cache

MIXES = {
    "history": (History(),),
    "window": (Window(5),),
    "state": (State(),),
    "history+window": (History(), Window(6)),
    "history+state": (History(), State()),
    "history+sinks+window": (History(), Window(7, sinks=3), Window(4)),
    "history+window+state": (History(), Window(6), State()),
    "history+ring": (History(), Window(1, ring=1)),
}
#: Host pages as a part of the device's, and is there a disk?
TIERS = {"host": (2.5, False), "small host": (0.3, False), "disk": (0.0, True), "both": (0.5, True)}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_every_read_is_clean_in_every_order_of_copies(mix: str, tiers: str, seed: int, tmp_path) -> None:
    run(mix, tiers, seed, tmp_path / "disk")


def run(mix: str, tiers: str, seed: int, folder) -> Cache:
    rng = np.random.default_rng([seed, len(mix), len(tiers)])
    share, disk = TIERS[tiers]
    block = int(rng.choice([1, 3, 4]))
    pages = int(rng.integers(70, 120)) * len(MIXES[mix]) // block
    cache = Cache(
        *MIXES[mix],
        device_pages=pages,
        host_pages=int(pages * share),
        folder=folder if disk else None,
        disk_blocks=int(rng.integers(5, 60)),
        block=block,
        pending_max=int(rng.choice([1, 3, 64])),
        minimum_blocks=int(rng.choice([1, 1, 2])),
        restore=RestorePolicy(every_blocks=2) if seed % 4 == 1 else None,
        backoff_tokens=2 if seed % 4 == 2 else 0,
        vocab_size=4,
        # Pages of several sizes share slabs, and pages on the device move.
        widths=rng.choice([4, 8, 20], len(MIXES[mix])).tolist() if seed % 2 else (),
    )
    cache.manager.shuffle_free_pages(rng)
    traffic = TierTraffic(cache, rng)
    for _ in range(400):
        traffic.operate()
        cache.check()
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    cache.flush()
    stats = cache.manager.stats()
    assert all(group.held == 0 for group in stats.groups)
    assert sum(tier.reused_tokens for tier in stats.tiers) <= stats.reused_tokens <= stats.prompt_tokens
    assert sum(tier.resumed_tokens for tier in stats.tiers) <= stats.resumed_tokens
    return cache


class TierTraffic(Traffic):
    """As without tiers, and copies run, fail and are taken in at random; some sequences load before they run."""

    KINDS = (
        *Traffic.KINDS,
        "open",
        "open",
        "finish",
        "finish",
        "poll",
        "poll",
        "copy",
        "copy",
        "suspend",
        "flood",
        "settle",
    )
    MOST_OPEN = 4

    def __init__(self, cache: Cache, rng: np.random.Generator) -> None:
        super().__init__(cache.manager, rng, cache.values)
        self.cache = cache
        self.loads = 0
        self.texts_again = [rng.integers(0, 4, int(rng.integers(6, 30))) for _ in range(5)]

    def can_run(self, sequence) -> bool:
        return not sequence.loading

    def prompt(self):
        """Mostly one of a few texts and what follows it: that is what comes up from below."""
        text, scope = super().prompt()
        if self.rng.random() < 0.7:
            text = np.append(self.texts_again[self.rng.integers(len(self.texts_again))], self.rng.integers(0, 4, 2))
        return text, scope

    def flood(self) -> None:
        """Requests that leave no trace take as much of the device as they can get."""
        layout = self.manager.layout
        length = 4 * layout.block_tokens
        while length < 200 and layout.fits(length + layout.block_tokens):
            length += layout.block_tokens
        takers = []
        for _ in range(1 if length < 200 else 150):
            taker = self.manager.open(self.rng.integers(0, 4, length if length < 200 else 12), reuse=False)
            takers.append(taker)
            while taker.computed < taker.known:
                plan = self.manager.plan([Run(taker, min(layout.block_tokens, taker.known - taker.computed))])
                if not plan.fits:
                    break
                step = plan.commit()
                self.values.run(step, [taker], {id(taker): taker.tokens})
                self.manager.complete(step)
            if taker.computed < taker.known:
                break
        for taker in takers:
            self.manager.close(taker)

    def open(self) -> None:
        super().open()
        self.load()

    def resume(self) -> None:
        super().resume()
        self.load()

    def copy(self) -> None:
        queued = list(self.cache.copier.queued)
        if queued:
            ticket = queued[self.rng.integers(len(queued))]
            if self.rng.random() < 0.15:
                count = self.cache.copier.queued[ticket].block_count
                self.cache.copier.fail(ticket, *set(self.rng.integers(0, count, 2).tolist()))
            else:
                self.cache.copier.run(ticket)
            self.cache.poison_host()

    def settle(self) -> None:
        """Time for everything that is queued, and what that brings."""
        for _ in range(4):
            self.poll()
            while self.cache.copier.queued:
                self.copy()

    def poll(self) -> None:
        before = [(sequence, sequence.computed) for sequence in self.singles if sequence.loading]
        failed = [tier.failed_blocks for tier in self.manager.stats().tiers]
        self.cache.poll()
        failed_now = [tier.failed_blocks for tier in self.manager.stats().tiers] != failed
        for sequence, computed in before:
            now = sequence.computed
            # Where a part of a block failed to come up, a block that begins alike may be found no more.
            assert computed <= now or failed_now
            assert now < sequence.known or sequence.origin == "resumed"
        stats = self.manager.stats()
        for sequence in self.singles:
            below = sequence.below
            if below is not None:
                assert below.host_tokens + below.disk_tokens <= max(sequence.computed, sequence.claimed)
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in stats.tiers)

    def load(self) -> None:
        if self.rng.random() < 0.2:
            return
        waiting = [s for s in self.singles if s.loadable > s.computed and not s.loading and not s.in_flight]
        for sequence in waiting:
            if sequence.batch is None and self.manager.load(sequence):
                self.loads += 1
                assert sequence.loading
                self.manager.check()
                if self.rng.random() < 0.7:
                    self.settle()

    def clear(self) -> None:
        super().clear()
        for text in self.past:
            sequence = None
            try:
                sequence = self.manager.open(np.append(text, 0)[:40])
            except CapacityError:
                continue
            assert sequence.loadable == 0
            self.manager.close(sequence)


def index_of(cache: Cache) -> set[Entry]:
    """Every entry: of trees from tokens hashed again, of the disk from the names of its files."""
    lower, digest = cache.manager._lower, format_digest(cache.layout)
    found: set[Entry] = set()
    for level in (lower.device, lower.host):
        for scope, root in level.tree.roots.items() if level is not None else ():
            stack = [(child, scope_seed(digest, scope)) for child in root.children.values()]
            while stack:
                extent, previous = stack.pop()
                keys = block_keys(previous, np.ascontiguousarray(extent.tokens), cache.layout.block_tokens)
                for group, number in np.argwhere(extent.pages[:, : len(keys)] >= 0).tolist():
                    found.add((keys[number], group, level.tier.value))
                stack.extend((child, keys[-1]) for child in extent.children.values())
    for _, key, groups, _ in stored_blocks(cache.disk.folder) if cache.disk is not None else ():
        found |= {(key, group, "disk") for group in range(len(cache.layout.groups)) if groups >> group & 1}
    return found


class Follower:
    """Keeps an index from what one listener is told, and believes nothing that does not fit."""

    def __init__(self, cache: Cache, max_blocks: int = 1 << 16) -> None:
        self.listener = cache.manager.listen(max_blocks)
        self.index: set[Entry] = set()
        self.number, self.snapshots = self.listener.number, 0
        self.seen: list = []

    def follow(self) -> set[Entry]:
        if self.listener.behind:
            snapshot = self.listener.snapshot()
            self.index, self.number = set(), snapshot.number
            self.snapshots += 1
            apply(self.index, snapshot.stored)
            assert {record.number for record in snapshot.stored} <= {snapshot.number}
        for event in self.listener.take():
            assert event.number == self.number + 1
            self.number = event.number
            tier = event.target if isinstance(event, Moved) else event.tier
            entries = {(key, group, tier) for key in event.keys for group in event.groups}
            assert len(entries) == len(event.keys) * len(event.groups) > 0
            assert entries <= self.index if isinstance(event, Removed) else not entries & self.index
            apply(self.index, [event])
            self.seen.append(event)
        return self.index


@pytest.mark.parametrize("mix", ["history", "window", "history+window+state"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_set_kept_from_events_is_the_index_of_every_tier(mix: str, tiers: str, seed: int, tmp_path) -> None:
    rng = np.random.default_rng([seed, len(mix), len(tiers)])
    share, disk = TIERS[tiers]
    kinds = len(MIXES[mix])
    cache = Cache(
        *MIXES[mix],
        device_pages=25 * kinds,
        host_pages=int(24 * kinds * share),
        folder=tmp_path if disk else None,
        disk_blocks=int(rng.integers(5, 30)),
        vocab_size=4,
        restore=RestorePolicy(2),
    )
    traffic = TierTraffic(cache, rng)
    steady, tight, late = Follower(cache), Follower(cache, 3), None
    for number in range(300):
        traffic.operate()
        index = index_of(cache)
        assert steady.follow() == index
        if rng.random() < 0.1:
            assert tight.follow() == index
        if number == 150:
            late = Follower(cache)
        if late is not None:
            assert (late.follow(), late.number) == (index, steady.number)
    assert steady.snapshots == 0 < tight.snapshots
    moves = {(event.source, event.target) for event in steady.seen if isinstance(event, Moved)}
    above = "host" if share else "device"
    assert moves == ({("device", "host")} if share else set()) | ({(above, "disk")} if disk else set())
    assert all(event.tier == "device" for event in steady.seen if isinstance(event, Stored))
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    cache.manager.clear()
    assert steady.follow() == index_of(cache) == set()
