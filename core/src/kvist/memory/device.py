"""The bytes of an arena on a torch device, and typed views of them. The only core memory module that needs torch."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.step import IntArray, Step, overlaps

#: Pages are copied in parts of this many bytes, each through a buffer.
_COPY_BYTES = 64 << 20


class DeviceMemory:
    """One torch storage for all groups of a layout; every stream is a strided view of it.

    Owns the bytes. Views stay valid as long as this object lives. Never resized.

    storage: uint8 ``[at least layout.arena_bytes]`` on the device to be used instead of memory of its own, such as what
    a transport has allocated; it is zeroed, and has to stay as long as any view. Raises SpecError when it is too small.
    """

    def __init__(
        self, layout: Layout, device: torch.device | str = "cpu", *, storage: torch.Tensor | None = None
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        if storage is not None:
            if storage.dtype != torch.uint8 or storage.ndim != 1 or storage.device.type != self.device.type:
                raise SpecError(
                    f"the storage is {storage.dtype} {list(storage.shape)} on {storage.device}",
                    hint=f"pass a one-dimensional tensor of uint8 on {self.device}",
                )
            if len(storage) < layout.arena_bytes:
                raise SpecError(f"the storage has {len(storage)} bytes, the arena needs {layout.arena_bytes}")
            self.bytes = storage[: layout.arena_bytes].zero_()
            return
        # Zeroed once, so that every page is touched before the first step and no row ever holds NaN by accident.
        if self.device.type == "cpu":
            self.bytes = _host_bytes(layout.arena_bytes).zero_()
        else:
            self.bytes = torch.zeros(layout.arena_bytes, dtype=torch.uint8, device=self.device)

    def view(
        self,
        layer_id: int,
        stream_name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        domain: str | None = None,
    ) -> torch.Tensor:
        """A stream as ``[page id, *shape]`` of ``dtype``, sharing memory with the arena.

        ``shape`` is the arrangement of one page's part; it must not need more bytes than the page layout gave it.
        Raises SpecError for an unknown stream or a shape that does not fit.
        """
        group, part = self.layout.part(layer_id, stream_name, domain)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        needed = strides[0] * shape[0] * dtype.itemsize
        if needed > part.byte_count:
            raise SpecError(
                f"layer {layer_id} stream {stream_name!r}: shape {shape} of {dtype} needs {needed} bytes, "
                f"its part of a page has {part.byte_count}"
            )
        if group.page_bytes % dtype.itemsize or part.offset % dtype.itemsize:
            raise SpecError(f"layer {layer_id} stream {stream_name!r}: pages are not aligned for {dtype}")
        page_count = self.layout.arena_bytes // group.page_bytes
        return self.bytes.view(dtype).as_strided(
            (page_count, *shape), (group.page_bytes // dtype.itemsize, *strides), part.offset // dtype.itemsize
        )

    def pages(self, group_index: int) -> torch.Tensor:
        """uint8 ``[page id, page_bytes]`` of one group: whole pages, all layers."""
        page_bytes = self.layout.groups[group_index].page_bytes
        return self.bytes.view(-1, page_bytes)

    def apply(self, step: Step) -> None:
        """Do what the step needs before anything is written: its page copies, and zeros in fresh states. Call once per
        committed step, before the backend's ``begin``."""
        self._copy(step.copies)
        for group_index, fresh in enumerate(step.fresh):
            if len(fresh):
                self.pages(group_index)[self._ids(fresh)] = 0

    def save(self, step: Step) -> None:
        """Make the snapshots that the step promises. Call once, after every layer has run; a step without states has
        none, and the call does nothing."""
        self._copy(step.saves)

    def _copy(self, copies: tuple[IntArray, ...]) -> None:
        # What one group's page is copied to may be where another group's source lies: such sources are read first.
        # The others, nearly all, are copied a few at a time, because together they may be a large part of the arena.
        sizes = [group.page_bytes for group in self.layout.groups]
        target = np.concatenate([pairs[:, 1].astype(np.int64) * size for pairs, size in zip(copies, sizes)])
        target_end = np.concatenate([(pairs[:, 1].astype(np.int64) + 1) * size for pairs, size in zip(copies, sizes)])
        if not len(target):
            return
        late, early = [], []
        for index, (pairs, size) in enumerate(zip(copies, sizes)):
            if not len(pairs):
                continue
            begin = pairs[:, 0].astype(np.int64) * size
            first = overlaps(begin, begin + size, target, target_end)
            pages = self.pages(index)
            if first.any():
                late.append((pages, self._ids(pairs[first, 1]), pages[self._ids(pairs[first, 0])]))
            early.append((pages, pairs[~first], max(1, _COPY_BYTES // size)))
        for pages, pairs, count in early:
            for at in range(0, len(pairs), count):
                part = pairs[at : at + count]
                pages[self._ids(part[:, 1])] = pages[self._ids(part[:, 0])]
        for pages, places, content in late:
            pages[places] = content

    def _ids(self, pages: IntArray) -> torch.Tensor:
        # A copy of the array: torch warns about sharing memory that is read-only.
        return torch.tensor(pages, dtype=torch.int64, device=self.device)


def _host_bytes(count: int) -> torch.Tensor:
    """uint8 ``[count]`` of the process's own memory, in huge pages where the system has them.

    Pages of one sequence are scattered, so a read begins at another address every few KiB: with 4 KiB pages of memory
    the translations cost decode attention 5 % (float32) to 12 % (bfloat16).
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(count, dtype=torch.uint8)
    # The tensor keeps the mapping alive, and the mapping goes with the last view.
    mapping = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=count)
