"""The suites that the distribution ships, as one of its own tests."""

from __future__ import annotations

import kvist_attention_cpu.conformance
from kvist_attention_cpu.conformance import TestPackaging

__all__ = ["TestPackaging"]

if hasattr(kvist_attention_cpu.conformance, "TestNative"):  # not without a compiler
    TestNative = kvist_attention_cpu.conformance.TestNative
