"""One block as one file: its name, its header, its checksum. No torch.

::

    folder/lock                                              held by the one process that uses the folder
    folder/v1-<format digest>/<2 hex>/<key>-<groups>.block   groups: hexadecimal mask of the groups the file holds

A file is a header, a CRC-32 of everything else, and the content of each group. The header follows from format, key and
groups, so it is compared as a whole. The checksum is for accidents, and fast enough for a fast disk. A file gets its
name when it is complete; nothing is flushed to the disk on purpose, as what a crash leaves half written fails the
checksum.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvist.errors import TierError

BytesLike = bytes | bytearray | memoryview

#: Part of the folder's name and of every header: files of another version are another format.
_VERSION = 1
_MAGIC = b"kvistblk"
_CHECKSUM_BYTES = 4
#: Files count in whole units of this: what file systems give out, and the same before and after a restart.
_FILE_UNIT = 4096
_FORMAT_NAME = re.compile(r"v\d+-[0-9a-f]{64}")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_BLOCK_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]+)\.block")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]+\.block\.\d+\.part")


class DamagedError(Exception):
    """A file is not what its name says."""


class BlockFiles:
    """Files of one format in a folder.

    part_bytes: bytes of each group's part of a block. A mask of groups has bit ``g`` set for group ``g``.
    """

    def __init__(self, folder: Path, format_digest: bytes, part_bytes: Sequence[int]) -> None:
        assert len(format_digest) == 32 and part_bytes and min(part_bytes) > 0
        self.home = folder / f"v{_VERSION}-{format_digest.hex()}"
        self.all_groups = (1 << len(part_bytes)) - 1
        self._digest = format_digest
        self._part_bytes = tuple(part_bytes)
        self._numbers = itertools.count()

    def path(self, key: bytes, groups: int) -> Path:
        name = key.hex()
        return self.home / name[:2] / f"{name}-{groups:x}.block"

    def file_bytes(self, groups: int) -> int:
        """The length of an intact file."""
        return len(self._header(bytes(32), groups)) + _CHECKSUM_BYTES + sum(self._sizes(groups))

    def write(self, key: bytes, parts: Sequence[BytesLike | None]) -> Path:
        """A complete file under a temporary name, for the caller to rename or remove. OSError leaves nothing behind."""
        groups = mask(parts)
        views = [memoryview(part).cast("B") for part in parts if part is not None]
        lengths, expected = [len(view) for view in views], [size for size in self._sizes(groups) if size]
        assert lengths == expected, f"parts of {lengths} bytes, not {expected}"
        header = self._header(key, groups)
        checksum = zlib.crc32(header)
        for view in views:
            checksum = zlib.crc32(view, checksum)
        path = self.path(key, groups)
        temporary = path.with_name(f"{path.name}.{next(self._numbers)}.part")
        # Every time: whoever empties the folder by hand while it is used must not end the tier.
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(header + checksum.to_bytes(_CHECKSUM_BYTES, "little"))
                for view in views:
                    file.write(view)
        except OSError:
            discard(temporary)
            raise
        return temporary

    def read(self, key: bytes, groups: int) -> list[memoryview | None]:
        """For each group its content or None. Raises OSError or DamagedError."""
        data = self.path(key, groups).read_bytes()
        if len(data) != self.file_bytes(groups):
            raise DamagedError(f"the file has {len(data)} bytes, not {self.file_bytes(groups)}")
        header = self._header(key, groups)
        if not data.startswith(header):
            raise DamagedError("its header is not the one of this block")
        view = memoryview(data)
        begin = len(header) + _CHECKSUM_BYTES
        if zlib.crc32(view[begin:], zlib.crc32(header)) != int.from_bytes(view[len(header) : begin], "little"):
            raise DamagedError("its checksum does not match")
        parts: list[memoryview | None] = []
        for size in self._sizes(groups):
            parts.append(view[begin : begin + size] if size else None)
            begin += size
        return parts

    def _sizes(self, groups: int) -> list[int]:
        """Bytes of each group's part, 0 for those that are not among ``groups``."""
        return [size if groups >> group & 1 else 0 for group, size in enumerate(self._part_bytes)]

    def _header(self, key: bytes, groups: int) -> bytes:
        lengths = self._sizes(groups)
        return struct.pack(f"<8sII32s32s{len(lengths)}Q", _MAGIC, _VERSION, len(lengths), self._digest, key, *lengths)


def mask(parts: Sequence[object | None]) -> int:
    """The groups that have a part, as bits."""
    return sum(1 << group for group, part in enumerate(parts) if part is not None)


def taken_bytes(length: int) -> int:
    """What a file of ``length`` bytes takes from a budget."""
    return -(-length // _FILE_UNIT) * _FILE_UNIT


def discard(path: Path) -> None:
    """Remove a temporary file; what cannot be removed goes when the folder is opened again."""
    with contextlib.suppress(OSError):
        path.unlink()


def stored_blocks(
    folder: Path, *, discard_temporary: bool = False
) -> Iterator[tuple[Path, bytes, int, os.stat_result]]:
    """Path, key, groups and status of every block of every format. What has another name is nobody's here."""
    for home in _children(folder, _FORMAT_NAME):
        for shard in _children(home, _SHARD_NAME):
            with os.scandir(shard) as files:
                for file in files:
                    name = _BLOCK_NAME.fullmatch(file.name)
                    if name:
                        status = file.stat(follow_symlinks=False)
                        yield Path(file.path), bytes.fromhex(name[1]), int(name[2], 16), status
                    elif discard_temporary and _TEMPORARY_NAME.fullmatch(file.name):
                        discard(Path(file.path))


def _children(folder: Path, name: re.Pattern[str]) -> list[Path]:
    with os.scandir(folder) as found:
        return [Path(item.path) for item in found if name.fullmatch(item.name) and item.is_dir(follow_symlinks=False)]


def hold(folder: Path) -> int:
    """Take the folder's lock; it goes with the descriptor, however the process ends. Raises OSError or TierError."""
    try:
        import fcntl
    except ImportError:
        raise TierError(f"disk tier {folder}: this system has no file locks", hint="leave the disk tier out") from None
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TierError(
            f"disk tier {folder}: another process uses the folder, or this one opened it twice",
            hint="give every process a folder of its own, or close the other store first",
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
