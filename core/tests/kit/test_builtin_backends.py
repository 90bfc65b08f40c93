"""The core's own backends against the kit, as a third party would run it."""

from __future__ import annotations

import pytest

from kvist.attention.gather import TorchCpuBackend
from kvist.testing.attention import GQABackendTests
from kvist.testing.builtin import DECLARED, TestCpu, TestReference

__all__ = ["TestCpu", "TestReference"]


@pytest.mark.slow
class TestCpuWithoutKernel(GQABackendTests):
    backend = TorchCpuBackend
    features = DECLARED["cpu"]
