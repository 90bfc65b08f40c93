"""The suite: every clause of the backends' contract that can be tried from outside."""

from __future__ import annotations

from kvist.testing.attention.pages import PageTests
from kvist.testing.attention.setup import SetupTests
from kvist.testing.attention.steps import StepTests
from kvist.testing.attention.values import ValueTests


class AttentionBackendTests(SetupTests, ValueTests, PageTests, StepTests):
    """Subclass it as ``class TestMine(AttentionBackendTests)`` and fill in what :class:`Author` names.

    What it cannot show: speed, behaviour at sizes beyond the cases, and anything about devices that are not here.
    """
