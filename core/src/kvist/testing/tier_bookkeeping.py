"""What the cache machine keeps beside the device: host and disk, what went down and came up, and how it is compared."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvist.events import apply
from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Tiers
from kvist.memory.copier import ManualCopier
from kvist.memory.disk import DiskStore
from kvist.memory.mover import Tier
from kvist.prefix.named import keys_of
from kvist.step import NO_PAGE
from kvist.testing.machine import CacheMachine
from kvist.testing.memory import Live
from kvist.testing.mixes import Draw, Setup
from kvist.testing.tier_values import RowMover
from kvist.testing.values import JUNK
from kvist.tiers.level import Level

#: Counters that only grow.
Losses = tuple[int, ...]


@attrs.frozen
class TierSetup(Setup):
    """What a run with tiers starts from.

    host: pages of the host for one of the device, 0 without a host. disk_blocks: of the largest kind that the disk has
    room for, 0 without a disk. pending_max: batches that the copier takes.
    """

    host: float
    disk_blocks: int
    pending_max: int
    minimum_blocks: int
    #: Do copies fail, files get damaged, disks get full?
    troubled: bool

    @classmethod
    def with_tiers(cls, draw: Draw) -> TierSetup:
        """As ``choose``, and tiers."""
        base = Setup.choose(draw)
        host, disk = ((0.3, 0), (3.0, 0), (0.0, 1), (0.5, 1), (4.0, 1))[draw(5)]
        return cls(
            **attrs.asdict(base, recurse=False),
            host=host,
            disk_blocks=disk * (5, 30, 4000)[draw(3)],
            pending_max=(1, 3, 64)[draw(3)],
            minimum_blocks=(1, 1, 1, 2)[draw(4)],
            troubled=not draw(2),
        )


class TierBase(CacheMachine):
    """As without tiers. What comes up is compared row by row when steps read it; beside that:

    * What ``loadable`` promises arrives, unless a copy has failed.
    * It is at least what is known to be below: after a time without failures everything idle is, as far as there is
      room for all of it.
    * It is at most what was ever computed and not cleared, also after a restart.
    """

    setup: TierSetup
    _troubles = 0

    def __init__(self, setup: TierSetup) -> None:
        self.setup = setup
        self._folder: Path | None = None
        if setup.disk_blocks:
            self._folder = Path(tempfile.mkdtemp(prefix="kvist-"))
            weakref.finalize(self, shutil.rmtree, self._folder, True)
        self._start()

    def _start(self) -> None:
        self.mover = RowMover()
        self.copier = ManualCopier(self.mover, self.setup.pending_max)
        self.disk: DiskStore | None = None
        self._host: list[np.ndarray[Any, Any]] = []
        super().__init__(self.setup, self._make)
        self.mover.disk = self.disk
        self.mover.rows = {Tier.DEVICE: self.memory.whole, Tier.HOST: self._host}
        self.mover.widths = [pages.shape[1] for pages in self.memory.pages]
        #: By sequence: what had been lost when somebody looked what there is for it, and what it was promised then, or
        #: since it loads.
        self._looked: dict[int, tuple[Losses, int]] = {}
        self._promised: dict[int, tuple[Losses, int]] = {}
        #: Prefixes of whole blocks that the lowest tier surely has, by scope, as long as it has lost no more than this.
        self._below: dict[int, set[bytes]] = {}
        self._below_losses = self._losses(of_device=False)
        self._full = False
        if self.listener is not None and self.listener.behind:
            apply(self.index, self.listener.snapshot().stored)

    def _make(self, layout: Layout, **options: Any) -> PagedCacheManager:
        host = None
        if self.setup.host:
            host = attrs.evolve(layout, slab_count=2 + int((layout.slab_count - 1) * self.setup.host), floors=())
            memory = np.full(host.arena_bytes // 8, JUNK, np.int64)
            for group in host.groups:
                size = group.page_bytes // 8
                self._host.append(memory[: len(memory) // size * size].reshape(-1, size))
        if self._folder is not None:
            parts = [group.page_bytes for group in layout.groups]
            most = -(-(sum(parts) + 4096) // 4096) * 4096
            self.disk = DiskStore(self._folder, format_digest(layout), parts, self.setup.disk_blocks * most)
        tiers = Tiers(self.copier, host, self.disk, self.setup.minimum_blocks)
        self._paged = PagedCacheManager(layout, tiers=tiers, **options)
        return self._paged

    def _claimed(self, live: Live, length: int) -> None:
        super()._claimed(live, length)
        loadable = live.sequence.loadable
        self._looked[id(live.sequence)] = self._losses(), loadable
        _, may = self.model.known(live.scope, live.text[: live.sequence.known])
        assert length <= loadable <= max(length, may), f"{loadable} tokens loadable, must be {length} to {may}"

    def _arrived(self, live: Live) -> None:
        """A load has ended: the sequence has what it was promised, or something failed."""
        sequence = live.sequence
        back = sequence.computed
        losses, promised = self._promised.pop(id(sequence), (None, 0))
        _, may = self.model.known(live.scope, live.text[: live.known])
        assert back <= max(may, 0), f"has {back} tokens after a load, of at most {may}"
        if promised % self.block and (self.sparse or self.rings):
            # An open block that comes up is not needed where somebody has filled it meanwhile; without what resuming
            # inside it takes, perhaps.
            promised = 0
        if losses == self._losses(of_device=False):
            assert back >= promised, f"has {back} tokens after a load that promised {promised}"
        self._claimed(live, back)
        live.may_length, live.must_length = min(live.may_length, back), 0

    def _losses(self, *, of_device: bool = True) -> Losses:
        """What all tiers have pushed out, and what went wrong, so far."""
        stats = self.manager.stats()
        disk = () if self.disk is None else (self.disk.stats().evicted, self.disk.stats().damaged)
        lost = [tier.failed_blocks + sum(group.evicted for group in tier.groups) for tier in stats.tiers]
        device = [group.evicted for group in stats.groups] if of_device else []
        return (self._troubles, *disk, *lost, *device)

    def _surely_below(self) -> dict[int, set[bytes]]:
        """Prefixes of whole blocks that can surely be loaded, by scope."""
        losses = self._losses(of_device=False)
        if losses != self._below_losses:
            self._below, self._below_losses = {}, losses
        return self._below

    def _roomy(self) -> bool:
        """Was there always room for everything, and has nothing failed? Then nothing may be lost."""
        lower = self._paged._lower
        assert lower is not None
        room = lower.host is None or lower.host.ledger.arena.has([1] * len(self.layout.groups))
        return room and not any(self._losses(of_device=False))

    def _compare_content(self) -> None:
        """Whatever can be found in memory has been written."""
        lower = self._paged._lower
        assert lower is not None
        for level in [level for level in (lower.device, lower.host) if level is not None]:
            for extent in level.tree.extents():
                for group, number in np.argwhere(extent.pages != NO_PAGE).tolist():
                    row = self.mover.rows[level.tier][group][extent.pages[group, number]]
                    assert (row[: self.mover.widths[group]] != JUNK).any(), f"{level.tier.value}: a page holds junk"

    def _compare_below(self) -> None:
        """What is idle in a tier is in the next one too."""
        lower, digest, block = self._paged._lower, format_digest(self.layout), self.block
        assert lower is not None
        groups = range(len(self.layout.groups))

        def entries(level: Level, least: int) -> set[tuple[bytes, int]]:
            return {
                (key, group)
                for extent in level.tree.extents()
                for number, key in enumerate(keys_of(extent, digest))
                for group in groups
                if not extent.holds and extent.pages[group, number] != NO_PAGE and extent.end >= least
            }

        # What is shorter is not worth a copy.
        least = block * self.setup.minimum_blocks
        above = entries(lower.device, least)
        if lower.host is not None:
            assert above <= entries(lower.host, 0), "what is idle on the device is not on the host"
            above = entries(lower.host, least)
        if self.disk is not None:
            found, _ = self.disk.entries()
            on_disk = {(key, group) for key, parts in found for group in groups if parts >> group & 1}
            assert above <= on_disk, "what is idle in memory is not on disk"
        for scope, known in self.model.must.items():
            held = {live.text[:block] for live in self.lives if live.scope == scope and not live.suspended}
            self._surely_below().setdefault(scope, set()).update(
                prefix for prefix in known if not len(prefix) % block and prefix[:block] not in held
            )
