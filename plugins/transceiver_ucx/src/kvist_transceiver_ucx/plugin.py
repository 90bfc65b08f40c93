"""Entry module of the plugin: loads neither cffi nor UCX."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import TransceiverInfo

KVIST_SPEC = (1, 0)


@hookimpl
def kvist_transceivers() -> list[TransceiverInfo]:
    """Everything that UCX finds: shared memory, TCP, and RDMA where the library has it."""
    return [
        TransceiverInfo(
            name="ucx",
            factory="kvist_transceiver_ucx.transport:UcxTransport",
            schemes=("ucx",),
            install_hint="pip install 'kvist-transceiver-ucx[cu12]'",
        )
    ]
