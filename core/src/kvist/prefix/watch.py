"""What a prefix tree tells whoever follows which blocks can be found."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvist.memory.diskstats import Reason
from kvist.prefix.extent import Extent


class IndexWatcher(Protocol):
    """Called at every change of what can be found, never for extents that are stale already. Must not change anything.

    Blocks are counted from the start of the extent; the last one may be open.
    """

    def inserted(self, extent: Extent, first: int) -> None:
        """The blocks from ``first`` on are new, with the pages that they have now."""

    def filed(self, extent: Extent, group: int, blocks: npt.NDArray[np.integer]) -> None:
        """``blocks``, ascending, got a page of ``group`` beside what they had."""

    def lost(self, extent: Extent, group: int, blocks: npt.NDArray[np.integer]) -> None:
        """``blocks``, ascending, are about to lose their page of ``group``, and nothing else, to eviction."""

    def truncated(self, extent: Extent, keep_blocks: int, reason: Reason) -> None:
        """The blocks from ``keep_blocks`` on are about to go, or to become stale. What is below the extent was reported
        before."""
