"""The kernel's backend: what every grouped-query backend is asked, from ``core/tests/support``."""

from __future__ import annotations

import pytest
from gqa_backend_cases import *  # noqa: F403
from gqa_backend_cases import Backend

from kvist_attention_cpu.backend import NativeCpuBackend
from kvist_attention_cpu.native import why_not


@pytest.fixture
def backend() -> Backend:
    if reason := why_not():
        pytest.skip(f"no kernel: {reason}")
    return NativeCpuBackend
