"""Entry module: says what there is, and imports nothing heavy."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo

KVIST_SPEC = (1, 0)

_INSTALL_HINT = "pip install 'kvist-gated-delta-net[torch]'"


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """Qwen3-Next; the core's manager suits it."""
    return [
        CacheManagerInfo(
            name="gated-delta-net",
            model_types=("qwen3_next",),
            spec_factory="kvist_gated_delta_net.spec:cache_spec",
            # An example gives way to whatever else serves the model.
            priority=-1,
            install_hint=_INSTALL_HINT,
        )
    ]


@hookimpl
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """One backend, on any device."""
    return [
        AttentionBackendInfo(
            name="gated-delta-net-torch",
            factory="kvist_gated_delta_net.attention:GatedDeltaBackend",
            devices=(ANY,),
            dtypes=(ANY,),
            families=("gated-delta-net",),
            install_hint=_INSTALL_HINT,
            requires=("torch",),
        )
    ]
