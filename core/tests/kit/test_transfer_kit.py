"""The suites for transports pass those that are built in, and name the clause of what is wrong with others."""

from __future__ import annotations

from kvist.testing.transfer import TransceiverTests, TransportTests
from kvist.transfer.local import LocalTransport


class Local:
    factory = "kvist.transfer.local:LocalTransport"
    between_processes = False
    quiet_s = 0.0

    def kill(self, transport: LocalTransport) -> None:
        transport.network.kill(transport)


class Tcp:
    factory = "kvist.transfer.tcp:TcpTransport"


class Shm:
    factory = "kvist.transfer.shm:ShmTransport"


class TestLocal(Local, TransportTests):
    pass


class TestTcp(Tcp, TransportTests):
    pass


class TestShm(Shm, TransportTests):
    pass


class TestLocalTransceiver(Local, TransceiverTests):
    pass


class TestTcpTransceiver(Tcp, TransceiverTests):
    pass


class TestShmTransceiver(Shm, TransceiverTests):
    pass
