"""Moving the bytes of a batch of blocks from one tier to another. No torch.

When a batch runs is the business of :mod:`kvist.memory.copier`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import TierError
from kvist.layout import Layout
from kvist.memory.disk import DiskStore
from kvist.step import NO_PAGE, IntArray, present


class Tier(enum.Enum):
    """Where bytes are. Device and host have pages, the disk has keys."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@attrs.frozen(eq=False)
class Copy:
    """A batch: blocks to copy from one tier to another. Position ``i`` of every field is block ``i``.

    source_pages, target_pages: for each group int32 ``[blocks]``, :data:`NO_PAGE` where the block has nothing to copy
        in this group; nothing at all for the disk's side. They are the copier's until the batch is finished.
    keys: the blocks' content keys if one side is the disk.
    generation: the disk's when the batch was made; see :meth:`kvist.memory.disk.DiskStore.put`.
    """

    source: Tier
    target: Tier
    source_pages: tuple[IntArray, ...] = ()
    target_pages: tuple[IntArray, ...] = ()
    keys: tuple[bytes, ...] = ()
    generation: int | None = None

    def __attrs_post_init__(self) -> None:
        assert self.source is not self.target
        assert bool(self.source_pages) == (self.source is not Tier.DISK)
        assert bool(self.target_pages) == (self.target is not Tier.DISK)
        assert bool(self.keys) == (Tier.DISK in (self.source, self.target))
        arrays = self.source_pages + self.target_pages
        assert {len(pages) for pages in arrays} == {self.block_count}
        assert len(self.keys) in (0, self.block_count)
        if not self.keys:
            pairs = zip(self.source_pages, self.target_pages, strict=True)
            assert all(((here == NO_PAGE) == (there == NO_PAGE)).all() for here, there in pairs)
        else:
            assert (np.max(arrays, axis=0) != NO_PAGE).all(), "a block without any page"
        assert all(_are_distinct(present(pages)) for pages in arrays), "two blocks have one page"

    @property
    def block_count(self) -> int:
        return len((self.source_pages or self.target_pages)[0])

    def only(self, positions: Sequence[int]) -> Copy:
        """The batch of these of its blocks."""
        chosen = np.asarray(positions, np.intp)
        return attrs.evolve(
            self,
            source_pages=tuple(pages[chosen] for pages in self.source_pages),
            target_pages=tuple(pages[chosen] for pages in self.target_pages),
            keys=tuple(self.keys[position] for position in positions) if self.keys else (),
        )

    def __str__(self) -> str:
        return f"{self.source.value} to {self.target.value}, {self.block_count} blocks"


class Mover(Protocol):
    """Moves the bytes of one batch. Used by one thread at a time, except ``mark``."""

    def mark(self) -> object:
        """What the batch submitted now must not overtake, for ``move``. Called by whoever submits."""

    def move(self, copy: Copy, mark: object) -> Sequence[int]:
        """Copy, and come back when no byte is in flight any more, also by raising. Returns the positions of the blocks
        that could not be copied, ascending; after an exception none may be used."""

    def close(self) -> None:
        """Give back what the mover holds; the memories are not its own. Again is a no-op."""


class PageMemory(Protocol):
    """The bytes of a tier: :class:`kvist.memory.device.DeviceMemory`, or arrays."""

    @property
    def layout(self) -> Layout: ...

    def pages(self, group_index: int) -> Any:
        """uint8 ``[page id, page_bytes]`` of one group."""


class CpuMover:
    """Moves bytes between memories that the CPU can address, and a disk."""

    def __init__(self, memories: Mapping[Tier, PageMemory], disk: DiskStore | None = None) -> None:
        """Raises TierError for a memory that is not the CPU's."""
        self._disk = disk
        self._pages: dict[Tier, list[npt.NDArray[np.uint8]]] = {}
        self._content_bytes: list[int] = []
        for tier, memory in memories.items():
            groups = memory.layout.groups
            self._content_bytes = [group.content_bytes for group in groups]
            try:
                self._pages[tier] = [np.asarray(memory.pages(group.index)) for group in groups]
            except TypeError as cause:
                raise TierError(
                    f"{tier.value} memory is not the CPU's: {cause}", hint="use kvist.memory.streams.StreamMover"
                ) from cause

    def mark(self) -> None:
        """The CPU overtakes nothing."""

    def move(self, copy: Copy, mark: object) -> Sequence[int]:
        if copy.source is Tier.DISK:
            return self._load(copy)
        if copy.target is Tier.DISK:
            return self._store(copy)
        for group, source, target, count in page_runs(copy):
            self._pages[copy.target][group][target : target + count] = self._pages[copy.source][group][
                source : source + count
            ]
        return ()

    def close(self) -> None:
        pass

    def _store(self, copy: Copy) -> list[int]:
        assert self._disk is not None
        failed = []
        for position, key in enumerate(copy.keys):
            parts: list[memoryview | None] = [None] * len(copy.source_pages)
            for group, page in block_pages(copy.source_pages, position):
                parts[group] = self._pages[copy.source][group][page, : self._content_bytes[group]].data
            if not self._disk.put(key, parts, copy.generation):
                failed.append(position)
        return failed

    def _load(self, copy: Copy) -> list[int]:
        assert self._disk is not None
        failed: list[int] = []
        for block in fetched(self._disk, copy, failed):
            for group, page, part in block:
                self._pages[copy.target][group][page, : len(part)] = np.frombuffer(part, np.uint8)
        return failed


def _are_distinct(pages: IntArray) -> bool:
    ordered = np.sort(pages)  # np.unique takes ten times as long
    return bool((ordered[1:] != ordered[:-1]).all())


def page_runs(copy: Copy) -> Iterator[tuple[int, int, int, int]]:
    """``(group, first source page, first target page, count)`` of runs that are contiguous on both sides."""
    for group, (sources, targets) in enumerate(zip(copy.source_pages, copy.target_pages, strict=True)):
        sources, targets = present(sources), present(targets)
        breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
        bounds = [0, *breaks.tolist(), len(sources)]
        for begin, end in pairwise(bounds):
            if begin < end:
                yield group, int(sources[begin]), int(targets[begin]), end - begin


def block_pages(pages: Sequence[IntArray], position: int) -> Iterator[tuple[int, int]]:
    """``(group, page)`` of one block."""
    for group, column in enumerate(pages):
        page = int(column[position])
        if page != NO_PAGE:
            yield group, page


def fetched(disk: DiskStore, copy: Copy, failed: list[int]) -> Iterator[list[tuple[int, int, memoryview]]]:
    """Read the blocks of a copy from the disk: of each one that is there in all groups ``(group, target page, bytes)``.
    Positions of the others are appended to ``failed``."""
    for position, key in enumerate(copy.keys):
        wanted = list(block_pages(copy.target_pages, position))
        parts = disk.get(key) or [None] * len(copy.target_pages)
        block = [(group, page, part) for group, page in wanted if (part := parts[group]) is not None]
        if len(block) < len(wanted):
            failed.append(position)
        else:
            yield block
