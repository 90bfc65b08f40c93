"""The disk tier: whole blocks by content key, within a budget. No torch.

One file per block. A block of a real model is hundreds of KiB to several MiB, so opening a file costs little beside
reading it; removing one gives its room back at once, a damaged one costs one block, and a rename makes one visible as a
whole. Packs would need compaction and a map of free space for the same.

Content of another format (model, layout, version) lies in another folder, is never opened, and goes first when room is
needed: the budget holds for everything in the folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import attrs

from kvist.errors import StateError, TierError
from kvist.memory.blockfile import (
    BlockFiles,
    BytesLike,
    DamagedError,
    discard,
    hold,
    mask,
    stored_blocks,
    taken_bytes,
)
from kvist.memory.diskstats import Change, Cleared, DiskStats, Reason

__all__ = ["Change", "Cleared", "DiskStats", "DiskStore"]

_log = logging.getLogger(__name__)


@attrs.frozen
class _Entry:
    groups: int
    size: int


class DiskStore:
    """Blocks by content key; the least recently used leave first, after a restart the least recently written.

    folder: where to keep them; one process at a time. What Kvist did not write there is left alone.
    format_digest: 32 bytes from :func:`kvist.keys.format_digest`.
    part_bytes: for each group, bytes of its part of a block: ``Group.content_bytes``.
    budget_bytes: what all blocks in the folder may take, in file units of 4 KiB. The file being written and the
        directories come on top.

    Opening raises TierError when the folder cannot be used or the budget holds no block. After that nothing that
    happens to a file raises: it is a miss or a block not kept, counted, and logged when it begins.

    Any thread may call any method. The index is in memory; ``contains`` and ``groups`` read nothing else and wait for
    nobody, and no lock is held while content is read or written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], format_digest: bytes, part_bytes: Sequence[int], budget_bytes: int
    ) -> None:
        self.folder = Path(folder)
        self.format_digest = format_digest
        self._files = BlockFiles(self.folder, format_digest, part_bytes)
        self._budget = budget_bytes
        self._index: OrderedDict[bytes, _Entry] = OrderedDict()
        # Files of other formats, oldest first.
        self._foreign: OrderedDict[Path, int] = OrderedDict()
        self._undeletable: dict[Path, int] = {}
        self._used = self._foreign_bytes = 0
        self._hits = self._misses = self._stored = self._evicted = self._foreign_evicted = 0
        self._damaged = self._write_errors = 0
        self._writing_fails = False
        self._lock = threading.Lock()
        # Raised by clear and close: a block that was being written then is not kept.
        self._generation = 0
        self._closed = False
        #: While somebody follows what can be found.
        self._changes: list[Change] | None = None
        if budget_bytes < self.block_bytes:
            raise TierError(
                f"disk tier {self.folder}: a budget of {budget_bytes} bytes holds no block: one takes "
                f"{self.block_bytes} bytes",
                hint="raise the budget or leave the disk tier out",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = hold(self.folder)
            try:
                self._files.home.mkdir(exist_ok=True)
                self._scan()
            except OSError:
                os.close(self._lock_file)
                raise
        except OSError as cause:
            raise TierError(
                f"disk tier {self.folder}: cannot use the folder: {cause}", hint="name a folder to read and write"
            ) from cause

    @property
    def block_bytes(self) -> int:
        """What a block with the parts of all groups takes from the budget."""
        return taken_bytes(self._files.file_bytes(self._files.all_groups))

    def contains(self, key: bytes) -> bool:
        """Is there an entry? ``get`` may still find it damaged."""
        return key in self._index

    def groups(self, key: bytes) -> tuple[int, ...]:
        """Groups whose part is there, ascending; empty without an entry."""
        entry = self._index.get(key)
        if entry is None:
            return ()
        return tuple(group for group in range(entry.groups.bit_length()) if entry.groups >> group & 1)

    def masks(self, keys: Sequence[bytes]) -> list[int]:
        """For each key its groups as bits, 0 without an entry. Counts as a use of them, the first the latest: a block
        is of no use without those before it."""
        found = []
        with self._lock:
            for key in reversed(keys):
                entry = self._index.get(key)
                found.append(0 if entry is None else entry.groups)
                if entry is not None:
                    self._index.move_to_end(key)
        return found[::-1]

    def follow(self, on: bool) -> None:
        """Keep a list of changes for :meth:`changes` from now on, or no more. Without it none costs anything."""
        with self._lock:
            self._changes = ([] if self._changes is None else self._changes) if on else None

    def changes(self) -> list[Change]:
        """Changes of what can be found since the last call, oldest first."""
        with self._lock:
            return self._take_changes()

    def entries(self) -> tuple[list[tuple[bytes, int]], list[Change]]:
        """Every key with its groups as bits, and the changes that led to that since the last call."""
        with self._lock:
            return [(key, entry.groups) for key, entry in self._index.items()], self._take_changes()

    @property
    def generation(self) -> int:
        """Changes with every :meth:`clear`."""
        return self._generation

    def put(self, key: bytes, parts: Sequence[BytesLike | None], generation: int | None = None) -> bool:
        """Keep a block: for each group its content or None, at least one. Parts of other groups kept before stay.

        generation: the store's when the content was known to be good; after a later ``clear`` it is not kept.
        True when the entry holds these parts; False when they could not be kept, and then nothing has changed.
        """
        given = mask(parts)
        assert len(key) == 32 and given
        with self._lock:
            self._require_open()
            if generation is None:
                generation = self._generation
            known = self._index.get(key)
            if known is not None and not given & ~known.groups:
                self._index.move_to_end(key)
                return True
            self._remove_again()
            full = self._undeletable and self._used + self._foreign_bytes + self.block_bytes > self._budget
        if full:
            self._count_write_error(OSError("files that cannot be removed take the budget"))
            return False
        before = None if known is None else self._intact(key, known)
        if before is not None:
            parts = [old if new is None else new for old, new in zip(before, parts, strict=True)]
        groups = mask(parts)
        try:
            temporary = self._files.write(key, parts)
            try:
                with self._lock:
                    if generation == self._generation:
                        os.replace(temporary, self._files.path(key, groups))
                        self._writing_fails = False
                        self._enter(key, groups)
                        return True
            except OSError:
                discard(temporary)
                raise
            discard(temporary)
        except OSError as cause:
            self._count_write_error(cause)
        return False

    def get(self, key: bytes) -> list[memoryview | None] | None:
        """For each group its content or None; None when there is no intact entry. The bytes are the caller's."""
        with self._lock:
            self._require_open()
            entry = self._index.get(key)
            if entry is not None:
                self._index.move_to_end(key)
        parts = None if entry is None else self._intact(key, entry)
        with self._lock:
            if parts is None:
                self._misses += 1
            else:
                self._hits += 1
        return parts

    def remove(self, key: bytes) -> bool:
        """Forget a block whose content is no good and remove its file. False when there was none."""
        with self._lock:
            self._require_open()
            return self._drop(key, "failed")

    def clear(self) -> Cleared:
        """Forget every block of this format, also one being written, and remove the files; returns when it is done."""
        with self._lock:
            self._require_open()
            self._generation += 1
            count, size = len(self._index) + len(self._undeletable), self._used
            self._remove_again()
            for key in list(self._index):
                self._drop(key, "cleared")
            left = len(self._undeletable)
            cleared = Cleared(count - left, size - self._used, left, self._used)
        if left:
            _log.warning(
                "disk tier %s: %d files (%d bytes) could not be removed; they are found again when it is next opened",
                self.folder,
                cleared.left_entries,
                cleared.left_bytes,
            )
        return cleared

    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(
                entries=len(self._index),
                used_bytes=self._used,
                undeletable_bytes=sum(self._undeletable.values()),
                budget_bytes=self._budget,
                foreign_entries=len(self._foreign),
                foreign_bytes=self._foreign_bytes,
                hits=self._hits,
                misses=self._misses,
                stored=self._stored,
                evicted=self._evicted,
                foreign_evicted=self._foreign_evicted,
                damaged=self._damaged,
                write_errors=self._write_errors,
                pages=tuple(
                    sum(entry.groups >> group & 1 for entry in self._index.values())
                    for group in range(self._files.all_groups.bit_length())
                ),
            )

    def check(self) -> list[str]:
        """Where counters, index and the files that are there disagree, in words; empty when all is well."""
        with self._lock:
            total = self._used + self._foreign_bytes
            known = {self._files.path(key, entry.groups): entry.size for key, entry in self._index.items()}
            known.update(self._undeletable)
            known.update(self._foreign)
            there = {path: taken_bytes(status.st_size) for path, _, _, status in stored_blocks(self.folder)}
        faults = []
        if total != sum(there.values()):
            faults.append(f"{total} bytes are counted, the files take {sum(there.values())}")
        if total > self._budget:
            faults.append(f"{total} bytes are used of a budget of {self._budget}")
        faults += [f"{path.name}: known, but not there" for path in known if path not in there]
        faults += [f"{path.name}: there, but not known" for path in there if path not in known]
        return faults

    def close(self) -> None:
        """Leave the folder, with its files, to others. Every other call then raises StateError; again is a no-op."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._generation += 1
                os.close(self._lock_file)

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"disk tier {self.folder} is closed", hint="open a new DiskStore")

    # From here on: only with the lock held, unless said otherwise.

    def _intact(self, key: bytes, entry: _Entry) -> list[memoryview | None] | None:
        """The parts of an entry, or None, and then it is gone. Without the lock."""
        try:
            return self._files.read(key, entry.groups)
        except (OSError, DamagedError) as cause:
            with self._lock:
                # Otherwise it was removed or replaced meanwhile, and nothing is wrong.
                if self._index.get(key) is entry:
                    self._drop(key, "failed")
                    self._count_damage(self._files.path(key, entry.groups), cause)
        return None

    def _count_damage(self, path: Path, cause: Exception) -> None:
        self._damaged += 1
        if self._damaged == 1:
            _log.warning("disk tier %s: dropped %s: %s (more are only counted)", self.folder, path.name, cause)

    def _count_write_error(self, cause: OSError) -> None:
        """Without the lock."""
        with self._lock:
            self._write_errors += 1
            first, self._writing_fails = not self._writing_fails, True
        if first:
            _log.warning("disk tier %s: blocks are not kept until writing works again: %s", self.folder, cause)

    def _enter(self, key: bytes, groups: int) -> None:
        """Count a file that has just got its name."""
        # Replaced by the new file, if it was still there.
        self._used -= self._undeletable.pop(self._files.path(key, groups), 0)
        known = self._index.pop(key, None)
        before = 0 if known is None else known.groups
        if known is not None and before != groups:
            self._unlink(self._files.path(key, before), known.size)
        elif known is not None:
            self._used -= known.size
        self._note(key, groups & ~before, None)
        self._note(key, before & ~groups, "failed")
        entry = _Entry(groups, taken_bytes(self._files.file_bytes(groups)))
        self._index[key] = entry
        self._used += entry.size
        self._stored += 1
        self._make_room()

    def _make_room(self) -> None:
        while self._foreign and self._used + self._foreign_bytes > self._budget:
            path, size = self._foreign.popitem(last=False)
            self._foreign_bytes -= size
            self._used += size
            self._unlink(path, size)
            self._foreign_evicted += 1
            with contextlib.suppress(OSError):  # not empty yet
                path.parent.rmdir()
                path.parent.parent.rmdir()
        stuck = len(self._undeletable)
        while self._index and self._used > self._budget and len(self._undeletable) == stuck:
            self._drop(next(iter(self._index)), "evicted")
            self._evicted += 1

    def _drop(self, key: bytes, reason: Reason) -> bool:
        entry = self._index.pop(key, None)
        if entry is None:
            return False
        self._note(key, entry.groups, reason)
        self._unlink(self._files.path(key, entry.groups), entry.size)
        return True

    def _note(self, key: bytes, groups: int, reason: Reason | None) -> None:
        if self._changes is not None and groups:
            self._changes.append(Change(key, groups, reason))

    def _take_changes(self) -> list[Change]:
        found = self._changes or []
        if found:
            self._changes = []
        return found

    def _unlink(self, path: Path, size: int) -> None:
        """Remove a file counted as used. One that cannot be removed stays counted: it does take room."""
        try:
            path.unlink(missing_ok=True)
            self._used -= size
        except OSError:
            self._undeletable[path] = size

    def _remove_again(self) -> None:
        for path in list(self._undeletable):
            self._unlink(path, self._undeletable.pop(path))

    def _scan(self) -> None:
        """Build the index from names and sizes: no content is read, no file written. Nobody else is here yet."""
        own, foreign = [], []
        for path, key, groups, status in stored_blocks(self.folder, discard_temporary=True):
            size = taken_bytes(status.st_size)
            if path.parent.parent != self._files.home:
                foreign.append((status.st_mtime_ns, path, size))
            elif groups > self._files.all_groups or status.st_size != self._files.file_bytes(groups):
                self._used += size
                self._unlink(path, size)
                self._count_damage(path, DamagedError(f"the file has {status.st_size} bytes"))
            else:
                own.append((status.st_mtime_ns, key, _Entry(groups, size)))
        for _, path, size in sorted(foreign):
            self._foreign[path] = size
            self._foreign_bytes += size
        for _, key, entry in sorted(own, key=lambda found: (found[0], found[2].groups)):
            # Two files for one key: the process ended after the fuller got its name and before the other was removed.
            self._drop(key, "failed")
            self._index[key] = entry
            self._used += entry.size
        if foreign:
            _log.warning(
                "disk tier %s: ignoring %d entries (%d bytes) of %d other format(s): another model, layout or version; "
                "they go first when room is needed",
                self.folder,
                len(foreign),
                self._foreign_bytes,
                len({path.parent.parent for path in self._foreign}),
            )
        self._make_room()
