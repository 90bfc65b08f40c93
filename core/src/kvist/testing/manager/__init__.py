"""Conformance tests for cache managers: subclass :class:`CacheManagerTests`.

The clauses are in ``docs/reference/contract/managers.md``.
"""

from kvist.testing.manager.suite import CacheManagerTests

__all__ = ["CacheManagerTests"]
