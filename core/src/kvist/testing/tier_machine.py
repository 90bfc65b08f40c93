"""The cache machine with host and disk below the device: copies in any order, failures, restarts."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvist.errors import CapacityError, StateError
from kvist.manager import Run
from kvist.memory.mover import Tier, block_pages
from kvist.testing.bookkeeping import SCOPES, refused
from kvist.testing.machine import OPERATIONS
from kvist.testing.memory import Flight, Live, fold_on
from kvist.testing.mixes import Draw
from kvist.testing.tier_bookkeeping import TierBase
from kvist.testing.values import JUNK

#: Weight of each operation in random traffic with tiers.
TIER_OPERATIONS = {
    **OPERATIONS,
    "poll": 12,
    "copy": 12,
    "load": 16,
    "serve": 24,
    "settle": 8,
    "flood": 6,
    "fail": 2,
    "damage": 1,
    "disk_full": 1,
    "restart": 1,
    "clear": 2,
    "fork": 8,
}


class TierMachine(TierBase):
    """As without tiers, and copies run, fail, and end with the process."""

    def scope(self, draw: Draw) -> int:
        """Mostly the same one, so that what went down is asked for."""
        return int(not draw(6))

    def poll(self, draw: Draw) -> None:
        loading = [live for live in self.lives if live.sequence.loading]
        before = self.manager.stats()
        self.manager.poll()
        after = self.manager.stats()
        assert [group.evicted for group in after.groups] == [group.evicted for group in before.groups]
        lower = self._paged._lower
        if lower is not None and lower.host is not None:
            for group, rows in enumerate(self._host):
                rows[lower.host.ledger.free_pages(group)] = JUNK
        for live in loading:
            if not live.sequence.loading:
                self._arrived(live)
        assert not self.mover.faults, self.mover.faults[0]
        for tier in after.tiers:
            assert tier.used_bytes <= tier.capacity_bytes, f"{tier.name} holds more than it may"

    def copy(self, draw: Draw) -> None:
        """Some batch is copied; they wait for nobody."""
        queued = list(self.copier.queued)
        if queued:
            self.copier.run(queued[draw(len(queued))])
            assert not self.mover.faults, self.mover.faults[0]

    def fail(self, draw: Draw) -> None:
        """Some blocks of a batch do not arrive, or none does."""
        queued = list(self.copier.queued)
        if queued and self.setup.troubled:
            ticket = queued[draw(len(queued))]
            copy = self.copier.queued[ticket]
            failed = {draw(copy.block_count) for _ in range(draw(3))} or range(copy.block_count)
            self.copier.fail(ticket, *failed)
            self._troubles += 1
            if copy.target is not Tier.DISK:
                # Whatever has arrived of them is no content.
                for position in failed:
                    for group, page in block_pages(copy.target_pages, position):
                        self.mover.rows[copy.target][group][page] = JUNK

    def load(self, draw: Draw) -> None:
        waiting = [live for live in self.idle() if live.sequence.loadable > live.computed]
        live = self.pick(draw, [live for live in waiting if not live.sequence.loading])
        if live is not None:
            self._load(live)

    def _load(self, live: Live) -> None:
        sequence = live.sequence
        before, free, losses = self.manager.stats(), self.memory.free(), self._losses()
        if not self.manager.load(sequence):
            after = self.manager.stats()
            for now, then in zip(after.groups, before.groups):
                # It may have held something for a moment, which splits extents and counts as a peak.
                assert attrs.evolve(now, held_peak=then.held_peak) == then, "a refused load changed something"
            assert after.tiers == before.tiers, "a refused load changed something below"
            return
        assert sequence.loading and sequence.computed == live.computed
        looked, promised = self._looked[id(sequence)]
        # What others have pushed out meanwhile cannot come.
        self._promised[id(sequence)] = self._losses(of_device=False), promised if looked == losses else 0
        refused(StateError, lambda: self.manager.plan([Run(sequence, 1)]), "loading")
        refused(StateError, lambda: self.batches[0].join(sequence), "")
        after = self.manager.stats()
        if any(now.evicted > then.evicted for now, then in zip(after.groups, before.groups)):
            self.model.evicted(self.lives)
        # What steps that are not executed yet find free is not free any more where something comes up.
        taken = [np.setdiff1d(then, left) for then, left in zip(free, self.memory.free())]
        for flight in self.flights:
            flight.free = [np.setdiff1d(mine, gone) for mine, gone in zip(flight.free, taken)]

    def flood(self, draw: Draw) -> None:
        """Requests that leave no trace take all the room that there is, as far as the capacity query promises it."""
        takers: list[Live] = []
        while len(takers) < 8:
            # Not so long that tables have to grow: what steps in flight see of them is compared.
            length = min(self.manager.capacity().tokens or 0, self.setup.max_tokens or 60 * self.block)
            if not length:
                break
            text = bytes(draw(self.setup.vocab) for _ in range(length))
            sequence = self.manager.open(np.frombuffer(text, np.uint8), reuse=False)
            live = Live(sequence, 0, text, fold_on(np.empty(0, np.int64), 0, text), False)
            self._claimed(live, 0)
            live.known = live.prompt_length = length
            self.lives.append(live)
            takers.append(live)
            assert self._run(live, length), f"{length} tokens were to fit"
        for live in takers:
            self.manager.close(live.sequence)
            self._closed(live)

    def serve(self, draw: Draw) -> None:
        """A request from its beginning to its end, without waiting for others."""
        before = len(self.lives)
        self.open(draw)
        if len(self.lives) <= before:
            return
        live = self.lives[-1]
        sequence = live.sequence
        if sequence.loadable > live.computed and draw(4):
            self._load(live)
            for _ in range(draw(3)):
                self.copy(draw)
            if draw(3):
                self.quiesce()
            else:
                self.poll(draw)
        while not sequence.loading and live.computed < live.known:
            end = sequence.next_end(live.known)
            if not self._run(live, end - live.computed):
                return
        if not sequence.loading and draw(4):
            self.close(draw, [live])

    def _run(self, live: Live, count: int) -> bool:
        """Plan, execute and complete a step of one sequence, if it fits."""
        before = self.manager.stats()
        plan = self.manager.plan([Run(live.sequence, count)])
        self._compare_fit(plan, plan.runs, None, before)
        if not plan.fits:
            return False
        self.need(live, live.computed + count)
        step = plan.commit()
        self._compare_evictions(before, plan.needed)
        live.pending, live.columns = False, max(live.columns, 1) if self.states else 0
        snapshots = [(live, position) for _, position in plan.snapshots]
        flight = Flight(step, plan, [live], [count], self.memory.free(), snapshots)
        self.flights.append(flight)
        self._execute_through(flight)
        self.flights.remove(flight)
        self.manager.complete(step)
        self.steps += 1
        self.newest_run = max(self.newest_run, step.id)
        self.computed_tokens += count
        committed = live.committed
        live.computed += count
        self._began(live)
        self._published(live, committed, flight)
        return True

    def settle(self, draw: Draw) -> None:
        """A time in which nothing fails: copies run until none is left."""
        self.quiesce()
        # What the next step copies from or to is not what it will be, and cannot go down before.
        if not self.flights and not any(self._paged._pages_in_use()):
            self._compare_content()
            if self._roomy():
                self._compare_below()

    def quiesce(self) -> None:
        for _ in range(200):
            self.poll(lambda _: 0)
            if not self.copier.queued:
                return
            self.copier.run()
        raise AssertionError("copies never end")

    def fork(self, draw: Draw) -> None:
        """As without tiers. Some forks are given up at once: what they were to copy goes to pages that nobody has, and
        nothing may come up to those before."""
        before = len(self.lives)
        super().fork(draw)
        if len(self.lives) > before and draw(2):
            self.close(draw, [self.lives[-1]])
            self.load(draw)

    def damage(self, draw: Draw) -> None:
        """Somebody flips bits on the disk, in one file or in all; often in every value of it."""
        files = sorted(self._folder.rglob("*.block")) if self._folder is not None else []
        if self.disk is not None and files and self.setup.troubled:
            header = self.disk._files.file_bytes(0)
            for path in [files[draw(len(files))]] if draw(2) else files:
                content = bytearray(path.read_bytes())
                for at in range(draw(len(content)) if draw(3) else header, len(content), 8):
                    content[at] ^= 1 << draw(8)
                path.write_bytes(bytes(content))
            self._troubles += 1

    def disk_full(self, draw: Draw) -> None:
        """The file system takes nothing more, or takes it again."""
        if self.disk is None or not self.setup.troubled:
            return
        self._troubles += 1
        files: Any = self.disk._files
        self._full = not self._full
        if self._full:

            def refuse(*_: object) -> Path:
                raise OSError(errno.ENOSPC, "no space left on device")

            files.write = refuse
        else:
            del files.write

    def restart(self, draw: Draw) -> None:
        """The process ends at any moment; another one finds what is on the disk, and nothing else."""
        if draw(3):
            return
        may, past = self.model.may, self.past
        below = self._surely_below()
        self.copier.close()
        if self.disk is not None:
            self.disk.close()
        self._start()
        if self.disk is not None:
            self.model.may, self._below = may, below
        self.past = past

    def clear(self, draw: Draw) -> None:
        # Above all while something is on its way.
        if draw(2 if self.copier.queued else 4):
            return
        if draw(2):
            self.open(draw)
            self.load(draw)
        super().clear(lambda _: 0)
        self._below.clear()
        self._promised.clear()
        if draw(2):
            self.quiesce()
        for text in self.past:
            for scope in SCOPES:
                with contextlib.suppress(CapacityError):
                    sequence = self.manager.open(np.frombuffer(text + b"\0", np.uint8)[:20], scope)
                    assert sequence.loadable == sequence.computed == 0, "what was cleared can be found"
                    self.manager.close(sequence)

    def open(self, draw: Draw) -> None:
        before = len(self.lives)
        super().open(draw)
        if len(self.lives) > before and not self.sparse and self.setup.minimum_blocks == 1:
            live = self.lives[-1]
            if live.shares:
                below = [prefix for prefix in self._surely_below().get(live.scope, ()) if live.text.startswith(prefix)]
                least = self._reusable(max(map(len, below), default=0), live.text[: live.known])
                least -= least % self.block if self.rings else 0
                assert live.sequence.loadable >= least, f"{live.sequence.loadable} tokens of at least {least} loadable"

    def finish(self, draw: Draw) -> None:
        super().finish(draw)
        self.copier.close()
        if self.disk is not None:
            self.disk.close()
