"""How much of a token run all tiers together could give back, and which pages would have to come up for it."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvist.layout import Layout
from kvist.prefix.match import settle
from kvist.spec import Scope
from kvist.step import NO_PAGE, IntArray
from kvist.tiers.content import Content
from kvist.tiers.level import Cells, Known, Level

#: Where a page would come from: nowhere, or the tier nearest to the device that has it.
NOWHERE, DEVICE, HOST, DISK = range(4)


@attrs.frozen(eq=False)
class Found:
    """What resuming at ``length`` takes.

    tokens: as many leading ones as have to be in the device's index for that.
    first: leading blocks whose pages of dense groups are on the device.
    origin: int8 ``[groups, blocks]``, for every page it takes the tier that has it.
    keys: of leading blocks, where the disk was asked.
    """

    length: int
    tokens: IntArray
    first: int
    origin: npt.NDArray[np.int8]
    device: Known
    host: Known | None
    keys: list[bytes]

    def cells(self, origin: int) -> Cells:
        """bool ``[groups, blocks]``: the pages that come from there."""
        cells: Cells = self.origin == origin
        return cells

    @property
    def moved_blocks(self) -> int:
        """Blocks that something has to come up for."""
        return int(np.count_nonzero((self.origin > DEVICE).any(axis=0)))


class Search:
    """Looks and changes nothing, apart from what the disk counts as used."""

    def __init__(
        self, layout: Layout, device: Level, host: Level | None, content: Content | None, backoff: int
    ) -> None:
        self._layout = layout
        self._device, self._host, self._content = device, host, content
        self._backoff = backoff
        self._sparse = [group for group in layout.groups if group.sparse]

    def find(self, scope: Scope, tokens: IntArray, limit: int, *, whole_blocks: bool) -> Found | None:
        """The longest usable prefix of ``tokens``, at most ``limit``; None when the device alone gives as much.

        whole_blocks: end at a block boundary.
        """
        block = self._layout.block_tokens
        device = self._device.look(scope, tokens)
        host = None if self._host is None else self._host.look(scope, tokens)
        keys: list[bytes] = []
        masks: npt.NDArray[np.int64] = np.empty(0, np.int64)
        if self._content is not None:
            most = host if host is not None and host.length > device.length else device
            keys, masks = self._content.look(scope, tokens, most.path, within=bool(self._sparse))
        lengths = [device.length, 0 if host is None else host.length, len(masks) * block]
        known = max(lengths)
        if known == device.length and not self._sparse:
            return None
        origin = np.zeros((len(self._layout.groups), -(-known // block)), np.int8)
        for group in range(len(origin)):
            origin[group, : len(masks)][(masks >> group & 1).astype(np.bool_)] = DISK
        for number, tier in ((HOST, host), (DEVICE, device)):
            if tier is not None:
                # An open block counts where it is all that is known of that block.
                blocks = -(-known // block) if tier.length == known else tier.length // block
                origin[:, :blocks][tier.pages[:, :blocks] != NO_PAGE] = number
        unit = block if whole_blocks else self._layout.reuse_unit
        most_tokens = min(known, limit)
        length = max(0, most_tokens - self._backoff)
        there = np.where(origin == NOWHERE, NO_PAGE, 0).astype(np.int32)
        open_end = known if known % block else 0
        length, _ = settle(self._layout, self._sparse, there, length - length % unit, unit, open_end)
        end = -(-min(most_tokens, length + self._backoff) // block)
        last = -(-length // block)
        needed = np.zeros_like(origin, np.bool_)
        for kept in self._layout.groups:
            if not kept.sparse:
                needed[kept.index, :end] = True
            elif kept.exact:
                needed[kept.index, max(0, last - 1) : last] = True
            else:
                for low, high in kept.retention.required(length, block):
                    needed[kept.index, low : min(high, last)] = True
        if not length or not (origin[needed] > DEVICE).any():
            return None
        origin[~needed] = NOWHERE
        first = -(-known // block) if device.length == known else device.length // block
        return Found(length, tokens[: min(known, end * block)], min(first, end), origin[:, :end], device, host, keys)
