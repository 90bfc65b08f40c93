"""The suite for cache managers passes Kvist's own, and names the clause of what is wrong with others."""

from __future__ import annotations

from kvist.manager import PagedCacheManager
from kvist.testing.manager import CacheManagerTests


class TestPaged(CacheManagerTests):
    def manager(self, layout, **options):
        return PagedCacheManager(layout, **options)
