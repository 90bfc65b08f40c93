"""The plugin against the contract of Kvist: what ``kvist conform transceiver_ucx`` runs.

Needs ``kvist-transceiver-ucx[testing]``. UCX chooses the lanes. With ``UCX_TLS=tcp`` the tests that kill a writer would
fail: UCX ends the process that is written to.
"""

from __future__ import annotations

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
