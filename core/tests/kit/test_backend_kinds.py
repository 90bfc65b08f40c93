"""The kit takes backends of every kind: rows of several tokens, rings, states. These pass; their mutants do not."""

from __future__ import annotations

import pytest
from kit.toys import DecaySuite, PlainSuite, PooledSuite, RingSuite


@pytest.mark.slow
class TestPlain(PlainSuite):
    """Attention in the clearest form, from which most mutants are made."""


class TestDecay(DecaySuite):
    """States."""


class TestPooled(PooledSuite):
    """Rows that stand for several tokens."""


class TestRing(RingSuite):
    """Windows that keep the last rows of a block only."""
