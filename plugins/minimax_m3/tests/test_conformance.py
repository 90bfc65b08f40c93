"""The suites that the distribution ships, as one of its own tests; ``interpreted_kernels.py`` has the kernels' one."""

from __future__ import annotations

from kvist_minimax_m3.conformance import TestPackaging, TestReference, TestSpec

__all__ = ["TestPackaging", "TestReference", "TestSpec"]
