"""The tiers below a manager's device: backups, loads, clearing, numbers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import attrs
import numpy as np
import numpy.typing as npt

from kvist.events import Events
from kvist.layout import Layout
from kvist.ledger import Ledger
from kvist.memory.mover import Tier
from kvist.prefix.extent import Extent
from kvist.prefix.tree import PrefixTree
from kvist.sequence import FromBelow, Sequence
from kvist.stats import Tally, TierCleared, TierGroupStats, TierStats
from kvist.step import IntArray
from kvist.tiers.backup import Backup
from kvist.tiers.config import Tiers
from kvist.tiers.content import Content
from kvist.tiers.level import Arrival, Level, Pin
from kvist.tiers.search import DEVICE, DISK, HOST, Found, Search
from kvist.tiers.transfer import Flights, Part, Transfer, part_of, spread
from kvist.watches import DiskWatch, TreeWatch


@attrs.frozen(eq=False)
class Owner:
    """What loads need from the manager.

    new_pages: so many pages per group on the device, with one lease each, that no step in other hands touches any more.
        None, and nothing changes, when there is no room.
    pages_in_use: pages per group that a step still to be executed may copy from or write although nobody holds them.
    take_again: give up what an idle sequence holds, let the transfer arrive, and claim up to so many tokens again.
    limits: for a run of so many tokens and a limit of its reuse: the limit there is, and must reuse end at a block
        boundary?
    """

    new_pages: Callable[[list[int]], list[IntArray] | None]
    pages_in_use: Callable[[], list[SequenceOf[int]]]
    take_again: Callable[[Sequence, int, Transfer], None]
    limits: Callable[[int, int], tuple[int, bool]]


class LowerTiers:
    """Belongs to one manager, whose device tree and ledger it mutates. Owns those of the host."""

    def __init__(
        self, owner: Owner, tiers: Tiers, layout: Layout, tree: PrefixTree, ledger: Ledger, backoff: int
    ) -> None:
        tiers.require_match(layout)
        self._owner, self._tiers = owner, tiers
        self._block = layout.block_tokens
        self._flights = Flights(tiers.copier)
        self.device = Level(Tier.DEVICE, tree, ledger)
        self.host: Level | None = None
        self._content = None if tiers.disk is None else Content(layout, tiers.disk)
        self._backups: list[Backup] = []
        above = self.device
        if tiers.host_layout is not None:
            host_tree = PrefixTree(layout.block_tokens, len(layout.groups))
            # Floors are promises to those who compute.
            self.host = Level(Tier.HOST, host_tree, Ledger(attrs.evolve(tiers.host_layout, floors=())))
            self._backups.append(Backup(self._flights, above, self.host, tiers.minimum_blocks, owner.pages_in_use))
            above = self.host
        if self._content is not None:
            # From the host where there is one: a slow disk then keeps nothing on the device.
            changing = owner.pages_in_use if self.host is None else None
            self._backups.append(Backup(self._flights, above, self._content, tiers.minimum_blocks, changing))
        self._search = Search(layout, self.device, self.host, self._content, backoff)
        names = [Tier.HOST] * (self.host is not None) + [Tier.DISK] * (tiers.disk is not None)
        self._down = {tier: [0 for _ in layout.groups] for tier in names}
        self._up = {tier: [0 for _ in layout.groups] for tier in names}
        self._failed = dict.fromkeys(names, 0)

    def watch(self, events: Events) -> None:
        """Let listeners know of every lower tier too."""
        above = Tier.DEVICE
        if self.host is not None:
            events.add(TreeWatch(events, self.device.ledger.layout, self.host.tree, Tier.HOST))
            above = Tier.HOST
        if self._content is not None:
            events.add(DiskWatch(events, self._content.disk, above))

    @property
    def copying(self) -> int:
        """Batches that the copier has, or that have finished and wait for :meth:`poll`."""
        return len(self._flights.transfers)

    def look(self, sequence: Sequence, limit: int) -> None:
        """Note how much more of a sequence that was just claimed the lower tiers have."""
        found = self._find(sequence, limit)
        length = max(sequence.computed, found.length) if found is not None else sequence.computed
        sequence.below = FromBelow(length, limit, sequence.computed)

    def load(self, sequence: Sequence) -> bool:
        """Begin to bring up what :meth:`look` found. False, and nothing changes, when there is no room for it now or
        nothing to bring."""
        below = sequence.below
        if below is None or below.loading or sequence.computed != below.base or not sequence.shares:
            return False
        found = self._find(sequence, below.limit)
        if found is None or found.length <= sequence.computed:
            return False
        transfer = self._taking(sequence, found)
        if transfer is None:
            return False
        transfer.sequence, transfer.limit = sequence, below.limit
        try:
            self._flights.submit(transfer)
        except Exception:
            # The copier is closed.
            self._give_up(transfer)
            raise
        below.loading = True
        return True

    def poll(self) -> bool:
        """Take in what has been copied, and submit what is to be. Has anything changed?"""
        done = self._flights.collect()
        for transfer in done:
            if transfer.extent is None:
                self._finish_load(transfer)
            else:
                self._finish_backup(transfer)
        started = [backup.run() for backup in self._backups]
        return bool(done) or any(started)

    def save(self, extent: Extent) -> None:
        """Copy the path to an idle extent down at once; until that is done nobody can have its pages."""
        self._backups[0].now(extent)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives up what was found for it. What is on its way for it arrives for everybody."""
        below = sequence.below
        assert below is not None
        if below.loading:
            for transfer in self._flights.transfers.values():
                if transfer.sequence is sequence:
                    transfer.sequence = None
        below.length, below.loading = 0, False

    def clear(self) -> tuple[TierCleared, ...]:
        """Forget everything in every lower tier; nothing that is on its way arrives."""
        self._flights.generation += 1
        for backup in self._backups:
            backup.forget()
        cleared = []
        if self.host is not None:
            layout = self.host.ledger.layout
            freed, held = (
                sum(count * group.page_bytes for count, group in zip(counts, layout.groups))
                for counts in self.host.forget()
            )
            cleared.append(TierCleared(Tier.HOST.value, freed, held))
        if self._content is not None:
            disk = self._content.disk.clear()
            cleared.append(TierCleared(Tier.DISK.value, disk.bytes, disk.left_bytes))
        return tuple(cleared)

    def stats(self, tally: Tally) -> tuple[TierStats, ...]:
        """Every lower tier, the host first. tally: the manager's counters."""
        found = []
        for tier in self._down:
            place = 0 if tier is Tier.HOST else 1
            groups = []
            layout = self.device.ledger.layout
            if tier is Tier.HOST:
                assert self.host is not None
                ledger = self.host.ledger
                capacity = [ledger.layout.page_capacity(group) for group in layout.groups]
                used = [ledger.arena.taken_count[group.index] for group in layout.groups]
                evicted, copying = self.host.evicted, self.host.copying
                used_bytes = sum(count * group.page_bytes for count, group in zip(used, layout.groups))
                capacity_bytes = (ledger.layout.slab_count - 1) * ledger.layout.slab_bytes
            else:
                assert self._content is not None
                disk = self._content.disk.stats()
                nothing = [0 for _ in layout.groups]
                capacity, used, evicted, copying = nothing, list(disk.pages), nothing, nothing
                used_bytes, capacity_bytes = disk.used_bytes + disk.foreign_bytes, disk.budget_bytes
            for group in layout.groups:
                index = group.index
                groups.append(
                    TierGroupStats(
                        group.name,
                        group.page_bytes,
                        capacity[index],
                        used[index],
                        self._down[tier][index],
                        self._up[tier][index],
                        evicted[index],
                        copying[index],
                    )
                )
            found.append(
                TierStats(
                    tier.value,
                    capacity_bytes,
                    used_bytes,
                    tally.reused_below[place],
                    tally.resumed_below[place],
                    self._failed[tier],
                    tuple(groups),
                )
            )
        return tuple(found)

    def check_disk(self) -> list[str]:
        """What is wrong with the disk, in words. Nothing may be written at the time."""
        return [] if self._content is None else self._content.disk.check()

    def _find(self, sequence: Sequence, limit: int) -> Found | None:
        if not sequence.shares:
            return None
        tokens = sequence.tokens
        limit, whole_blocks = self._owner.limits(len(tokens), limit)
        found = self._search.find(sequence.scope, tokens, limit, whole_blocks=whole_blocks)
        return found if found is not None and found.moved_blocks >= self._tiers.minimum_blocks else None

    def _taking(self, sequence: Sequence, found: Found) -> Transfer | None:
        """Keep what a load needs on every tier, and make room for it. None, and nothing changes, without room."""
        moving = found.origin > DEVICE
        ordinals = np.flatnonzero(moving.any(axis=0))
        cells = moving[:, ordinals]
        origins = [origin for origin in (HOST, DISK) if (found.origin == origin).any()]
        if self._flights.copier.room < len(origins):
            return None
        width = min(found.origin.shape[1], found.device.pages.shape[1])
        kept = self.device.pin(found.device, found.first, found.cells(DEVICE)[:, :width])
        pins: list[tuple[Level, Pin]] = []
        if HOST in origins:
            assert self.host is not None and found.host is not None
            chosen = found.cells(HOST)
            last = int(np.flatnonzero(chosen.any(axis=0))[-1]) + 1
            pins.append((self.host, self.host.pin(found.host, last, chosen[:, :last])))
        new = self._owner.new_pages(cells.sum(axis=1).tolist())
        if new is None:
            for level, pin in [*pins, (self.device, kept)]:
                level.unpin(pin, used=False)
            return None
        pages = spread(cells, new)
        lost = np.zeros_like(cells)
        target = self.device.allocate(kept, new)
        arrival = Arrival(sequence.scope, found.tokens, found.first, ordinals, pages, lost, target)
        transfer = Transfer(self._flights.generation, ordinals, pins, [], lost, self.device, arrival)
        transfer.parts = [self._part(origin, found, ordinals, pages) for origin in origins]
        return transfer

    def _part(self, origin: int, found: Found, ordinals: npt.NDArray[np.int64], pages: IntArray) -> Part:
        cells = found.origin[:, ordinals] == origin
        columns = np.flatnonzero(cells.any(axis=0))
        if origin == HOST:
            assert found.host is not None
            source = found.host.pages[:, ordinals[columns]]
            return part_of(self.host, self.device, columns, cells[:, columns], source, pages[:, columns])
        # The first block last: what is read last is evicted last.
        columns = columns[::-1]
        keys = tuple(found.keys[ordinal] for ordinal in ordinals[columns].tolist())
        return part_of(None, self.device, columns, cells[:, columns], None, pages[:, columns], keys)

    def _give_up(self, transfer: Transfer) -> None:
        if transfer.target is not None and transfer.arrival is not None:
            transfer.target.unpin(transfer.arrival.pin, used=False)
        transfer.unpin()

    def _finish_backup(self, transfer: Transfer) -> None:
        fresh = transfer.generation == self._flights.generation
        (part,) = transfer.parts
        tier = part.copy.target
        if not fresh:
            self._give_up(transfer)
        else:
            self._failed[tier] += _count(transfer)
            if transfer.target is not None and transfer.arrival is not None:
                transfer.arrival.lost |= transfer.lost
                kept = transfer.target.arrive(transfer.arrival)
            else:
                moved = np.zeros_like(transfer.lost)
                moved[:, part.columns] = part.cells
                kept = (moved & ~transfer.lost).sum(axis=1).tolist()
            _add(self._down[tier], kept)
            transfer.unpin()
        for backup in self._backups:
            if backup.source is transfer.pins[0][0]:
                backup.finish(transfer, kept=fresh)

    def _finish_load(self, transfer: Transfer) -> None:
        sequence = transfer.sequence
        fresh = transfer.generation == self._flights.generation
        if not fresh:
            self._give_up(transfer)
            return
        if sequence is None:
            self.arrive(transfer)
            return
        below = sequence.below
        assert below is not None
        before = sequence.computed
        transfer.sequence = None
        self._owner.take_again(sequence, transfer.limit, transfer)
        assert sequence.below is not None
        now = sequence.below
        host, disk = self._attribute(transfer, before, sequence.computed)
        now.host_tokens, now.disk_tokens = below.host_tokens + host, below.disk_tokens + disk
        if transfer.lost.any():
            # Whoever tries again at once would find what just failed and could not be dropped.
            now.length = sequence.computed

    def arrive(self, transfer: Transfer) -> None:
        """Let what was loaded be found on the device, and drop from its tier what could not be."""
        arrival = transfer.arrival
        assert arrival is not None
        arrival.lost |= transfer.lost
        self.device.arrive(arrival)
        transfer.unpin()
        for part in transfer.parts:
            tier = part.copy.source
            lost = part.cells & transfer.lost[:, part.columns]
            _add(self._up[tier], (part.cells & ~lost).sum(axis=1).tolist())
            failed = np.flatnonzero(lost.any(axis=0))
            self._failed[tier] += len(failed)
            if len(failed) and tier is Tier.DISK:
                assert self._content is not None
                for position in failed.tolist():
                    self._content.disk.remove(part.copy.keys[position])
            elif len(failed):
                assert self.host is not None
                ordinal = int(transfer.ordinals[part.columns[failed]].min())
                self.host.discard(arrival.scope, arrival.tokens, ordinal)

    def _attribute(self, transfer: Transfer, before: int, length: int) -> tuple[int, int]:
        """Of the tokens ``before .. length - 1`` that a load made reusable those that came from the host and from the
        disk. A block for which nothing came up counts for the next one for which something did; one that came from both
        counts for the disk."""
        from_disk = np.zeros(len(transfer.ordinals), np.bool_)
        arrived = np.zeros(len(transfer.ordinals), np.bool_)
        for part in transfer.parts:
            came = part.columns[(part.cells & ~transfer.lost[:, part.columns]).any(axis=0)]
            arrived[came] = True
            from_disk[came] |= part.copy.source is Tier.DISK
        ends = np.clip((transfer.ordinals[arrived] + 1) * self._block, before, max(before, length))
        counts = np.diff(ends, prepend=before)
        disk = int(counts[from_disk[arrived]].sum())
        return int(counts.sum()) - disk, disk


def _count(transfer: Transfer) -> int:
    return int(np.count_nonzero(transfer.lost.any(axis=0)))


def _add(totals: list[int], counts: list[int]) -> None:
    for group, count in enumerate(counts):
        totals[group] += count
