"""Conformance tests for attention backends: subclass :class:`AttentionBackendTests`, or :class:`GQABackendTests`.

The clauses are in ``docs/reference/contract/backends.md``.
"""

from kvist.testing.attention.case import TOLERANCES, Case
from kvist.testing.attention.gqa import GQABackendTests
from kvist.testing.attention.suite import AttentionBackendTests

__all__ = ["TOLERANCES", "AttentionBackendTests", "Case", "GQABackendTests"]
