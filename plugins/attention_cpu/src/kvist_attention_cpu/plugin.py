"""Entry module of the plugin: imports no torch, but has the kernel compiled where that has not been done yet."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import AttentionBackendInfo
from kvist_attention_cpu.native import DTYPES, why_not

KVIST_SPEC = (1, 0)


@hookimpl
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """The C kernel. Where it cannot be compiled, its record says why and nobody is served by it."""
    return [
        AttentionBackendInfo(
            name="cpu-native",
            factory="kvist_attention_cpu.backend:NativeCpuBackend",
            devices=("cpu",),
            dtypes=DTYPES,
            families=("gqa",),
            features=frozenset({"window", "sink_tokens", "sink_logits", "softcap"}),
            install_hint="pip install kvist-attention-cpu, and a C compiler such as gcc",
            requires=("torch",),
            unavailable=why_not(),
        )
    ]
