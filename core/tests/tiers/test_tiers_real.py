"""Tiers with real memory, a thread that copies, and files: bytes come back as they went down."""

from __future__ import annotations

import time

import attrs
import numpy as np
import pytest

from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run, Tiers
from kvist.memory.copier import ThreadCopier
from kvist.memory.device import DeviceMemory
from kvist.memory.disk import DiskStore
from kvist.memory.mover import CpuMover, Tier
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window
from kvist.step import NO_PAGE, Step
from kvist.testing.values import make_spec

P = 16


class Machine:
    """A device, a host tier and a disk, and a model whose rows are a number for each position."""

    def __init__(self, folder, *retentions) -> None:
        spec = make_spec(P, *retentions, width=8)
        self.layout = Layout.build(spec, 1 << 18)
        host = attrs.evolve(self.layout, slab_count=4 * self.layout.slab_count)
        self.device, self.host = DeviceMemory(self.layout), DeviceMemory(host)
        parts = [group.content_bytes for group in self.layout.groups]
        self.disk = DiskStore(folder, format_digest(self.layout), parts, 1 << 24)
        mover = CpuMover({Tier.DEVICE: self.device, Tier.HOST: self.host}, self.disk)
        self.copier = ThreadCopier(mover)
        self.manager = PagedCacheManager(self.layout, RestorePolicy(2), tiers=Tiers(self.copier, host, self.disk))

    def run(self, sequence, count: int) -> None:
        while count:
            end = min(sequence.next_end(sequence.computed + count), sequence.computed + count)
            plan = self.manager.plan([Run(sequence, end - sequence.computed)])
            while not plan.fits:
                # What copies keep comes free when they have finished.
                assert self.manager.copying, plan.shortages
                assert self.copier.wait(None, 30)
                self.manager.poll()
                plan = self.manager.plan([Run(sequence, end - sequence.computed)])
            step = plan.commit()
            self.device.apply(step)
            self._write(step, sequence)
            self.device.save(step)
            count -= end - sequence.computed
            self.manager.complete(step)
            self.manager.poll()

    def _write(self, step: Step, sequence) -> None:
        begin, end = int(step.lengths[0] - step.query_lengths[0]), int(step.lengths[0])
        seed = int(sequence.tokens[0])
        for group in self.layout.groups:
            pages = self.device.pages(group.index).numpy()
            table = step.tables[group.index][step.slots[0]]
            if group.exact:
                state = pages[table[0], : group.content_bytes]
                expected = _pattern(seed, begin, group) if begin else np.zeros(group.content_bytes, np.uint8)
                assert np.array_equal(state, expected), f"{group.name}: the state before {begin} is wrong"
                state[:] = _pattern(seed, end, group)
                continue
            for block in range(-(-begin // P)):
                full = (block + 1) * P
                if table[block] != NO_PAGE and full <= begin and not isinstance(group.retention, Window):
                    found = pages[table[block], : group.content_bytes]
                    assert np.array_equal(found, _pattern(seed, block, group)), f"{group.name}: block {block} is wrong"
            if isinstance(group.retention, Window):
                for low, high in group.retention.required(begin - begin % P, P):
                    for block in range(low, high):
                        found = pages[table[block], : group.content_bytes]
                        assert np.array_equal(found, _pattern(seed, block, group)), f"{group.name}: {block} is wrong"
            for block in range(begin // P, -(-end // P)):
                pages[table[block], : group.content_bytes] = _pattern(seed, block, group)

    def settle(self) -> None:
        deadline = time.monotonic() + 30
        self.manager.poll()
        while self.manager.copying:
            assert self.copier.wait(None, deadline - time.monotonic())
            self.manager.poll()
        self.manager.check()

    def close(self) -> None:
        self.copier.close()
        self.disk.close()


def _pattern(seed: int, number: int, group) -> np.ndarray:
    rng = np.random.default_rng([seed, number, group.index])
    return rng.integers(0, 256, group.content_bytes, np.uint8)


@pytest.mark.parametrize("mix", [(History(),), (History(), Window(24)), (History(), Window(24), State())])
def test_conversations_larger_than_the_device_come_back(mix, tmp_path) -> None:
    machine = Machine(tmp_path, *mix)
    capacity = machine.layout.page_capacity(machine.layout.groups[0]) // len(mix)
    blocks = capacity // 6
    prompts = [np.arange(blocks * P + 5) + 10_000 * (number + 1) for number in range(16)]
    assert 16 * blocks > 2 * capacity
    for prompt in prompts:
        sequence = machine.manager.open(prompt)
        machine.run(sequence, len(prompt))
        machine.manager.close(sequence)
        machine.settle()
    for prompt in prompts:
        sequence = machine.manager.open(np.append(prompt, 1))
        if sequence.loadable > sequence.computed:
            assert machine.manager.load(sequence)
            machine.settle()
        assert sequence.computed >= blocks * P
        machine.run(sequence, sequence.known - sequence.computed)
        machine.manager.close(sequence)
    machine.settle()
    stats = machine.manager.stats()
    assert stats.tiers[0].reused_tokens > 0
    assert stats.tiers[0].failed_blocks == stats.tiers[1].failed_blocks == 0
    machine.close()

    machine = Machine(tmp_path, *mix)
    for prompt in prompts:
        sequence = machine.manager.open(np.append(prompt, 1))
        assert sequence.loadable == blocks * P
        assert machine.manager.load(sequence)
        machine.settle()
        assert sequence.computed == blocks * P
        machine.run(sequence, sequence.known - sequence.computed)
        machine.manager.close(sequence)
    host, disk = machine.manager.stats().tiers
    assert (host.reused_tokens, disk.reused_tokens) == (0, 16 * blocks * P)
    machine.settle()
    machine.manager.clear()
    assert all(machine.manager.open(prompt).loadable == 0 for prompt in prompts)
    machine.close()
    assert not list(tmp_path.rglob("*.block"))
