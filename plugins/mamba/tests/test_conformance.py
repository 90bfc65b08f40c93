"""The contract of attention backends, tried on the reference of every mixer, with both ways to take drafts back."""

from __future__ import annotations

from kvist.spec import CacheSpec
from kvist_mamba.backend import ReferenceBackend
from kvist_mamba.inputs import KINDS
from kvist_mamba.testing import RecurrentBackendTests, recurrent_case


class TestReferenceBackend(RecurrentBackendTests):
    backend = ReferenceBackend
    features = frozenset(KINDS)
    cases = (
        *RecurrentBackendTests.cases,
        recurrent_case("mamba2", rollback="replay", history_tokens=4),
        recurrent_case("mamba2", "bfloat16"),
        recurrent_case("delta_net", "bfloat16", rollback="replay", history_tokens=5),
    )


def test_the_cases_have_every_kind():
    assert {kind for each in TestReferenceBackend.cases for kind in each.features} == set(KINDS)
    assert all(isinstance(each.spec, CacheSpec) and len(each.spec.layers) == 2 for each in TestReferenceBackend.cases)
