"""The plugin against the contract of Kvist: what ``kvist conform transceiver_ucx`` runs.

Needs ``kvist-transceiver-ucx[testing]``. UCX chooses the lanes; ``UCX_TLS=tcp`` tries it without shared memory.
"""

from __future__ import annotations

import os
from typing import ClassVar

from kvist.errors import TransferError
from kvist.testing.outcomes import not_run_here
from kvist.testing.packaging import PluginTests
from kvist.testing.transfer import TransceiverTests, TransportTests
from kvist_transceiver_ucx.library import load


class TestPackaging(PluginTests):
    """The distribution and its entry module."""

    name = "transceiver_ucx"


class _Ucx:
    factory = "kvist_transceiver_ucx.transport:UcxTransport"
    # Over TCP, UCX takes its time to connect.
    quiet_s: ClassVar[float] = 1.0 if os.environ.get("UCX_TLS") == "tcp" else 0.05

    def setup_method(self) -> None:
        """Nothing can be shown without a library."""
        try:
            load()
        except TransferError as error:
            not_run_here(error.message)


class TestTransport(_Ucx, TransportTests):
    """Two ends in one process."""


class TestTransceiver(_Ucx, TransceiverTests):
    """Requests between ends of one process, and between processes of this machine."""
