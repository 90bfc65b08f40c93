"""The core's own plugin as its author would test it: the suites that ``kvist conform builtin`` runs."""

from __future__ import annotations

from typing import Any

from kvist.attention.cpu import CpuBackend
from kvist.attention.reference import ReferenceBackend
from kvist.builtin import kvist_attention_backends
from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.testing.attention import GQABackendTests
from kvist.testing.manager import CacheManagerTests
from kvist.testing.packaging import PluginTests

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
    """The C kernel where it compiles."""

    backend = CpuBackend
    features = DECLARED["cpu"]
