"""Records refuse what cannot work, and say which field of which record."""

from __future__ import annotations

import pickle

import attrs
import pytest

from kvist.errors import PluginError
from kvist.records import AttentionBackendInfo, CacheManagerInfo, TransceiverInfo

FAMILY = {"name": "mamba", "model_types": ["mamba", "mamba2"], "spec_factory": "kvist_mamba.spec:cache_spec"}
BACKEND = {"name": "fast", "factory": "a.b:C", "devices": ["cpu"], "dtypes": ["*"], "families": ["gqa"]}
LINK = {"name": "ucx", "factory": "a.b:C", "schemes": ["ucx"]}

NAME = "use letters, digits, '-', '_' and '.', starting with a letter or digit"
TARGET = "name the object instead of importing it; it is imported when the record is selected"
ONE = "write one name as a tuple too: ('name',)"


def test_lists_become_immutable_and_records_can_be_hashed_and_pickled():
    info = CacheManagerInfo(**FAMILY, adapters={"transformers": "kvist_mamba.adapter:adapt"}, capabilities={"fork"})
    assert info.model_types == ("mamba", "mamba2")
    assert info.capabilities == frozenset({"fork"})
    assert pickle.loads(pickle.dumps(info)) == info
    assert len({info, attrs.evolve(info)}) == 1
    with pytest.raises(TypeError):
        info.adapters["other"] = "a:b"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        info.name = "other"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CacheManagerInfo, FAMILY | {"name": ""}, f"name must be a non-empty name, got ''\nhint: {NAME}"),
        (CacheManagerInfo, FAMILY | {"name": "a b"}, f"name must be a non-empty name, got 'a b'\nhint: {NAME}"),
        (CacheManagerInfo, FAMILY | {"name": 3}, f"name must be a non-empty name, got 3\nhint: {NAME}"),
        (
            CacheManagerInfo,
            FAMILY | {"model_types": "mamba"},
            f"'mamba': model_types must be a tuple of non-empty strings, got 'mamba'\nhint: {ONE}",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"model_types": ()},
            "'mamba': model_types must be a tuple with at least one name, got ()\n"
            "hint: a record that serves nothing can never be selected; leave it out",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"spec_factory": "kvist_mamba.spec"},
            f"'mamba': spec_factory must be a \"package.module:Name\" string, got 'kvist_mamba.spec'\nhint: {TARGET}",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"manager_factory": None},
            f"'mamba': manager_factory must be a \"package.module:Name\" string, got None\nhint: {TARGET}",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"adapters": {"transformers": "adapt"}},
            "'mamba': adapters must be a mapping of host names to \"package.module:Name\" strings, "
            "got {'transformers': 'adapt'}\nhint: for example {\"transformers\": \"my_plugin.transformers:adapt\"}",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"adapters": "transformers"},
            "'mamba': adapters must be a mapping of host names to \"package.module:Name\" strings, "
            'got \'transformers\'\nhint: for example {"transformers": "my_plugin.transformers:adapt"}',
        ),
        (
            CacheManagerInfo,
            FAMILY | {"capabilities": "fork"},
            f"'mamba': capabilities must be a set of non-empty strings, got 'fork'\nhint: {ONE}",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"priority": True},
            "'mamba': priority must be an int, got True\nhint: 0 is the default; higher is preferred",
        ),
        (
            CacheManagerInfo,
            FAMILY | {"install_hint": None},
            "'mamba': install_hint must be a string, got None\nhint: for example \"pip install 'kvist[torch]'\"",
        ),
        (
            AttentionBackendInfo,
            BACKEND | {"devices": "cpu"},
            f"'fast': devices must be a tuple of non-empty strings, got 'cpu'\nhint: {ONE}",
        ),
        (
            AttentionBackendInfo,
            BACKEND | {"requires": [""]},
            f"'fast': requires must be a tuple of non-empty strings, got ('',)\nhint: {ONE}",
        ),
        (
            TransceiverInfo,
            LINK | {"factory": "a-b:C"},
            f"'ucx': factory must be a \"package.module:Name\" string, got 'a-b:C'\nhint: {TARGET}",
        ),
    ],
)
def test_bad_fields(kind, fields, message):
    with pytest.raises(PluginError) as caught:
        kind(**fields)
    separator = " " if message.startswith("'") else ": "
    assert str(caught.value) == f"{kind.__name__}{separator}{message}"


def test_fields_are_given_by_name():
    with pytest.raises(TypeError):
        TransceiverInfo("ucx", "a.b:C", ("ucx",))
