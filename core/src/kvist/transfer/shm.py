"""Transfers between processes of one host: whoever writes copies straight into memory that both have mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from typing import ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import TransferError
from kvist.transfer import tcp_wire as wire
from kvist.transfer.tcp import TCP, TcpTransport
from kvist.transfer.tcp_io import Connections
from kvist.transfer.transport import Fragments, Region, TransportContext

#: What a peer has mapped it can write to until it lets go of it, whatever we do. Its connection ends after its copies.
SHM = attrs.evolve(TCP, allocates=True, grants=False, close_is_fence=False, target_must_progress=False)

#: One step copies about this many bytes, and at most so many fragments: then connections get their turn.
_STEP_BYTES = 16 << 20
_STEP_FRAGMENTS = 2048


class _Copy:
    """A write: copies into a region of the peer's."""

    answered = False

    def __init__(self, shared: _Shared, link: wire.Link, fragments: Fragments, token: int) -> None:
        self.token: int | None = token
        self.begun = False
        self._shared, self._link = shared, link
        self._fragments, self._at = fragments, 0
        self._ends = np.cumsum(fragments.byte_counts)

    def step(self, connection: socket.socket) -> bool:
        fragments, at = self._fragments, self._at
        if at == len(fragments):
            return True
        target = self._shared.target(self._link, fragments.destination_region)
        if not self.begun:
            _require_inside(fragments, len(target))
        source = self._shared.array(fragments.source_region)
        before = int(self._ends[at - 1]) if at else 0
        stop = int(np.searchsorted(self._ends, before + _STEP_BYTES, side="right"))
        stop = min(max(stop, at + 1), at + _STEP_FRAGMENTS, len(fragments))
        self.begun = True
        for begin, to, size in zip(
            fragments.sources[at:stop].tolist(),
            fragments.destinations[at:stop].tolist(),
            fragments.byte_counts[at:stop].tolist(),
        ):
            target[to : to + size] = source[begin : begin + size]
        self._at = stop
        return stop == len(fragments)


class _Shared(Connections):
    """Carries messages only; a write waits for its turn among them and is then a copy."""

    def array(self, region: int) -> npt.NDArray[np.uint8]:
        """Our own memory."""
        return np.frombuffer(self.memory[region], np.uint8)

    def target(self, link: wire.Link, region: int) -> npt.NDArray[np.uint8]:
        """The peer's memory, mapped when it is first written to. Raises TransferError when there is none."""
        found = link.mapped.get(region)
        if found is None:
            assert link.told is not None
            if not 0 <= region < len(link.told.regions):
                raise TransferError(f"{link.peer} has no region {region}")
            found = link.mapped[region] = _attach(link.told.regions[region])
        return np.frombuffer(found, np.uint8)

    def write_item(self, link: wire.Link, fragments: Fragments, grant: int, token: int) -> wire.Item:
        return _Copy(self, link, fragments, token)

    def detach(self, link: wire.Link) -> None:
        for each in link.mapped.values():
            each.close()
        link.mapped.clear()


class ShmTransport(TcpTransport):
    """Implements :class:`~kvist.transfer.transport.Transport` for processes of one Linux host.

    Memory that is written to has to come from :meth:`allocate`; peers map it. No file system has its name: it goes when
    the last process that has mapped it has gone, however that came about. A connection of TCP carries messages, and
    tells when a process has ended.
    """

    scheme = "shm"
    capabilities = SHM
    _connections: ClassVar[type[Connections]] = _Shared

    def __init__(self, context: TransportContext) -> None:
        if not hasattr(os, "memfd_create"):
            raise TransferError("the shm transport needs Linux", hint="use tcp")
        self._allocated: dict[int, tuple[int, mmap.mmap]] = {}
        super().__init__(context)

    def allocate(self, byte_count: int, device: str = "cpu") -> Region:
        self._require_early(device)
        if byte_count < 1:
            raise TransferError(f"{byte_count} bytes cannot be allocated")
        try:
            descriptor = os.memfd_create(f"kvist-{self.name}", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, byte_count)
                mapping = mmap.mmap(descriptor, byte_count)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise TransferError(
                f"{byte_count} bytes of shared memory cannot be had: {wire.reason_of(error)}"
            ) from error
        region = self._add(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), byte_count, device)
        self._allocated[region.id] = descriptor, mapping
        return region

    def close(self) -> None:
        super().close()
        self._let_go()

    def abandon(self) -> None:
        super().abandon()
        self._let_go()

    def _let_go(self) -> None:
        for descriptor, mapping in self._allocated.values():
            mapping.close()
            os.close(descriptor)
        self._allocated.clear()

    def _told(self, region: Region) -> wire.ToldRegion:
        if region.id not in self._allocated:
            return wire.ToldRegion(region.byte_count)
        descriptor, _ = self._allocated[region.id]
        name = f"/proc/{os.getpid()}/fd/{descriptor}"
        return wire.ToldRegion(region.byte_count, name, os.fstat(descriptor).st_ino)


def _attach(told: wire.ToldRegion) -> mmap.mmap:
    if not told.name:
        raise TransferError("that memory is not shared", hint="the receiver has to allocate() it, not to register() it")
    try:
        descriptor = os.open(told.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if (found.st_ino, found.st_size) != (told.inode, told.byte_count):
                raise TransferError(f"{told.name} is something else now")
            return mmap.mmap(descriptor, told.byte_count)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise TransferError(
            f"the shared memory {told.name} cannot be mapped: {wire.reason_of(error)}",
            hint="both processes have to run on one host, as one user, in one namespace of processes",
        ) from error


def _require_inside(fragments: Fragments, byte_count: int) -> None:
    begin = int(fragments.destinations.min())
    end = int((fragments.destinations + fragments.byte_counts).max())
    if begin < 0 or end > byte_count:
        raise TransferError(f"a write goes to bytes {begin}..{end} of a region of {byte_count}")
