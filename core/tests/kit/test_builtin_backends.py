"""The core's own backends against the kit, as a third party would run it."""

from __future__ import annotations

from kvist.testing.builtin import TestCpu, TestReference

__all__ = ["TestCpu", "TestReference"]
