"""Conformance tests for transports: subclass :class:`TransportTests` and :class:`TransceiverTests`.

The clauses are in ``docs/reference/contract/transceivers.md``.
"""

from kvist.testing.transfer.suite import TransceiverTests, TransportTests

__all__ = ["TransceiverTests", "TransportTests"]
