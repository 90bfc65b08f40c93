"""The value oracle with tiers: copies really move the numbers, and free pages of every tier hold junk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run, Tiers
from kvist.memory.copier import ManualCopier
from kvist.memory.disk import DiskStore
from kvist.memory.mover import Copy, Tier, block_pages
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence as CachedSequence
from kvist.spec import History, Retention
from kvist.stats import TierStats
from kvist.testing.under_test import ManagerFactory
from kvist.testing.values import JUNK, Array, Values, make_layout, make_spec, tokens

P = 4


class RowMover:
    """Moves rows of :class:`Values` between arrays, and to and from a disk as bytes. ``faults``: pages full of junk
    that it was told to copy."""

    def __init__(self) -> None:
        self.rows: dict[Tier, list[Array]] = {}
        self.disk: DiskStore | None = None
        #: Values of each group's page that mean something.
        self.widths: list[int] = []
        self.moves: list[str] = []
        self.faults: list[str] = []

    def mark(self) -> None:
        return None

    def move(self, copy: Copy, mark: object) -> Sequence[int]:
        self.moves.append(str(copy))
        failed = []
        for position in range(copy.block_count):
            if copy.target is Tier.DISK:
                assert self.disk is not None
                parts: list[bytes | None] = [None] * len(copy.source_pages)
                for group, page in block_pages(copy.source_pages, position):
                    parts[group] = self._read(copy, group, page).tobytes()
                if not self.disk.put(copy.keys[position], parts, copy.generation):
                    failed.append(position)
            elif copy.source is Tier.DISK:
                assert self.disk is not None
                found = self.disk.get(copy.keys[position])
                for group, page in block_pages(copy.target_pages, position):
                    part = None if found is None else found[group]
                    if part is None:
                        failed.append(position)
                        break
                    self.rows[copy.target][group][page] = np.frombuffer(part, np.int64)
            else:
                pairs = zip(block_pages(copy.source_pages, position), block_pages(copy.target_pages, position))
                for (group, source), (_, target) in pairs:
                    self.rows[copy.target][group][target] = self._read(copy, group, source)
        return failed

    def _read(self, copy: Copy, group: int, page: int) -> Array:
        row: Array = self.rows[copy.source][group][page]
        if (row[: self.widths[group]] == JUNK).all():
            # Not raised: a copier makes a report of whatever is raised.
            self.faults.append(f"{copy}: page {page} of group {group} holds junk")
        return row

    def close(self) -> None:
        pass


class Cache:
    """A manager with tiers below it, whose copies run when a test says so.

    device_pages, host_pages: of equal size, over all groups. host_pages 0: no host tier. folder: for a disk.
    """

    def __init__(
        self,
        *retentions: Retention,
        device_pages: int = 16,
        host_pages: int = 0,
        folder: Path | None = None,
        disk_blocks: int = 1000,
        block: int = P,
        pending_max: int = 64,
        minimum_blocks: int = 1,
        restore: RestorePolicy | None = None,
        backoff_tokens: int = 0,
        fingerprint: str = "test",
        vocab_size: int | None = None,
        widths: Sequence[int] = (),
        factory: ManagerFactory = PagedCacheManager,
    ) -> None:
        spec = make_spec(block, *(retentions or (History(),)), vocab_size=vocab_size, widths=widths)
        spec = attrs.evolve(spec, fingerprint=fingerprint)
        self.layout: Layout = make_layout(spec, device_pages)
        self.mover = RowMover()
        self.copier = ManualCopier(self.mover, pending_max)
        host = attrs.evolve(self.layout, slab_count=host_pages + 1) if host_pages else None
        self.disk: DiskStore | None = None
        if folder is not None:
            parts = [group.page_bytes for group in self.layout.groups]
            self.disk = DiskStore(folder, format_digest(self.layout), parts, disk_blocks * 4096)
        tiers = Tiers(self.copier, host, self.disk, minimum_blocks)
        chosen = {"restore": restore, "backoff_tokens": backoff_tokens, "tiers": tiers}
        self.manager = factory(self.layout, **{name: value for name, value in chosen.items() if value})
        self.values = Values(self.manager)
        self.mover.rows[Tier.DEVICE] = self.values.whole
        self.mover.widths = [pages.shape[1] for pages in self.values.pages]
        self.mover.disk = self.disk
        if host is not None:
            memory = np.full(host.arena_bytes // 8, JUNK, np.int64)
            self.mover.rows[Tier.HOST] = [memory.reshape(-1, group.page_bytes // 8) for group in host.groups]

    def poison_host(self) -> None:
        """Overwrite every host page that is free."""
        # Of other managers than ours nobody knows which host pages are free.
        lower = self.manager._lower if isinstance(self.manager, PagedCacheManager) else None
        if lower is not None and lower.host is not None:
            for group, rows in enumerate(self.mover.rows[Tier.HOST]):
                rows[lower.host.ledger.free_pages(group)] = JUNK

    def compute(self, sequence: CachedSequence, count: int | None = None) -> None:
        """Run the next tokens (all known ones by default), checking every row that is read."""
        goal = sequence.known if count is None else sequence.computed + count
        while sequence.computed < goal:
            # Chunks end where states are to be kept.
            end = sequence.next_end(goal)
            step = self.manager.plan([Run(sequence, end - sequence.computed)]).commit()
            self.values.run(step, [sequence], {id(sequence): sequence.tokens})
            self.manager.complete(step)
            self.check()

    def cached(self, *parts: int | range, **options: Any) -> None:
        """Compute a prompt and close it."""
        sequence = self.manager.open(tokens(*parts), **options)
        self.compute(sequence)
        self.manager.close(sequence)
        self.check()

    def flush(self) -> None:
        """Poll and copy until nothing is left to do."""
        for _ in range(1000):
            self.poll()
            if not self.copier.queued:
                return
            self.copier.run()
        raise AssertionError("copies never end")

    def poll(self) -> None:
        self.manager.poll()
        self.check()
        self.poison_host()

    def check(self) -> None:
        self.manager.check()
        assert not self.mover.faults

    def load(self, sequence: CachedSequence) -> None:
        """Bring up all that is loadable."""
        assert self.manager.load(sequence)
        assert sequence.loading
        self.copier.run()
        self.poll()
        assert not sequence.loading

    def evict_device(self) -> None:
        """Let another request take the whole device, and give it back without a trace."""
        length = 0
        while length < 1000 and self.layout.fits(length + 1):
            length += 1
        token = 999 if self.layout.spec.vocab_size is None else 0
        taker = self.manager.open(np.full(length, token), reuse=False)
        while taker.computed < length:
            # Block by block: a window then drops blocks behind it.
            self.compute(taker, min(self.layout.block_tokens, length - taker.computed))
        self.manager.close(taker)
        self.check()

    def tier(self, name: str) -> TierStats:
        return next(tier for tier in self.manager.stats().tiers if tier.name == name)
