"""What a transceiver knows of one connection, and what sessions may do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from kvist.errors import TransferError
from kvist.step import NO_PAGE, IntArray
from kvist.transfer.mapping import Mapping
from kvist.transfer.messages import Wire
from kvist.transfer.pagetable import PageTable
from kvist.transfer.transport import Fragments, Int64Array, Peer

if TYPE_CHECKING:
    from kvist.transfer.incoming import Incoming
    from kvist.transfer.outgoing import Outgoing


@attrs.define(eq=False)
class Partner:
    """One connection to one incarnation of a peer.

    table, region: as it described itself, ``None`` until then. gone: why nothing can be done with it any more. heard_s,
    told_s: when it last said anything, and we did. unwell: it has been silent, and cannot be disconnected because that
    would not stop its writes.
    """

    peer: Peer
    heard_s: float
    told_s: float
    table: PageTable | None = None
    region: int = 0
    gone: str = ""
    unwell: str = ""
    _mapping: Mapping | None = None

    def mapping(self, ours: PageTable) -> Mapping:
        """How our pages become its. Raises IncompatibleError."""
        if self.table is None:
            raise TransferError(f"{self.peer} has not described its cache")
        if self._mapping is None:
            self._mapping = Mapping(ours, self.table)
        return self._mapping


class Post(Protocol):
    """What sessions need of their transceiver. Nothing here raises because of a peer."""

    table: PageTable
    region: int

    def say(self, partner: Partner, message: Wire) -> bool:
        """Send a message. False if it was certainly not sent."""

    def over(self, partner: Partner, request: str, attempt: int) -> None:
        """Tell a partner that nothing of its attempt is being written."""

    def grant(self, owner: Incoming, partner: Partner, begins: Int64Array, ends: Int64Array) -> int:
        """Let a partner write to these bytes. Returns a number that no other grant has."""

    def revoke(self, grant: int) -> None:
        """Take a grant back; where there are grants, ``owner.revoked`` follows."""

    def write(self, owner: Outgoing, partner: Partner, fragments: Fragments, grant: int) -> int:
        """Begin a write; ``owner.written`` follows. Returns its token."""


def ranges_of(table: PageTable, pages: tuple[IntArray, ...]) -> tuple[Int64Array, Int64Array]:
    """The bytes of pages as disjoint ranges ``[begins, ends)``, ascending, neighbours joined."""
    ids = [each[each != NO_PAGE].astype(np.int64) for each in pages]
    begins = np.concatenate([each * group.page_bytes for each, group in zip(ids, table.groups)])
    ends = np.concatenate([(each + 1) * group.page_bytes for each, group in zip(ids, table.groups)])
    if not len(begins):
        return begins, ends
    order = np.argsort(begins)
    begins, ends = begins[order], ends[order]
    apart = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    return begins[np.concatenate(([0], apart))], ends[np.concatenate((apart - 1, [len(ends) - 1]))]
