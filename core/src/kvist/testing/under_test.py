"""What the kit needs of a cache manager beside its contract: a look at what is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvist.contract import CacheManager
from kvist.step import IntArray


class ManagerUnderTest(CacheManager, Protocol):
    """A cache manager with the two back doors of the kit, which touch no content. A manager without them gets them in
    the tests of its plugin, from a subclass there."""

    def free_pages(self, group: int) -> IntArray:
        """int32 ids of all pages of a group that nobody holds or can find. The kit overwrites them with junk."""

    def shuffle_free_pages(self, rng: np.random.Generator) -> None:
        """Hand out free pages in random order from now on, so that page tables of every kind are met. Plans become
        stale. A manager that has an order of its own does nothing."""


#: Makes one: the layout first, then by name ``restore``, ``backoff_tokens``, ``eviction`` and ``tiers``, as
#: :class:`kvist.manager.PagedCacheManager` takes them.
ManagerFactory = Callable[..., ManagerUnderTest]
