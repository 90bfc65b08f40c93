"""Copies between tiers: right bytes, any order, every failure reported once, nobody blocked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import threading
import time

import attrs
import numpy as np
import pytest
import torch

from kvist.errors import StateError, TierError
from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.memory import streams
from kvist.memory.copier import Finished, ManualCopier, ThreadCopier, Ticket
from kvist.memory.device import DeviceMemory
from kvist.memory.disk import DiskStore
from kvist.memory.mover import Copy, CpuMover, Tier, page_runs
from kvist.memory.streams import StreamMover
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream, Window
from kvist.step import NO_PAGE

ROW = RowFormat((1, 5), "float32")
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def make_layout(pages: int) -> Layout:
    """Two groups, whose pages hold 160 and 80 bytes of 192 and 96: there is padding, and it is no content."""
    layers = [
        Layer(0, (Stream("k", ROW, History()), Stream("v", ROW, History()))),
        Layer(1, (Stream("k", ROW, Window(4)),)),
    ]
    built = Layout.build(CacheSpec(layers, 4, "weights"), 1 << 16)
    groups = tuple(attrs.evolve(group, page_bytes=size) for group, size in zip(built.groups, (192, 96), strict=True))
    return attrs.evolve(built, groups=groups, slab_bytes=192, slab_count=pages)


class Tiers:
    """Device, host and disk memory, each page filled with noise of its own."""

    def __init__(self, folder) -> None:
        self.layout = make_layout(24)
        self.memories = {
            DEVICE: DeviceMemory(self.layout),
            # The same groups and pages, another number of slabs.
            HOST: DeviceMemory(attrs.evolve(self.layout, slab_count=12)),
        }
        rng = np.random.default_rng(0)
        for memory in self.memories.values():
            memory.bytes.numpy()[:] = rng.integers(0, 256, memory.layout.arena_bytes, np.uint8)
        content = [group.content_bytes for group in self.layout.groups]
        assert content == [160, 80]
        self.disk = DiskStore(folder, format_digest(self.layout), content, 1 << 20)
        self.mover = CpuMover(self.memories, self.disk)

    def page(self, tier: Tier, group: int, page: int) -> bytes:
        """The content of a page, read where it is: bytes from page id times page bytes."""
        laid = self.layout.groups[group]
        begin = page * laid.page_bytes
        return self.memories[tier].bytes[begin : begin + laid.content_bytes].numpy().tobytes()

    def fill(self, tier: Tier, group: int, page: int, name: object) -> bytes:
        laid = self.layout.groups[group]
        content = hashlib.shake_256(repr(name).encode()).digest(laid.content_bytes)
        begin = page * laid.page_bytes
        self.memories[tier].bytes[begin : begin + laid.content_bytes] = torch.tensor(list(content), dtype=torch.uint8)
        return content


@pytest.fixture
def tiers(tmp_path):
    made = Tiers(tmp_path / "disk")
    yield made
    made.disk.close()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def pages_of(*groups: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(ids(*pages) for pages in groups)


def keys_of(*names: object) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(repr(name).encode()).digest() for name in names)


def down(*pairs: tuple[int, int]) -> Copy:
    """Device to host, group 0."""
    sources, targets = zip(*pairs, strict=True)
    nothing = (NO_PAGE,) * len(pairs)
    return Copy(DEVICE, HOST, pages_of(sources, nothing), pages_of(targets, nothing))


def up(*pairs: tuple[int, int]) -> Copy:
    """Host to device, group 0."""
    return attrs.evolve(down(*pairs), source=HOST, target=DEVICE)


def settle(copier: ThreadCopier) -> dict[int, Finished]:
    assert copier.wait(None, 10)
    return {report.ticket.number: report for report in copier.finished()}


@pytest.fixture
def threaded(tiers):
    copier = ThreadCopier(tiers.mover)
    yield copier
    copier.close()


def test_blocks_go_down_and_come_back(tiers, threaded):
    """Device to host to disk and back by another way, in groups of which a block may have any."""
    # Two pages of the second group are as large as one of the first, and no slab belongs to both.
    device = pages_of((3, 4, 5, 9, NO_PAGE), (12, NO_PAGE, 13, 14, 16))
    host = pages_of((8, 9, 2, 1, NO_PAGE), (6, NO_PAGE, 7, 8, 11))
    keys = keys_of(*range(5))
    truth = {
        (group, block): tiers.fill(DEVICE, group, page, (group, block))
        for group, pages in enumerate(device)
        for block, page in enumerate(pages.tolist())
        if page != NO_PAGE
    }

    def there(tier: Tier, pages: tuple[np.ndarray, ...]) -> dict[tuple[int, int], bytes]:
        return {(group, block): tiers.page(tier, group, int(pages[group][block])) for group, block in truth}

    threaded.submit(Copy(DEVICE, HOST, device, host))
    assert settle(threaded)[1].error is None
    assert there(HOST, host) == truth
    threaded.submit(Copy(HOST, DISK, host, keys=keys))
    assert settle(threaded)[2].error is None
    assert [tiers.disk.groups(key) for key in keys] == [(0, 1), (0,), (0, 1), (0, 1), (1,)]
    others = pages_of((12, 10, 11, 13, NO_PAGE), (28, NO_PAGE, 29, 30, 31))
    threaded.submit(Copy(DISK, DEVICE, target_pages=others, keys=keys))
    assert settle(threaded)[3].error is None
    assert there(DEVICE, others) == truth
    # Straight to disk, only the group that is missing there, and back to the host.
    threaded.submit(Copy(DEVICE, DISK, pages_of((NO_PAGE,), (34,)), keys=keys[1:2]))
    threaded.submit(Copy(DISK, HOST, target_pages=pages_of((10,), (9,)), keys=keys[1:2]))
    assert [report.error for report in settle(threaded).values()] == [None, None]
    assert tiers.page(HOST, 0, 10) == truth[0, 1] and tiers.page(HOST, 1, 9) == tiers.page(DEVICE, 1, 34)


def test_other_pages_stay_as_they_are(tiers, threaded):
    before = {tier: memory.bytes.clone() for tier, memory in tiers.memories.items()}
    threaded.submit(down((3, 2), (4, 3), (7, 1)))
    settle(threaded)
    assert torch.equal(tiers.memories[DEVICE].bytes, before[DEVICE])
    expected = before[HOST].view(-1, 192).clone()
    expected[[2, 3, 1]] = before[DEVICE].view(-1, 192)[[3, 4, 7]]
    assert torch.equal(tiers.memories[HOST].bytes, expected.view(-1))


def test_runs_are_contiguous_on_both_sides():
    copy = Copy(
        DEVICE,
        HOST,
        pages_of((4, 5, NO_PAGE, 6, 9, 10), (1, 2, 3, 4, 5, NO_PAGE)),
        pages_of((7, 8, NO_PAGE, 9, 1, 3), (5, 6, 7, 1, 2, NO_PAGE)),
    )
    assert list(page_runs(copy)) == [(0, 4, 7, 3), (0, 9, 1, 1), (0, 10, 3, 1), (1, 1, 5, 3), (1, 4, 1, 2)]


def test_random_batches_beside_a_model(tiers):
    """Any order of what is pending gives what each batch said: the copier refuses everything else."""
    rng = random.Random(3)
    copier = ManualCopier(tiers.mover, pending_max=5)
    model = {
        (tier, page): tiers.page(tier, 0, page)
        for tier, count in ((DEVICE, 24), (HOST, 12))
        for page in range(1, count)
    }
    refused, pending = 0, {}
    for _ in range(400):
        if pending and (len(pending) == 5 or rng.random() < 0.4):
            ticket = rng.choice(list(pending))
            copier.run(ticket)
            assert [report.ticket for report in copier.finished()] == [ticket]
            tier, pairs = pending.pop(ticket)
            # The content that the source had when the batch was submitted: nobody could change it since.
            for (_, content), target in pairs:
                assert tiers.page(tier, 0, target) == content
                model[tier, target] = content
            continue
        source, target = rng.choice([(DEVICE, HOST), (HOST, DEVICE)])
        count = rng.randint(1, 3)
        limits = {DEVICE: 24, HOST: 12}
        pairs = list(
            zip(rng.sample(range(1, limits[source]), count), rng.sample(range(1, limits[target]), count), strict=True)
        )
        read = {(source, page) for page, _ in pairs}
        written = {(target, page) for _, page in pairs}
        busy_reads = {(other, page) for _, (tier, those) in pending.items() for (other, page), _ in _reads(those)}
        busy_writes = {(tier, page) for tier, those in pending.values() for _, page in those}
        copy = attrs.evolve(down(*pairs), source=source, target=target)
        if (read | written) & busy_writes or written & busy_reads:
            refused += 1
            with pytest.raises(StateError):
                copier.submit(copy)
        else:
            pending[copier.submit(copy)] = (target, [(((source, a), model[source, a]), b) for a, b in pairs])
    assert refused > 20


def _reads(pairs):
    return [(page, content) for (page, content), _ in pairs]


# Scenario 35: copies that would have to wait for each other.


@pytest.mark.parametrize("first", [0, 1])
def test_two_pages_into_one_slot(tiers, first):
    """The host has one slot. The second page waits until the first has arrived, so no order can mix them up."""
    d1, d2 = tiers.fill(DEVICE, 0, 1, "d1"), tiers.fill(DEVICE, 0, 2, "d2")
    copier = ManualCopier(tiers.mover)
    order = [down((1, 5)), down((2, 5))]
    one = copier.submit(order[first])
    with pytest.raises(StateError) as raised:
        copier.submit(order[1 - first])
    assert str(raised.value) == (
        "copy (device to host, 1 blocks): a pending copy still writes host pages [5] of group 0\n"
        "hint: keep the pages of a copy leased until it has finished"
    )
    copier.run(one)
    # It has run, but nobody was told: the slot is still the first one's.
    with pytest.raises(StateError):
        copier.submit(order[1 - first])
    assert [report.ticket for report in copier.finished()] == [one]
    copier.run(copier.submit(order[1 - first]))
    assert tiers.page(HOST, 0, 5) == (d2, d1)[first]


def test_a_page_on_its_way_is_no_source(tiers):
    truth = tiers.fill(HOST, 0, 1, "h")
    copier = ManualCopier(tiers.mover)
    arriving = copier.submit(up((1, 3), (2, 4)))
    for copy in (
        down((3, 7)),
        Copy(DEVICE, DISK, pages_of((9, 4), (NO_PAGE, NO_PAGE)), keys=keys_of(1, 2)),
    ):
        with pytest.raises(StateError, match=r"still writes device pages \[[34]\] of group 0"):
            copier.submit(copy)
    copier.run(arriving)
    copier.finished()
    copier.run(copier.submit(down((3, 7))))
    assert tiers.page(HOST, 0, 7) == truth


def test_a_source_on_its_way_is_no_target(tiers):
    copier = ManualCopier(tiers.mover)
    copier.submit(down((3, 7)))
    for copy in (up((1, 3)), Copy(DISK, DEVICE, target_pages=pages_of((3,), (NO_PAGE,)), keys=keys_of(1))):
        with pytest.raises(StateError, match=r"still reads device pages \[3\] of group 0"):
            copier.submit(copy)
    # Reading twice is no harm; neither is the same page number in another group or tier.
    copier.submit(down((3, 8)))
    copier.submit(Copy(HOST, DEVICE, pages_of((NO_PAGE,), (2,)), pages_of((NO_PAGE,), (3,))))
    copier.submit(up((3, 9)))
    copier.run()
    copier.finished()
    assert copier.submit(up((1, 3))) == Ticket(5)


def test_a_refused_copy_holds_no_page(tiers):
    copier = ManualCopier(tiers.mover)
    copier.submit(down((3, 7)))
    with pytest.raises(StateError):
        copier.submit(down((4, 8), (5, 7)))
    copier.submit(down((4, 8)))
    copier.submit(up((9, 5)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_independent_copies_run_in_any_order(tiers, order):
    truth = [tiers.fill(DEVICE, 0, page, page) for page in (1, 2, 3)]
    copier = ManualCopier(tiers.mover)
    tickets = [copier.submit(down((page, 10 - page))) for page in (1, 2, 3)]
    assert copier.finished() == [] and not copier.wait(None, 60) and list(copier.queued) == tickets
    copier.run(*(tickets[i] for i in order))
    assert [report.ticket for report in copier.finished()] == [tickets[i] for i in order]
    assert copier.finished() == [] and copier.wait(None, 60)
    assert [tiers.page(HOST, 0, page) for page in (9, 8, 7)] == truth


# Scenario 39: a failure is never a success.


def load_of(names: tuple[object, ...], *targets: int) -> Copy:
    return Copy(DISK, DEVICE, target_pages=pages_of(targets, (NO_PAGE,) * len(targets)), keys=keys_of(*names))


def store_on_disk(tiers: Tiers, *names: object) -> dict[object, bytes]:
    truth = {name: hashlib.shake_256(repr(name).encode()).digest(160) for name in names}
    for name, content in truth.items():
        assert tiers.disk.put(keys_of(name)[0], [content, None])
    return truth


def test_a_chosen_block_fails_and_the_others_arrive(tiers):
    truth = store_on_disk(tiers, "a", "b", "c")
    copier = ManualCopier(tiers.mover)
    ticket = copier.submit(load_of(("a", "b", "c"), 5, 6, 7))
    copier.fail(ticket, 1)
    (report,) = copier.finished()
    assert report.ticket == ticket and report.failed == (1,)
    assert str(report.error) == "copy 1 (disk to device, 3 blocks): 1 did not arrive"
    assert [tiers.page(DEVICE, 0, page) for page in (5, 7)] == [truth["a"], truth["c"]]
    assert tiers.page(DEVICE, 0, 6) != truth["b"]
    # Beside what fails by itself.
    ticket = copier.submit(load_of(("a", "b", "never", "c"), 5, 6, 7, 8))
    copier.fail(ticket, 0)
    assert copier.finished()[0].failed == (0, 2)
    ticket = copier.submit(load_of(("a", "b", "c"), 5, 6, 7))
    copier.fail(ticket)
    assert copier.finished()[0].failed == (0, 1, 2)
    # The pages are free again in every case.
    copier.run(copier.submit(load_of(("a", "b", "c"), 5, 6, 7)))
    assert copier.finished()[0].error is None and tiers.page(DEVICE, 0, 6) == truth["b"]


def test_what_is_damaged_or_gone_on_the_disk_fails_alone(tiers, threaded):
    truth = store_on_disk(tiers, *"abcd")
    paths = {name: next(tiers.disk.folder.rglob(f"{keys_of(name)[0].hex()}*")) for name in "abcd"}
    os.truncate(paths["b"], 200)
    paths["d"].unlink()
    threaded.submit(load_of(("a", "b", "c", "d", "never"), 5, 6, 7, 8, 9))
    report = settle(threaded)[1]
    assert report.failed == (1, 3, 4)
    assert str(report.error) == "copy 1 (disk to device, 5 blocks): 3 did not arrive"
    assert [tiers.page(DEVICE, 0, page) for page in (5, 7)] == [truth["a"], truth["c"]]
    # An entry that lacks a group that is wanted fails, and is kept for who needs less.
    threaded.submit(Copy(DISK, DEVICE, target_pages=pages_of((5, 6), (3, NO_PAGE)), keys=keys_of("a", "c")))
    assert settle(threaded)[2].failed == (0,)
    assert tiers.disk.contains(keys_of("a")[0])


def test_blocks_the_disk_does_not_take_fail_alone(tiers, threaded, monkeypatch):
    really, names = os.replace, []

    def sometimes(source, target):
        names.append(target)
        if len(names) == 2:
            raise OSError(28, "No space left on device")
        really(source, target)

    monkeypatch.setattr(os, "replace", sometimes)
    threaded.submit(Copy(DEVICE, DISK, pages_of((1, 2, 3), (1, 2, 3)), keys=keys_of(1, 2, 3)))
    report = settle(threaded)[1]
    assert report.failed == (1,)
    assert [tiers.disk.contains(key) for key in keys_of(1, 2, 3)] == [True, False, True]


class Breaks:
    """A mover that fails when told to, in the middle of a batch."""

    def __init__(self, inner: CpuMover) -> None:
        self.inner, self.broken, self.closed = inner, threading.Event(), 0
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def mark(self) -> None:
        pass

    def move(self, copy, mark):
        self.began.set()
        assert self.go_on.wait(10)
        if self.broken.is_set():
            self.inner.move(copy.only([0]), mark)
            raise RuntimeError("the bus caught fire")
        return self.inner.move(copy, mark)

    def close(self) -> None:
        self.closed += 1


def test_a_failing_copy_is_reported_and_the_thread_lives_on(tiers):
    mover = Breaks(tiers.mover)
    copier = ThreadCopier(mover)
    mover.broken.set()
    copier.submit(down((1, 2), (3, 4)))
    report = settle(copier)[1]
    assert report.failed == (0, 1)
    assert str(report.error) == (
        "copy 1 (device to host, 2 blocks): 2 did not arrive: RuntimeError: the bus caught fire"
    )
    assert isinstance(report.error, TierError) and isinstance(report.error.__cause__, RuntimeError)
    mover.broken.clear()
    copier.submit(down((1, 2), (3, 4)))
    assert settle(copier)[2].error is None
    assert tiers.page(HOST, 0, 4) == tiers.page(DEVICE, 0, 3)
    copier.close()


def test_submitting_does_not_wait_and_room_is_bounded(tiers):
    mover = Breaks(tiers.mover)
    mover.go_on.clear()
    copier = ThreadCopier(mover, pending_max=3)
    tickets = [copier.submit(down((page, page))) for page in (1, 2, 3)]
    assert copier.room == 0 and copier.finished() == []
    with pytest.raises(StateError) as raised:
        copier.submit(down((4, 4)))
    assert str(raised.value) == (
        "copy (device to host, 1 blocks): 3 copies are pending, and there is room for 3\n"
        "hint: ask `room` before, and collect what has finished"
    )
    started = time.perf_counter()
    assert not copier.wait(tickets[0], 0.05) and not copier.wait(None, 0)
    assert 0.04 < time.perf_counter() - started < 5
    mover.go_on.set()
    assert copier.wait(tickets[1], 10)
    assert copier.wait(None, 10)
    # Finished but not collected still counts: what waits to be told is bounded too.
    assert copier.room == 0
    assert [report.ticket for report in copier.finished()] == tickets
    assert copier.room == 3 and copier.finished() == [] and copier.wait(tickets[0], 0)
    copier.close()


def test_closing_fails_what_had_not_begun(tiers):
    mover = Breaks(tiers.mover)
    mover.go_on.clear()
    copier = ThreadCopier(mover)
    for page in (1, 2, 3):
        copier.submit(down((page, page)))
    assert mover.began.wait(10)
    threading.Timer(0.05, mover.go_on.set).start()
    copier.close()
    copier.close()
    reports = copier.finished()
    assert [report.ticket.number for report in reports] == [1, 2, 3]
    assert reports[0].error is None
    assert [str(report.error) for report in reports[1:]] == [
        f"copy {number} (device to host, 1 blocks): 1 did not arrive: StateError: the copier was closed before it began"
        for number in (2, 3)
    ]
    assert mover.closed >= 1
    with pytest.raises(StateError) as raised:
        copier.submit(down((4, 4)))
    assert str(raised.value) == "the copier is closed\nhint: make a new one"


def test_closing_does_not_wait_forever(tiers, monkeypatch):
    monkeypatch.setattr("kvist.memory.copier._CLOSE_S", 0.05)
    mover = Breaks(tiers.mover)
    mover.go_on.clear()
    copier = ThreadCopier(mover)
    copier.submit(down((1, 1)))
    assert mover.began.wait(10)
    with pytest.raises(TierError) as raised:
        copier.close()
    assert str(raised.value) == (
        "the copy under way has not ended 0.05 s after the copier was closed\n"
        "hint: do not free its memory; a disk that does not answer is the likely cause"
    )
    assert mover.closed == 0
    mover.go_on.set()
    monkeypatch.setattr("kvist.memory.copier._CLOSE_S", 10)
    copier.close()
    assert mover.closed == 1


def test_a_closed_manual_copier_reports_too(tiers):
    copier = ManualCopier(tiers.mover)
    copier.run(copier.submit(down((1, 1))))
    copier.submit(down((2, 2)))
    copier.close()
    copier.close()
    assert [report.failed for report in copier.finished()] == [(), (0,)]
    with pytest.raises(StateError, match="the copier is closed"):
        copier.submit(down((3, 3)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Copy(DEVICE, DEVICE, pages_of((1,)), pages_of((2,))),
        lambda: Copy(DEVICE, HOST, pages_of((1, 2)), pages_of((2,))),
        lambda: Copy(DEVICE, HOST, pages_of((1, 2)), pages_of((3, 3))),
        lambda: Copy(DEVICE, HOST, pages_of((1, 1)), pages_of((3, 4))),
        lambda: Copy(DEVICE, HOST, pages_of((1, 2)), pages_of((3, NO_PAGE))),
        lambda: Copy(DEVICE, HOST, pages_of((1,)), pages_of((3,)), keys_of(1)),
        lambda: Copy(DEVICE, DISK, pages_of((1,)), pages_of((3,)), keys_of(1)),
        lambda: Copy(DEVICE, DISK, pages_of((1,))),
        lambda: Copy(DEVICE, DISK, pages_of((1, 2)), keys=keys_of(1)),
        lambda: Copy(DEVICE, DISK, pages_of((1, NO_PAGE)), keys=keys_of(1, 2)),
    ],
)
def test_a_batch_that_makes_no_sense_is_a_bug(wrong):
    with pytest.raises((AssertionError, ValueError)):
        wrong()


def test_memory_that_is_not_the_cpus_is_refused(tiers):
    class Elsewhere:
        layout = tiers.layout

        def pages(self, group):
            return torch.empty((2, 192), dtype=torch.uint8, device="meta")

    with pytest.raises(TierError) as raised:
        CpuMover({DEVICE: Elsewhere()})
    assert str(raised.value).startswith("device memory is not the CPU's: ")
    assert str(raised.value).endswith("\nhint: use kvist.memory.streams.StreamMover")


def test_the_modules_below_the_device_need_no_torch():
    code = (
        "import kvist.keys, kvist.memory.copier, sys; print('torch' in sys.modules, 'kvist.memory.disk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False True\n"


def test_streams_are_refused_without_a_cuda_device(tiers):
    with pytest.raises(TierError) as raised:
        StreamMover(tiers.memories[DEVICE], tiers.memories[HOST], tiers.disk)
    assert str(raised.value) == (
        "a stream copies to and from CUDA devices, and this memory is on cpu\nhint: use kvist.memory.mover.CpuMover"
    )


class PretendCuda:
    """CUDA as far as a mover sees it: what is issued to a stream happens when somebody waits for it, and not before."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[str] = []
        self.issued: list = []
        self.pinned: set[int] = set()
        really_copy = torch.Tensor.copy_

        def copy(target, source, non_blocking=False):
            if not non_blocking:
                return really_copy(target, source)
            self.issued.append(lambda: really_copy(target, source))
            self.log.append("copy")
            return target

        pretend = self

        class Event:
            def __init__(self, blocking=False):
                self.reached = 0

            def synchronize(self):
                pretend.run(self.reached)

        class Stream:
            def __init__(self, device=None):
                pass

            def record_event(self, event=None):
                event = event or Event()
                event.reached = len(pretend.issued)
                return event

            def wait_event(self, event):
                pretend.log.append("wait")

        class Runtime:
            def cudaHostRegister(self, address, count, flags):
                pretend.pinned.add(address)
                return 2 if count > 1 << 20 else 0

            def cudaHostUnregister(self, address):
                pretend.pinned.remove(address)
                return 0

        def check_error(result):
            if result:
                raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "check_error", check_error)
        monkeypatch.setattr(streams, "_pinned", lambda count: torch.empty(count, dtype=torch.uint8))

    def run(self, count: int) -> None:
        self.log.append("drain")
        while count and self.issued:
            self.issued.pop(0)()
            count -= 1


def fails_at(call: int, really):
    """``really``, but its n-th call breaks."""
    calls = []

    def function(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise RuntimeError("broken")
        return really(*arguments)

    return function


def test_the_order_of_what_a_stream_is_told(tiers, monkeypatch):
    """Without a CUDA device: nothing begins before the mark, nothing is reported before it is done, and the stage is
    not filled again before it is empty."""
    pretend = PretendCuda(monkeypatch)
    device = tiers.memories[DEVICE]
    device.device = torch.device("cuda:0")
    mover = StreamMover(device, tiers.memories[HOST], tiers.disk)
    assert pretend.pinned == {tiers.memories[HOST].bytes.data_ptr()}
    copier = ManualCopier(mover)
    truth = {page: tiers.fill(DEVICE, 0, page, page) for page in (1, 2, 3, 4)}

    def run(copy: Copy) -> None:
        pretend.log.clear()
        copier.run(copier.submit(copy))
        (report,) = copier.finished()
        assert report.error is None and pretend.issued == []
        assert pretend.log[0] == "wait" and pretend.log[-1] == "drain"

    run(down((1, 5), (2, 6), (4, 1)))
    assert pretend.log == ["wait", "copy", "copy", "drain"]
    assert [tiers.page(HOST, 0, page) for page in (5, 6, 1)] == [truth[1], truth[2], truth[4]]
    run(up((5, 9), (6, 10)))
    assert tiers.page(DEVICE, 0, 10) == truth[2]
    side = tiers.page(DEVICE, 1, 7)
    run(Copy(DEVICE, DISK, pages_of((1, 2, 3), (NO_PAGE, 7, 8)), keys=keys_of(1, 2, 3)))
    assert tiers.disk.get(keys_of(1)[0]) == [truth[1], None]
    assert tiers.disk.get(keys_of(2)[0]) == [truth[2], side]
    run(Copy(DISK, DEVICE, target_pages=pages_of((20, 21, 22), (30, 31, NO_PAGE)), keys=keys_of(3, 2, 1)))
    assert [tiers.page(DEVICE, 0, page) for page in (20, 21, 22)] == [truth[3], truth[2], truth[1]]
    assert tiers.page(DEVICE, 1, 31) == side
    # A copy that fails half way is over too when it is reported.
    monkeypatch.setattr(tiers.disk, "put", fails_at(2, tiers.disk.put))
    copier.submit(Copy(DEVICE, DISK, pages_of((1, 2), (NO_PAGE, NO_PAGE)), keys=keys_of(8, 9)))
    copier.run()
    (report,) = copier.finished()
    assert report.failed == (0, 1) and pretend.issued == []
    mover.close()
    mover.close()
    assert pretend.pinned == set()


def test_host_memory_that_cannot_be_pinned_is_refused(tiers, monkeypatch):
    PretendCuda(monkeypatch)
    device, host = tiers.memories[DEVICE], DeviceMemory(attrs.evolve(tiers.layout, slab_count=6000))
    device.device = torch.device("cuda:0")
    with pytest.raises(TierError) as raised:
        StreamMover(device, host)
    assert str(raised.value) == (
        f"cannot pin the {6000 * 192} bytes of the host tier: CUDA error: out of memory\n"
        "hint: make the host tier smaller, or raise the limit on locked memory"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_round_trip(tmp_path):
    layout = make_layout(24)
    device, host = DeviceMemory(layout, "cuda"), DeviceMemory(attrs.evolve(layout, slab_count=12))
    disk = DiskStore(tmp_path, format_digest(layout), [group.content_bytes for group in layout.groups], 1 << 20)
    copier = ThreadCopier(StreamMover(device, host, disk))
    for seed in range(20):
        content = torch.randint(0, 256, (4, 160), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        # Not waited for: the copy has to.
        device.pages(0)[1:5, :160] = content.cuda(non_blocking=True)
        copier.submit(down((1, 5), (2, 6), (4, 1)))
        assert settle(copier).popitem()[1].error is None
        assert torch.equal(host.pages(0)[[5, 6, 1], :160], content[[0, 1, 3]])
        names = keys_of(*((seed, block) for block in range(4)))
        copier.submit(Copy(DEVICE, DISK, pages_of((1, 2, 3, 4), (NO_PAGE,) * 4), keys=names))
        assert settle(copier).popitem()[1].error is None
        copier.submit(Copy(DISK, DEVICE, target_pages=pages_of((9, 8, 7, 6), (NO_PAGE,) * 4), keys=names))
        assert settle(copier).popitem()[1].error is None
        assert torch.equal(device.pages(0)[[9, 8, 7, 6], :160].cpu(), content)
    copier.close()
    disk.close()
