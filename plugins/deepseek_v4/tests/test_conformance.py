"""The suites that the distribution ships, as one of its own tests; ``interpreted_kernels.py`` has the kernels' one."""

from __future__ import annotations

from kvist_deepseek_v4.conformance import TestPackaging, TestReference, TestSpec

__all__ = ["TestPackaging", "TestReference", "TestSpec"]
