"""Writes of peers that this end copies itself: into what was granted, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kvist.transfer.transport import Int64Array, Region, covers, host_bytes
from kvist_transceiver_ucx.connection import Connection
from kvist_transceiver_ucx.wire import Answer, Frame


@attrs.frozen(eq=False)
class _Grant:
    connection: Connection
    region: int
    begins: Int64Array
    ends: Int64Array


@attrs.define(eq=False)
class _Arriving:
    """Messages of one write. last: is the last one here? left: how many others are to come then. refused: why it is
    not copied. copied: is some of it?"""

    connection: Connection
    left: int = 0
    last: bool = False
    refused: str = ""
    copied: bool = False


class Arrivals:
    """Belongs to the progress thread, so nothing is copied after a grant was taken back or a connection has ended.

    regions: of this end. grants: does it check them, or only that regions are not left?
    """

    def __init__(self, regions: Callable[[], Sequence[Region]], *, grants: bool) -> None:
        self._regions, self._checks = regions, grants
        self._grants: dict[int, _Grant] = {}
        self._writes: dict[tuple[int, int], _Arriving] = {}

    def give(self, connection: Connection, grant: int, region: int, begins: Int64Array, ends: Int64Array) -> None:
        """Let the peer write there. ``begins`` ascend."""
        self._grants[grant] = _Grant(connection, region, begins, ends)

    def revoke(self, grant: int) -> None:
        """Let nobody write under it any more, not even the rest of a write that is coming in."""
        self._grants.pop(grant, None)

    def forget(self, connection: Connection) -> None:
        """Nothing comes over this connection any more."""
        self._grants = {number: each for number, each in self._grants.items() if each.connection is not connection}
        self._writes = {key: each for key, each in self._writes.items() if each.connection is not connection}

    def take(self, connection: Connection, token: int, frame: Frame, content: memoryview) -> Answer | None:
        """Copy what may be copied. Returns the answer to the write once all its messages are here, in any order."""
        write = self._writes.setdefault((connection.key, token), _Arriving(connection))
        write.refused = write.refused or self._refusal(connection, frame, len(content))
        if not write.refused:
            region, at = self._regions()[frame.region], 0
            target = memoryview(host_bytes(region.address, region.byte_count))
            for begin, size in zip(frame.destinations.tolist(), frame.byte_counts.tolist()):
                target[begin : begin + size] = content[at : at + size]
                at += size
            write.copied = write.copied or at > 0
        write.left += frame.index if frame.last else -1
        write.last = write.last or frame.last
        if not write.last or write.left:
            return None
        del self._writes[connection.key, token]
        return Answer(token, write.refused, in_doubt=write.copied)

    def _refusal(self, connection: Connection, frame: Frame, byte_count: int) -> str:
        regions = self._regions()
        if not 0 <= frame.region < len(regions):
            return f"there is no region {frame.region}"
        if regions[frame.region].device != "cpu":
            return f"region {frame.region} is on {regions[frame.region].device}"
        begins, ends = np.zeros(1, np.int64), np.array([regions[frame.region].byte_count])
        if self._checks and len(frame.destinations):
            grant = self._grants.get(frame.grant)
            if grant is None or grant.connection is not connection:
                return f"there is no grant {frame.grant}"
            if grant.region != frame.region:
                return f"the write goes beyond grant {frame.grant}"
            begins, ends = grant.begins, grant.ends
        if not covers(begins, ends, frame.destinations, frame.byte_counts):
            return f"the write goes beyond grant {frame.grant}"
        return "" if int(frame.byte_counts.sum()) == byte_count else "the write's ranges do not add up"
