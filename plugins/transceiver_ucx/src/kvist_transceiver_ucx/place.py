"""Where a process runs, so that another one on the same machine can tell when it has ended.

UCX notices the death of a process at the other end of shared memory only at its next keepalive. The kernel says so at
once, and says what matters more: that it can write nothing any more.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec


class Place(msgspec.Struct, frozen=True):
    """One process. ``machine``: the boot that it runs in; ``processes``: the namespace of its id; ``started``: in clock
    ticks after the boot, for ids are used again."""

    machine: str
    processes: str
    pid: int
    started: int


def here() -> Place:
    """This process."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(machine, os.readlink("/proc/self/ns/pid"), os.getpid(), _started(os.getpid()))


def watch(place: Place) -> int | None:
    """A descriptor that becomes readable when the process ends; ``None`` if it has ended. The caller closes it.

    ``place`` is in our namespace of processes.
    """
    try:
        descriptor = os.pidfd_open(place.pid)
    except ProcessLookupError:
        return None
    try:
        same = _started(place.pid) == place.started
    except (FileNotFoundError, ProcessLookupError):
        same = False
    # It is readable at once for a process that has ended and whose parent has not asked for it yet.
    if not same or select.select([descriptor], [], [], 0)[0]:
        os.close(descriptor)
        return None
    return descriptor


def _started(pid: int) -> int:
    # The name of the program, in parentheses, may hold blanks and parentheses. Fields are counted after it.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
