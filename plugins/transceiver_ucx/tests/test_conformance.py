"""The suites that the distribution ships, as its own tests."""

from __future__ import annotations

import pytest

from kvist_transceiver_ucx import conformance
from kvist_transceiver_ucx.conformance import TestPackaging, TestTransport

__all__ = ["TestPackaging", "TestTransport"]


@pytest.mark.slow
class TestTransceiver(conformance.TestTransceiver):
    pass
