"""Entry module: says what there is, and imports nothing heavy."""

from __future__ import annotations

from kvist.hookspecs import hookimpl
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo

KVIST_SPEC = (1, 0)

_INSTALL_HINT = "pip install 'kvist-gpt-oss-sinks[torch]'"


@hookimpl
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """GPT-OSS; the core's manager suits it."""
    return [
        CacheManagerInfo(
            name="gpt-oss-sinks",
            model_types=("gpt_oss",),
            spec_factory="kvist_gpt_oss_sinks.spec:cache_spec",
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
            name="gpt-oss-sinks-torch",
            factory="kvist_gpt_oss_sinks.attention:SinkBackend",
            devices=(ANY,),
            dtypes=(ANY,),
            families=("gpt-oss-sinks",),
            install_hint=_INSTALL_HINT,
            requires=("torch",),
        )
    ]
