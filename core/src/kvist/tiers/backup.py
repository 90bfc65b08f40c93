"""Write-behind: what is idle in one tier is copied to the next, before anybody needs its room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvist.memory.disk import DiskStore
from kvist.prefix.extent import Extent
from kvist.prefix.tree import scope_of
from kvist.spec import Scope
from kvist.step import NO_PAGE, IntArray
from kvist.tiers.content import Content
from kvist.tiers.level import Arrival, Cells, Known, Level
from kvist.tiers.transfer import Flights, Transfer, part_of, spread

#: Blocks in a batch: enough for any link, and few enough that what is held meanwhile is soon free.
_BATCH_BLOCKS = 256
#: At most this part of a tier's pages is held for copies down, so that plans find the rest.
_HELD_PART = 4
#: Extents that wait to be looked at; the longest waiting are forgotten.
_QUEUE_MOST = 4096


class Backup:
    """From one tier with pages to the next, one with pages or the disk. Mutates both."""

    def __init__(
        self,
        flights: Flights,
        source: Level,
        target: Level | Content,
        minimum_blocks: int,
        pages_in_use: Callable[[], list[Sequence[int]]] | None = None,
    ) -> None:
        """pages_in_use: of the source, per group, those that a step still to be executed may write."""
        self._flights = flights
        self._pages_in_use = pages_in_use
        self._in_use: list[Sequence[int]] = []
        #: Whose copies go on, and after which block. Only forwards: otherwise paths that do not fit in the next tier
        #: together would push each other out for ever.
        self._follow: dict[Extent, int] = {}
        #: Extents with such pages.
        self._later: list[Extent] = []
        self.source, self._target = source, target
        self._minimum = minimum_blocks
        layout = source.ledger.layout
        self._most = max(1, layout.page_capacity(layout.groups[0]) // _HELD_PART)
        self._batch = min(_BATCH_BLOCKS, self._most)
        self._blocks_moving = 0
        #: Was there no room for the last one, and may there be some later?
        self._waits = False
        #: Whose blocks are being copied.
        self._busy: dict[Extent, Transfer] = {}
        self._queue: deque[Extent] = deque(maxlen=_QUEUE_MOST)
        source.tree.idled = self._queue

    def run(self) -> bool:
        """Submit copies of what has become idle, as far as there is room. Was there any?"""
        self._queue.extend(self._later)
        self._later.clear()
        if (self._follow or self._queue) and self._pages_in_use is not None:
            self._in_use = self._pages_in_use()
        some = False
        looked_at: set[Extent] = set()
        while (self._follow or self._queue) and self._flights.room_down > 0 and self._blocks_moving < self._most:
            extent = next(iter(self._follow)) if self._follow else self._queue[0]
            after = self._follow.get(extent)
            if after is None and extent in looked_at:
                self._queue.popleft()
                continue
            transfer = self._transfer(extent, min(self._batch, self._most - self._blocks_moving), after)
            if self._waits:
                break
            if after is None:
                looked_at.add(self._queue.popleft())
            else:
                del self._follow[extent]
            some |= transfer is not None
        return some

    def now(self, extent: Extent) -> None:
        """Submit a copy of an idle extent at once, all of it, if there is room."""
        if self._flights.copier.room > 0:
            if self._pages_in_use is not None:
                self._in_use = self._pages_in_use()
            self._transfer(extent, extent.end)

    def finish(self, transfer: Transfer, kept: bool) -> None:
        """After what it copied has arrived, or after all of it was given up (``kept`` false)."""
        self._blocks_moving -= len(transfer.ordinals)
        for extent in [extent for extent, busy in self._busy.items() if busy is transfer]:
            del self._busy[extent]
        if kept:
            if transfer.more is not None and transfer.extent is not None and not transfer.lost.any():
                self._follow[transfer.extent] = transfer.more
            self._queue.extend(transfer.again)

    def forget(self) -> None:
        """Nothing of what waits is of use any more."""
        self._queue.clear()
        self._later.clear()
        self._follow.clear()

    def _transfer(self, extent: Extent, most: int, after: int | None = None) -> Transfer | None:
        """Start copying up to ``most`` of the blocks on the path to ``extent`` that the next tier lacks, of those
        ``after`` one, if it is given."""
        self._waits = False
        while not extent.alive and extent.parent is not None:
            # What was evicted meanwhile has perhaps left the beginning of its path.
            extent = extent.parent
        if extent.parent is None or extent.stale or (extent.holds and extent not in self._busy):
            # Whoever holds it lets go of it some time.
            return None
        known = self.source.path_to(extent)
        for above, _ in known.path:
            busy = self._busy.get(above)
            if busy is not None:
                busy.again.append(extent)
                return None
        if known.pages.shape[1] < self._minimum:
            return None
        if any(len(pages) and np.isin(row, pages).any() for row, pages in zip(known.pages, self._in_use)):
            # Published at the end of a fork that never ran: its rows are still to be copied to where they belong.
            self._later.append(extent)
            return None
        scope = scope_of(extent)
        if isinstance(self._target, Content):
            transfer = self._to_disk(known, most, after, self._target)
        else:
            transfer = self._to_level(scope, known, most, after, self._target)
        if transfer is None:
            return None
        transfer.extent = extent
        try:
            self._flights.submit(transfer)
        except Exception:
            # The copier is closed.
            transfer.unpin()
            if transfer.target is not None and transfer.arrival is not None:
                transfer.target.unpin(transfer.arrival.pin, used=False)
            raise
        self._blocks_moving += len(transfer.ordinals)
        node = transfer.pins[0][1].extent
        while node is not None and node.parent is not None:
            self._busy[node] = transfer
            node = node.parent
        return transfer

    def _to_level(self, scope: Scope, known: Known, most: int, after: int | None, target: Level) -> Transfer | None:
        tokens = _tokens(known)
        have = target.look(scope, tokens)
        blocks = known.pages.shape[1]
        first = blocks if have.length == len(tokens) else have.length // target.block
        missing: Cells = known.pages != NO_PAGE
        missing[:, :first] &= have.pages[:, :first] == NO_PAGE
        lacking = _after(after, missing)
        if after is not None and first <= after:
            # What it was to follow has been pushed out.
            return None
        if not len(lacking):
            if have.path:
                target.touch(have.path[-1][0])
            return None
        kept = target.pin(have, first)
        ordinals = lacking[:most]
        needed = missing[:, ordinals].sum(axis=1).tolist()
        while not target.make_room(needed):
            ordinals = ordinals[: len(ordinals) // 2]
            if not len(ordinals):
                target.unpin(kept, used=False)
                # Once copies in progress are finished there may be room.
                self._waits = bool(target.pins)
                return None
            needed = missing[:, ordinals].sum(axis=1).tolist()
        cells = missing[:, ordinals]
        new = target.take(needed)
        pages = spread(cells, new)
        end = max(first, int(ordinals[-1]) + 1)
        arrival = Arrival(
            scope,
            tokens[: end * target.block],
            first,
            ordinals,
            pages,
            np.zeros_like(cells),
            target.allocate(kept, new),
        )
        transfer = self._started(known, ordinals, missing, target, pages)
        transfer.target, transfer.arrival = target, arrival
        transfer.more = int(ordinals[-1]) if len(ordinals) < len(lacking) else None
        return transfer

    def _to_disk(self, known: Known, most: int, after: int | None, content: Content) -> Transfer | None:
        keys = content.keys(known.path)
        masks = np.array(content.disk.masks(keys), np.int64)
        groups = np.arange(len(known.pages))[:, None]
        missing: Cells = (known.pages[:, : len(keys)] != NO_PAGE) & (masks >> groups & 1 == 0)
        lacking = _after(after, missing)
        if not len(lacking):
            return None
        # The deepest first: what is written last is evicted last, and no block is of use without those before it.
        ordinals = lacking[:most]
        transfer = self._started(known, ordinals, missing, None, None, content.disk, keys)
        transfer.more = int(ordinals[-1]) if len(ordinals) < len(lacking) else None
        return transfer

    def _started(
        self,
        known: Known,
        ordinals: npt.NDArray[np.int64],
        missing: Cells,
        target: Level | None,
        target_pages: IntArray | None,
        disk: DiskStore | None = None,
        keys: list[bytes] | None = None,
    ) -> Transfer:
        cells = missing[:, ordinals]
        chosen = np.zeros_like(missing)
        chosen[:, ordinals] = cells
        last = int(ordinals[-1]) + 1
        columns = np.arange(len(ordinals))
        if keys is not None:
            columns = columns[::-1]
        part = part_of(
            self.source,
            target,
            columns,
            cells[:, columns],
            known.pages[:, ordinals[columns]],
            None if target_pages is None else target_pages[:, columns],
            () if keys is None else tuple(keys[ordinal] for ordinal in ordinals[columns].tolist()),
            None if disk is None else disk.generation,
        )
        pin = self.source.pin(known, last, chosen[:, :last])
        return Transfer(self._flights.generation, ordinals, [(self.source, pin)], [part], np.zeros_like(cells))


def _tokens(known: Known) -> IntArray:
    runs = [extent.tokens for extent, _ in known.path]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _after(ordinal: int | None, missing: Cells) -> npt.NDArray[np.int64]:
    """The blocks of which something is missing, ascending; those after one of them, if it is given."""
    lacking = np.flatnonzero(missing.any(axis=0))
    return lacking if ordinal is None else lacking[lacking > ordinal]
