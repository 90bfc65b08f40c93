"""Copies in progress: their tickets, and what they keep until the last of them has finished."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvist.memory.copier import Copier, Finished, Ticket
from kvist.memory.mover import Copy, Tier
from kvist.prefix.extent import Extent
from kvist.sequence import Sequence
from kvist.step import NO_PAGE, IntArray
from kvist.tiers.level import Arrival, Cells, Level, Pin


@attrs.define(eq=False)
class Part:
    """One batch of a transfer. columns: int64, its blocks as indices of the transfer's ``ordinals``, in the batch's
    order. cells: bool ``[groups, blocks]``, what it copies."""

    source: Level | None
    columns: npt.NDArray[np.int64]
    cells: Cells
    copy: Copy


@attrs.define(eq=False)
class Transfer:
    """Blocks of one token run that move between tiers. ``ordinals``: int64, ascending.

    pins: what it keeps of the tiers that it copies from. target: where it goes, with ``arrival``; None for the disk.
    extent: where it goes down from. more: the block after which others are to follow. again: extents that wait for it.
    sequence, limit: who waits for it, and up to where; None once nobody does.
    """

    generation: int
    ordinals: npt.NDArray[np.int64]
    pins: list[tuple[Level, Pin]]
    parts: list[Part]
    lost: Cells
    target: Level | None = None
    arrival: Arrival | None = None
    extent: Extent | None = None
    more: int | None = None
    again: list[Extent] = attrs.Factory(list)
    sequence: Sequence | None = None
    limit: int = 0
    pending: dict[Ticket, Part] = attrs.Factory(dict)

    def report(self, finished: Finished) -> None:
        """Take note of a finished batch."""
        part = self.pending.pop(finished.ticket)
        for position in finished.failed:
            self.lost[:, part.columns[position]] |= part.cells[:, position]

    def unpin(self) -> None:
        """Give back what it keeps of its sources."""
        for level, pin in self.pins:
            level.unpin(pin, used=False, silent=self.extent is not None)


class Flights:
    """Transfers by ticket. ``generation`` grows when everything is cleared: what is under way then must not arrive."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.generation = 0
        self.transfers: dict[Ticket, Transfer] = {}
        # Backups leave room for loads, which somebody waits for.
        self._spare = min(2, copier.room // 2)

    @property
    def room_down(self) -> int:
        """Batches that backups may submit."""
        return self.copier.room - self._spare

    def submit(self, transfer: Transfer) -> None:
        """Hand a transfer's batches to the copier, which has room for them. When that raises, nothing is given back."""
        for part in transfer.parts:
            ticket = self.copier.submit(part.copy)
            self.transfers[ticket] = transfer
            transfer.pending[ticket] = part

    def collect(self) -> list[Transfer]:
        """Transfers whose last batch has finished, in the order in which they did."""
        done = []
        for finished in self.copier.finished():
            transfer = self.transfers.pop(finished.ticket, None)
            if transfer is not None:
                transfer.report(finished)
                if not transfer.pending:
                    done.append(transfer)
        return done


def part_of(
    source: Level | None,
    target: Level | None,
    columns: npt.NDArray[np.int64],
    cells: Cells,
    source_pages: IntArray | None,
    target_pages: IntArray | None,
    keys: tuple[bytes, ...] = (),
    generation: int | None = None,
) -> Part:
    """A batch from one tier to another, None for the disk. Pages: int32 ``[groups, columns]``; only ``cells`` count."""

    def chosen(pages: IntArray | None) -> tuple[IntArray, ...]:
        return () if pages is None else tuple(np.where(cells, pages, NO_PAGE).astype(np.int32))

    copy = Copy(
        Tier.DISK if source is None else source.tier,
        Tier.DISK if target is None else target.tier,
        chosen(source_pages),
        chosen(target_pages),
        keys,
        generation,
    )
    return Part(source, columns, cells, copy)


def spread(cells: Cells, pages: list[IntArray]) -> IntArray:
    """int32 like ``cells``: the pages of each group where it says so, NO_PAGE elsewhere."""
    spread_out = np.full(cells.shape, NO_PAGE, np.int32)
    for group, row in enumerate(cells):
        spread_out[group, row] = pages[group]
    return spread_out
