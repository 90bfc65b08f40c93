"""The core's own plugin as its author would test it: the suites that ``kvist conform builtin`` runs."""

from __future__ import annotations

from typing import Any

from kvist.attention.gather import TorchCpuBackend
from kvist.attention.reference import ReferenceBackend
from kvist.builtin import kvist_attention_backends
from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.testing.attention import GQABackendTests
from kvist.testing.manager import CacheManagerTests
from kvist.testing.packaging import PluginTests
from kvist.testing.transfer import TransceiverTests, TransportTests

#: Features by backend, as the records declare them.
DECLARED = {record.name: record.features for record in kvist_attention_backends()}


class TestPackaging(PluginTests):
    """The entry module that comes with the core."""

    name = "builtin"


class TestPagedCacheManager(CacheManagerTests):
    """The manager that records have by default."""

    def manager(self, layout: Layout, **options: Any) -> PagedCacheManager:
        return PagedCacheManager(layout, **options)


class TestReference(GQABackendTests):
    """The backend that runs anywhere."""

    backend = ReferenceBackend
    features = DECLARED["torch-reference"]


class TestCpu(GQABackendTests):
    """What gathers pages for torch."""

    backend = TorchCpuBackend
    features = DECLARED["cpu-torch"]


class TestTcp(TransportTests, TransceiverTests):
    """Between any two processes."""

    factory = "kvist.transfer.tcp:TcpTransport"


class TestShm(TransportTests, TransceiverTests):
    """Between processes of one host."""

    factory = "kvist.transfer.shm:ShmTransport"
