"""The core's own backends: what every grouped-query backend is asked, and what only they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gqa_backend_cases import *  # noqa: F403
from gqa_backend_cases import Backend

from kvist.attention.gather import TorchCpuBackend
from kvist.attention.reference import ReferenceBackend


@pytest.fixture(params=[ReferenceBackend, TorchCpuBackend], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def test_they_write_the_same_bytes(make_cache: Any, make_case: Any) -> None:
    caches = []
    for backend in (ReferenceBackend, TorchCpuBackend):
        cache = make_cache(backend, make_case(window=30, dtype="float16", layers=2), [90, 40])
        cache.play(7)
        caches.append(cache)
    assert torch.equal(caches[0].memory.bytes, caches[1].memory.bytes)
