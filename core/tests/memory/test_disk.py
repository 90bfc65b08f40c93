"""The disk tier: a budget that holds, files that are not trusted, and a folder that one process owns."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

from kvist.errors import StateError, TierError
from kvist.memory.disk import Cleared, DiskStore

FORMAT = hashlib.sha256(b"format 1").digest()
OTHER_FORMAT = hashlib.sha256(b"format 2").digest()
#: Two groups. With both parts a file is 7168 bytes and a bit: two units of 4 KiB.
PARTS = (5120, 2048)
BLOCK = 8192


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def parts_of(name: object, groups: tuple[int, ...] = (0, 1)) -> list[bytes | None]:
    """Content that says what it is."""
    return [
        hashlib.shake_256(repr((name, group)).encode()).digest(size) if group in groups else None
        for group, size in enumerate(PARTS)
    ]


@pytest.fixture
def opened(tmp_path):
    """Opens stores in one folder, and closes them."""
    stores: list[DiskStore] = []

    def open_store(blocks: int = 3, digest: bytes = FORMAT, part_bytes: tuple[int, ...] = PARTS) -> DiskStore:
        stores.append(DiskStore(tmp_path / "cache", digest, part_bytes, blocks * BLOCK))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def put(store: DiskStore, *names: object) -> None:
    for name in names:
        assert store.put(key_of(name), parts_of(name))


def held(store: DiskStore, names: object) -> list[object]:
    """Which of these the store finds, byte for byte; the others it has to miss."""
    found = []
    for name in names:
        parts = store.get(key_of(name))
        if parts is not None:
            assert parts == parts_of(name)
            found.append(name)
    return found


def block_files(store: DiskStore) -> list[Path]:
    return sorted(store.folder.rglob("*.block"))


def file_of(store: DiskStore, name: object) -> Path:
    (path,) = store.folder.rglob(f"{key_of(name).hex()}*")
    return path


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_put_comes_back(opened):
    store = opened()
    assert store.block_bytes == BLOCK
    put(store, "a")
    assert store.contains(key_of("a")) and not store.contains(key_of("b"))
    assert store.get(key_of("a")) == parts_of("a") and store.get(key_of("b")) is None
    stats = store.stats()
    assert (stats.entries, stats.used_bytes, stats.budget_bytes) == (1, BLOCK, 3 * BLOCK)
    assert (stats.stored, stats.hits, stats.misses, stats.damaged) == (1, 1, 1, 0)
    assert store.check() == []


def test_parts_may_be_any_bytes(opened):
    store = opened()
    whole, half = parts_of("a")
    assert store.put(key_of("a"), [bytearray(whole), memoryview(b"xx" + half)[2:]])
    assert held(store, "a") == ["a"]


def test_groups_come_one_by_one_and_stay(opened):
    store = opened()
    assert store.groups(key_of("a")) == ()
    assert store.put(key_of("a"), parts_of("a", (1,)))
    assert store.groups(key_of("a")) == (1,)
    assert store.get(key_of("a")) == parts_of("a", (1,))
    assert store.stats().used_bytes == 4096
    assert store.put(key_of("a"), parts_of("a", (0,)))
    assert store.groups(key_of("a")) == (0, 1)
    assert held(store, "a") == ["a"]
    # Nothing new: nothing is written.
    before = file_of(store, "a").stat().st_mtime_ns
    assert store.put(key_of("a"), parts_of("a", (1,))) and store.put(key_of("a"), parts_of("a"))
    assert file_of(store, "a").stat().st_mtime_ns == before
    assert store.stats().stored == 2 and len(block_files(store)) == 1
    assert store.check() == []


def test_the_least_recently_used_goes_first(opened):
    store = opened(3)
    put(store, 1, 2, 3)
    assert store.get(key_of(1)) is not None
    put(store, 2)
    put(store, 4)
    assert held(store, (1, 2, 3, 4)) == [1, 2, 4]
    assert store.stats().evicted == 1


# Scenario 37: counters and the budget.


def test_a_removed_entry_gives_its_room_back(opened):
    store = opened(3)
    put(store, 1, 2, 3)
    assert [store.remove(key_of(name)) for name in (1, 2, 3, 3)] == [True, True, True, False]
    assert store.stats().used_bytes == 0 and block_files(store) == []
    put(store, 4)
    assert (store.stats().entries, store.stats().used_bytes, store.stats().evicted) == (1, BLOCK, 0)
    for name in range(10, 20):
        put(store, name)
        assert len(block_files(store)) <= 3
        assert store.check() == []


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class FullFile:
    """A file on a disk that takes ``room`` bytes more."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("xb"), room

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> None:
        self.file.write(data[: self.room])
        self.file.flush()
        self.room -= len(data)
        if self.room < 0:
            fails()


@pytest.mark.parametrize("where", ["mkdir", "open", "header", "half a part", "second part", "replace"])
def test_a_failing_write_leaves_nothing(opened, monkeypatch, caplog, where):
    store = opened(3)
    put(store, 1, 2, 3)
    before, files = store.stats(), block_files(store)
    with monkeypatch.context() as broken:
        if where in ("mkdir", "open"):
            broken.setattr(Path, where, fails)
        elif where == "replace":
            broken.setattr(os, "replace", fails)
        else:
            room = {"header": 10, "half a part": 3000, "second part": 6000}[where]
            really_open = Path.open
            broken.setattr(Path, "open", lambda path, _: FullFile(FullPath(path, really_open), room))
        for name in range(4, 9):
            assert not store.put(key_of(name), parts_of(name))
            assert not store.contains(key_of(name))
    after = store.stats()
    assert after.write_errors == 5
    assert (after.entries, after.used_bytes, after.stored, after.evicted) == (3, 3 * BLOCK, 3, 0)
    assert before.used_bytes == after.used_bytes and block_files(store) == files
    assert [path for path in store.folder.rglob("*") if path.suffix == ".part"] == []
    assert messages(caplog) == [
        f"disk tier {store.folder}: blocks are not kept until writing works again: [Errno 28] No space left on device"
    ]
    # It works again, and the next failure is news.
    put(store, 9)
    assert store.check() == [] and held(store, (9,)) == [9]
    monkeypatch.setattr(os, "replace", fails)
    assert not store.put(key_of(10), parts_of(10))
    assert len(messages(caplog)) == 2


class FullPath:
    """Lets :class:`FullFile` open the file although ``Path.open`` is replaced."""

    def __init__(self, path: Path, really_open: object) -> None:
        self.open = lambda mode: really_open(path, mode)  # type: ignore[operator]


def test_a_failing_merge_keeps_the_parts_there_were(opened, monkeypatch):
    store = opened()
    assert store.put(key_of("a"), parts_of("a", (1,)))
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fails)
        assert not store.put(key_of("a"), parts_of("a", (0,)))
    assert store.get(key_of("a")) == parts_of("a", (1,))
    assert store.check() == []


def test_files_that_cannot_be_removed_stay_counted(opened, monkeypatch, caplog):
    store = opened(3)
    put(store, 1, 2)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", fails)
        assert store.remove(key_of(1))
        assert not store.contains(key_of(1)) and held(store, (1, 2)) == [2]
        assert (store.stats().entries, store.stats().used_bytes) == (1, 2 * BLOCK)
        assert store.stats().undeletable_bytes == BLOCK
        assert store.clear() == Cleared(0, 0, 2, 2 * BLOCK)
        assert messages(caplog) == [
            f"disk tier {store.folder}: 2 files ({2 * BLOCK} bytes) could not be removed; "
            "they are found again when it is next opened"
        ]
        assert held(store, (1, 2)) == [] and store.check() == []
        # They take room until then. A new file of the same name takes the place of one.
        put(store, 1)
        assert store.stats().used_bytes == 2 * BLOCK and store.check() == []
        put(store, 3)
        for name in range(4, 9):
            assert not store.put(key_of(name), parts_of(name))
        assert messages(caplog)[1:] == [
            f"disk tier {store.folder}: blocks are not kept until writing works again: "
            "files that cannot be removed take the budget"
        ]
        assert held(store, (1, 3)) == [1, 3] and len(block_files(store)) == 3 and store.check() == []
    put(store, 4)
    assert held(store, (1, 3, 4)) == [1, 3, 4] and len(block_files(store)) == 3 and store.check() == []


def test_an_entry_that_cannot_leave_costs_the_others_nothing(opened, monkeypatch):
    store = opened(3)
    put(store, 1, 2, 3)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", fails)
        put(store, 4)
        for name in range(5, 9):
            assert not store.put(key_of(name), parts_of(name))
        assert held(store, range(9)) == [2, 3, 4]
        # One too many, for as long as removing fails.
        assert store.check() == [f"{4 * BLOCK} bytes are used of a budget of {3 * BLOCK}"]
    put(store, 5)
    assert held(store, range(9)) == [3, 4, 5] and store.check() == []


def test_counters_never_drift(opened):
    """Random traffic with damage, failures and restarts beside a model of it."""
    rng = random.Random(1)
    store, budget = opened(5), 5 * BLOCK
    model: OrderedDict[int, set[int]] = OrderedDict()
    size = {frozenset({0}): BLOCK, frozenset({1}): 4096, frozenset({0, 1}): BLOCK}
    for step in range(600):
        name, action = rng.randrange(12), rng.random()
        if action < 0.45:
            groups = rng.choice([(0,), (1,), (0, 1)])
            assert store.put(key_of(name), parts_of(name, groups))
            model[name] = model.get(name, set()) | set(groups)
            model.move_to_end(name)
            while sum(size[frozenset(kept)] for kept in model.values()) > budget:
                model.popitem(last=False)
        elif action < 0.75:
            expected = parts_of(name, tuple(model[name])) if name in model else None
            assert store.get(key_of(name)) == expected
            if name in model:
                model.move_to_end(name)
        elif action < 0.85:
            assert store.remove(key_of(name)) == (model.pop(name, None) is not None)
        elif action < 0.95 and name in model:
            file = file_of(store, name)
            rng.choice([file.unlink, lambda file=file: os.truncate(file, rng.randrange(file.stat().st_size))])()
            del model[name]
            assert store.get(key_of(name)) is None
        elif action > 0.99:
            count = len(model)
            assert store.clear().entries == count
            model.clear()
        assert store.check() == [], step
        assert store.stats().used_bytes == sum(size[frozenset(kept)] for kept in model.values())
        assert {name for name in range(12) if store.contains(key_of(name))} == set(model)


# Scenario 38: the disk is not trusted.


def test_a_file_deleted_by_somebody_is_a_miss(opened, caplog):
    store = opened()
    put(store, 1, 2)
    file = file_of(store, 1)
    file.unlink()
    assert held(store, (1, 2)) == [2]
    assert not store.contains(key_of(1))
    stats = store.stats()
    assert (stats.entries, stats.used_bytes, stats.damaged, stats.misses) == (1, BLOCK, 1, 1)
    assert messages(caplog) == [
        f"disk tier {store.folder}: dropped {file.name}: [Errno 2] No such file or directory: '{file}' "
        "(more are only counted)"
    ]
    put(store, 1)
    assert held(store, (1, 2)) == [1, 2]


LENGTH = 8 + 4 + 4 + 32 + 32 + 2 * 8 + 4 + sum(PARTS)
#: Where a file of two groups has what; the checksum ends before the first part.
PLACES = {"magic": 0, "version": 8, "group count": 12, "format": 16, "key": 48, "length": 80, "checksum": 96}
PLACES |= {"first part": 100, "second part": 100 + PARTS[0], "last byte": LENGTH - 1}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_anywhere_is_a_miss(opened, place, bit):
    store = opened()
    put(store, 1)
    data = bytearray(file_of(store, 1).read_bytes())
    assert len(data) == LENGTH
    data[PLACES[place]] ^= 1 << bit
    file_of(store, 1).write_bytes(data)
    assert held(store, (1,)) == [] and not store.contains(key_of(1))
    assert block_files(store) == [] and store.stats().damaged == 1 and store.check() == []


@pytest.mark.parametrize("length", [0, 1, 50, 99, 100, 3000, LENGTH - 1, LENGTH + 1])
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_another_length_is_a_miss(opened, caplog, length, restart):
    store = opened()
    put(store, 1, 2)
    file = file_of(store, 1)
    with file.open("ab") as longer:
        longer.write(b"x")
    os.truncate(file, length)
    if restart:
        store.close()
        store = opened()
    assert held(store, (1, 2)) == [2]
    assert not file.exists() and store.stats().damaged == 1 and store.check() == []
    assert messages(caplog)[0].startswith(f"disk tier {store.folder}: dropped {file.name}: the file has {length} bytes")


def test_a_file_with_another_block_s_name_is_a_miss(opened):
    store = opened()
    put(store, 1, 2)
    one, two = file_of(store, 1), file_of(store, 2)
    one.write_bytes(two.read_bytes())
    assert held(store, (1, 2)) == [2]


def test_a_file_that_cannot_be_read_is_a_miss(opened, monkeypatch):
    store = opened()
    put(store, 1)

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        assert store.get(key_of(1)) is None
    assert store.stats().damaged == 1 and store.check() == []


def test_a_damaged_entry_does_not_spoil_new_parts(opened):
    store = opened()
    assert store.put(key_of("a"), parts_of("a", (1,)))
    os.truncate(file_of(store, "a"), 1000)
    assert store.put(key_of("a"), parts_of("a", (0,)))
    assert store.groups(key_of("a")) == (0,)
    assert store.get(key_of("a")) == parts_of("a", (0,))
    assert store.check() == []


def test_a_restart_finds_everything_and_rewrites_nothing(opened):
    store = opened(4)
    put(store, 1, 2, 3)
    assert store.put(key_of(4), parts_of(4, (1,)))
    before = {path: path.stat().st_mtime_ns for path in block_files(store)}
    used = store.stats().used_bytes
    store.close()
    store = opened(4)
    assert store.stats().used_bytes == used and store.groups(key_of(4)) == (1,)
    assert held(store, (1, 2, 3)) == [1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in block_files(store)} == before
    assert store.stats().damaged == 0 and store.check() == []


def test_a_restart_with_a_smaller_budget_keeps_the_latest(opened):
    store = opened(5)
    put(store, *range(5))
    for name in range(5):
        os.utime(file_of(store, name), (100 + name, 100 + name))
    store.close()
    store = opened(2)
    assert held(store, range(5)) == [3, 4]
    assert store.check() == []


def test_another_format_loads_nothing_and_loses_its_room_first(opened, caplog):
    store = opened(3)
    put(store, 1, 2)
    store.close()
    store = opened(3, OTHER_FORMAT)
    assert held(store, (1, 2)) == []
    assert messages(caplog) == [
        f"disk tier {store.folder}: ignoring 2 entries ({2 * BLOCK} bytes) of 1 other format(s): "
        "another model, layout or version; they go first when room is needed"
    ]
    stats = store.stats()
    assert (stats.entries, stats.used_bytes, stats.foreign_entries, stats.foreign_bytes) == (0, 0, 2, 2 * BLOCK)
    put(store, 3, 4)
    assert held(store, (3, 4)) == [3, 4] and store.stats().foreign_entries == 1
    put(store, 5)
    stats = store.stats()
    assert (stats.entries, stats.foreign_entries, stats.evicted, stats.foreign_evicted) == (3, 0, 0, 2)
    assert len(list(store.folder.iterdir())) == 2, "the folder of the other format went with its last file"
    assert store.check() == []


def test_the_first_format_is_found_again(opened):
    store = opened(3)
    put(store, 1)
    store.close()
    store = opened(3, OTHER_FORMAT)
    put(store, 1)
    store.close()
    store = opened(3)
    assert held(store, (1,)) == [1]


def test_a_folder_of_another_version_is_foreign(opened, tmp_path):
    store = opened(3)
    put(store, 1)
    store.close()
    home = tmp_path / "cache" / f"v1-{FORMAT.hex()}"
    home.rename(home.with_name(f"v2-{FORMAT.hex()}"))
    store = opened(3)
    assert held(store, (1,)) == [] and store.stats().foreign_entries == 1


def test_a_file_of_a_group_that_does_not_exist_is_dropped(opened):
    store = opened(3)
    put(store, 1)
    file = file_of(store, 1)
    file.rename(file.with_name(file.name.replace("-3.", "-7.")))
    store.close()
    store = opened(3)
    assert block_files(store) == [] and store.stats().damaged == 1 and held(store, (1,)) == []


def test_a_folder_that_somebody_empties_goes_on(opened):
    store = opened(3)
    put(store, 1, 2)
    shutil.rmtree(store.folder)
    assert held(store, (1, 2)) == [] and store.stats().used_bytes == 0
    put(store, 3)
    assert held(store, (3,)) == [3] and store.check() == []


def test_what_others_keep_in_the_folder_is_left_alone(opened, tmp_path):
    notes = tmp_path / "cache" / "notes.txt"
    inside = tmp_path / "cache" / f"v1-{FORMAT.hex()}" / "00" / "mine.part"
    inside.parent.mkdir(parents=True)
    for path in (notes, inside):
        path.write_text("mine")
    store = opened(1)
    put(store, 1, 2)
    store.clear()
    store.close()
    opened(1)
    assert notes.read_text() == inside.read_text() == "mine"


WRITER = """
import sys, time
from kvist.memory.blockfile import BlockFiles
from kvist.memory.disk import DiskStore
store = DiskStore(sys.argv[1], bytes.fromhex(sys.argv[2]), (5120, 2048), 3 * 8192)
store.put(bytes(32), [bytes(5120), bytes(2048)])
store._files.write(bytes(31) + b"x", [bytes(5120), None])
print("ready", flush=True)
time.sleep(60)
"""


def test_one_process_at_a_time_and_a_killed_writer(opened, tmp_path):
    folder = tmp_path / "cache"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), FORMAT.hex()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with pytest.raises(TierError) as raised:
            opened()
        assert str(raised.value) == (
            f"disk tier {folder}: another process uses the folder, or this one opened it twice\n"
            "hint: give every process a folder of its own, or close the other store first"
        )
        # Refused before anything was touched: the file the other one is writing is still there.
        assert len(list(folder.rglob("*.part"))) == 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    store = opened()
    assert list(folder.rglob("*.part")) == []
    assert store.contains(bytes(32)) and not store.contains(bytes(31) + b"x")
    assert store.check() == []


def test_one_store_at_a_time_in_a_process(opened):
    store = opened()
    with pytest.raises(TierError, match="opened it twice"):
        opened(3, OTHER_FORMAT)
    put(store, 1)
    store.close()
    store.close()
    assert held(opened(), (1,)) == [1]


def test_two_files_of_one_key_after_a_crash(opened):
    store = opened()
    assert store.put(key_of("a"), parts_of("a", (1,)))
    poorer = file_of(store, "a")
    data = poorer.read_bytes()
    put(store, "a")
    richer = file_of(store, "a")
    store.close()
    # As if the process had ended between the rename and the removal.
    poorer.write_bytes(data)
    for path in (poorer, richer):
        os.utime(path, (100, 100))
    store = opened()
    assert store.groups(key_of("a")) == (0, 1) and held(store, "a") == ["a"]
    assert block_files(store) == [richer] and store.check() == []


# Scenario 41: clearing.


def test_clear_removes_everything_and_says_how_much(opened):
    store = opened(3)
    put(store, 1, 2)
    assert store.put(key_of(3), parts_of(3, (1,)))
    assert store.clear() == Cleared(3, 2 * BLOCK + 4096, 0, 0)
    assert block_files(store) == [] and held(store, (1, 2, 3)) == []
    assert store.clear() == Cleared(0, 0, 0, 0)
    store.close()
    store = opened(3)
    assert held(store, (1, 2, 3)) == []
    put(store, 1)
    assert held(store, (1,)) == [1]


@pytest.mark.parametrize("call", ["clear", "close"])
def test_a_block_being_written_does_not_survive_a_clear(opened, monkeypatch, call):
    """The writer is stopped after the whole file is written and before it has its name."""
    store = opened(3)
    written, go_on = threading.Event(), threading.Event()
    really = store._files.write

    def slowly(*arguments):
        temporary = really(*arguments)
        written.set()
        assert go_on.wait(10)
        return temporary

    monkeypatch.setattr(store._files, "write", slowly)
    answers: list[bool] = []
    writer = threading.Thread(target=lambda: answers.append(store.put(key_of(1), parts_of(1))))
    writer.start()
    assert written.wait(10)
    # The index answers, and others work, while somebody writes.
    assert not store.contains(key_of(1))
    getattr(store, call)()
    go_on.set()
    writer.join(10)
    assert answers == [False]
    assert list(store.folder.rglob("*.block*")) == []


def test_the_entry_that_leaves_while_it_is_read_is_no_damage(opened, monkeypatch):
    store = opened(3)
    put(store, 1)
    really = store._files.read

    def slowly(key, groups):
        monkeypatch.setattr(store._files, "read", really)
        store.remove(key)
        return really(key, groups)

    monkeypatch.setattr(store._files, "read", slowly)
    assert store.get(key_of(1)) is None
    assert (store.stats().damaged, store.stats().misses) == (0, 1)


def test_threads_share_a_store(opened):
    store = opened(4)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                name = rng.randrange(8)
                if rng.random() < 0.5:
                    store.put(key_of(name), parts_of(name, rng.choice([(0,), (1,), (0, 1)])))
                elif rng.random() < 0.2:
                    store.remove(key_of(name))
                else:
                    for part, true in zip(store.get(key_of(name)) or (), parts_of(name), strict=False):
                        assert part is None or part == true
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.check() == [] and store.stats().damaged == 0


def test_a_budget_without_room_for_a_block_is_refused(tmp_path):
    with pytest.raises(TierError) as raised:
        DiskStore(tmp_path, FORMAT, PARTS, BLOCK - 1)
    assert str(raised.value) == (
        f"disk tier {tmp_path}: a budget of {BLOCK - 1} bytes holds no block: one takes {BLOCK} bytes\n"
        "hint: raise the budget or leave the disk tier out"
    )
    DiskStore(tmp_path, FORMAT, PARTS, BLOCK).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(TierError) as raised:
        DiskStore(file / "cache", FORMAT, PARTS, BLOCK)
    assert str(raised.value) == (
        f"disk tier {file / 'cache'}: cannot use the folder: [Errno 20] Not a directory: "
        f"'{file / 'cache'}'\n"
        "hint: name a folder to read and write"
    )


def test_a_failing_start_gives_the_lock_back(opened, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(os, "scandir", fails)
        with pytest.raises(TierError, match="cannot use the folder"):
            opened()
    opened()


def test_a_closed_store_says_so(opened):
    store = opened()
    put(store, 1)
    store.close()
    for call in (
        lambda: store.get(key_of(1)),
        lambda: store.put(key_of(2), parts_of(2)),
        lambda: store.remove(key_of(1)),
        store.clear,
    ):
        with pytest.raises(StateError) as raised:
            call()
        assert str(raised.value) == f"disk tier {store.folder} is closed\nhint: open a new DiskStore"
