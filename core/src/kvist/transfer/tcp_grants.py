"""Where the writes of a TCP transport's peers may land, and that they stop when a grant is taken back."""

from __future__ import annotations

import attrs

from kvist.errors import TransferError
from kvist.transfer import tcp_wire as wire
from kvist.transfer.transport import Int64Array, Region, covers


@attrs.frozen(eq=False)
class _Grant:
    """Ranges of a region that one peer may write to."""

    link: wire.Link
    region: Region
    begins: Int64Array
    ends: Int64Array


class Grants:
    """Belongs to the thread of the connections. memory: of the regions."""

    def __init__(self, memory: list[memoryview]) -> None:
        self._memory = memory
        self._grants: dict[int, _Grant] = {}

    def give(self, link: wire.Link, grant: int, region: Region, begins: Int64Array, ends: Int64Array) -> None:
        """Let the peer write there. ``begins`` ascend."""
        self._grants[grant] = _Grant(link, region, begins, ends)

    def revoke(self, grant: int) -> None:
        """Let nobody write under it any more, not even the rest of a write that is coming in."""
        given = self._grants.pop(grant, None)
        if given is not None and given.link.landing == grant:
            link = given.link
            link.refused, link.doubt, link.landing = f"grant {grant} was revoked", True, None
            link.run.discard()

    def forget(self, link: wire.Link) -> None:
        """Nothing comes over this connection any more."""
        self._grants = {number: grant for number, grant in self._grants.items() if grant.link is not link}

    def land(self, link: wire.Link, header: wire.Header, ranges: bytearray) -> wire.Run:
        """Where the bytes of a write go: into memory, or nowhere. Raises TransferError for one that makes no sense."""
        begins, byte_counts = wire.unpacked_ranges(ranges)
        grant = self._grants.get(header.grant)
        link.refused, link.doubt, link.landing = "", False, None
        if grant is None or grant.link is not link:
            link.refused = f"there is no grant {header.grant}"
        elif grant.region.id != header.region or not covers(grant.begins, grant.ends, begins, byte_counts):
            link.refused = f"the write goes beyond grant {header.grant}"
        elif int(byte_counts.sum()) != header.byte_count:
            raise TransferError("it sent a write whose ranges do not add up")
        else:
            link.landing = header.grant
            return wire.Run(wire.parts_of(self._memory[header.region], begins, byte_counts))
        return wire.discarded(header.byte_count)
