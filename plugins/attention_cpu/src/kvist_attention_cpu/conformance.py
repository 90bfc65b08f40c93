"""The plugin against the contract of Kvist: what ``kvist conform attention-cpu`` runs.

Needs ``kvist-attention-cpu[testing]``. The backend is tried where its kernel compiles.
"""

from __future__ import annotations

from kvist.testing.attention import GQABackendTests
from kvist.testing.packaging import PluginTests
from kvist_attention_cpu.native import why_not


class TestPackaging(PluginTests):
    """The distribution and its entry module."""

    name = "attention-cpu"


if not why_not():
    from kvist_attention_cpu.backend import NativeCpuBackend
    from kvist_attention_cpu.plugin import kvist_attention_backends

    class TestNative(GQABackendTests):
        """The C kernel."""

        backend = NativeCpuBackend
        (_record,) = kvist_attention_backends()
        features = _record.features
