"""The core's own backends against the kit, as a third party would run it."""

from __future__ import annotations

import pytest

from kvist.attention.cpu import CpuBackend
from kvist.attention.gather import TorchCpuBackend
from kvist.attention.reference import ReferenceBackend
from kvist.builtin import kvist_attention_backends
from kvist.testing.attention import GQABackendTests

DECLARED = {record.name: record.features for record in kvist_attention_backends()}


class TestReference(GQABackendTests):
    backend = ReferenceBackend
    features = DECLARED["torch-reference"]


class TestCpu(GQABackendTests):
    """The C kernel where it compiles."""

    backend = CpuBackend
    features = DECLARED["cpu"]


@pytest.mark.slow
class TestCpuWithoutKernel(GQABackendTests):
    backend = TorchCpuBackend
    features = DECLARED["cpu"]
