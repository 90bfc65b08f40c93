"""The suites: every clause of the transceivers' contract that can be tried from outside."""

from __future__ import annotations

from kvist.testing.transfer.layouts import LayoutTests
from kvist.testing.transfer.partners import PartnerTests
from kvist.testing.transfer.sessions import SessionTests
from kvist.testing.transfer.transports import TransportTests

__all__ = ["TransceiverTests", "TransportTests"]


class TransceiverTests(SessionTests, PartnerTests, LayoutTests):
    """Kvist's own transceiver over a transport: subclass it as ``class TestTransceiver(TransceiverTests)`` and fill in
    what :class:`~kvist.testing.transfer.author.TransportAuthor` names.

    Tests that end processes are marked ``slow``; each is over within 20 s.
    """
