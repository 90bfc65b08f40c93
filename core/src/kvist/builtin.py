"""The core's own plugin: the attention backends that need nothing beside torch, and the built-in transports.

No cache manager is here, because the core knows no model; a family's plugin brings it.
"""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import ANY, AttentionBackendInfo, TransceiverInfo

KVIST_SPEC = (1, 0)

_INSTALL_HINT = "pip install 'kvist[torch]'"
_GQA_FEATURES = frozenset({"window", "sink_tokens", "sink_logits", "softcap"})


@hookimpl
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """Fallbacks that need torch and nothing else: the reference, and what is faster on a CPU."""
    return [
        AttentionBackendInfo(
            name="torch-reference",
            factory="kvist.attention.reference:ReferenceBackend",
            devices=(ANY,),
            dtypes=(ANY,),
            families=("gqa",),
            features=_GQA_FEATURES,
            priority=-20,
            install_hint=_INSTALL_HINT,
            requires=("torch",),
        ),
        AttentionBackendInfo(
            name="cpu-torch",
            factory="kvist.attention.gather:TorchCpuBackend",
            devices=("cpu",),
            dtypes=("float32", "bfloat16", "float16"),
            families=("gqa",),
            features=_GQA_FEATURES,
            priority=-10,
            install_hint=_INSTALL_HINT,
            requires=("torch",),
        ),
    ]


@hookimpl
def kvist_transceivers() -> list[TransceiverInfo]:
    """Inside one process, for tests and demonstrations; between processes that a network or one host connects."""
    return [
        TransceiverInfo(name="local", factory="kvist.transfer.local:LocalTransport", schemes=("local",)),
        TransceiverInfo(name="tcp", factory="kvist.transfer.tcp:TcpTransport", schemes=("tcp",)),
        TransceiverInfo(name="shm", factory="kvist.transfer.shm:ShmTransport", schemes=("shm",)),
    ]
