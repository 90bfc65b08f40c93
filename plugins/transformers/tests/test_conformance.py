"""The suites that the distribution ships, as one of its own tests."""

from __future__ import annotations

from kvist_transformers.conformance import TestPackaging, TestSpec

__all__ = ["TestPackaging", "TestSpec"]
