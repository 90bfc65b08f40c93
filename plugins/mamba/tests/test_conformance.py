"""The suites that the distribution ships, as one of its own tests; ``interpreted_kernels.py`` has the kernels' one."""

from __future__ import annotations

from kvist_mamba.conformance import TestPackaging, TestReference, TestSpec
from kvist_mamba.inputs import KINDS

__all__ = ["TestPackaging", "TestReference", "TestSpec"]


def test_the_cases_have_every_kind_in_two_layers():
    assert {kind for case in TestReference.cases for kind in case.features} == set(KINDS)
    assert all(len(case.spec.layers) == 2 for case in TestReference.cases)
