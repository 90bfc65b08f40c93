"""From names to records and objects."""

from __future__ import annotations

import warnings

import attrs
import pytest

from kvist import registry as registry_module
from kvist.errors import PluginError
from kvist.plugins import LoadedPlugin, LoadedPlugins, PluginPlan, PluginRecord, PluginWarning, plan
from kvist.records import AttentionBackendInfo, CacheManagerInfo, TransceiverInfo
from kvist.registry import Entry, Registry, default_registry, resolve

SPEC = "kvist.errors:SpecError"
LIST_HINT = "hint: `kvist plugins` shows every installed plugin with its status"


def family(name, *model_types, **fields):
    return CacheManagerInfo(name=name, model_types=model_types, spec_factory=SPEC, **fields)


def backend(name, devices=("cpu",), dtypes=("*",), families=("gqa",), **fields):
    return AttentionBackendInfo(name=name, factory=SPEC, devices=devices, dtypes=dtypes, families=families, **fields)


def transceiver(name, *schemes, **fields):
    return TransceiverInfo(name=name, factory=SPEC, schemes=schemes, **fields)


def build(**plugins):
    """A registry over plugins given as ``plugin=[records]``; each comes from ``kvist-<plugin> 1.0``."""
    loaded = []
    for name, infos in plugins.items():
        record = PluginRecord(name, f"kvist-{name}", "1.0", f"{name}_plugin", status="loaded", spec=(1, 0))
        kinds = (CacheManagerInfo, AttentionBackendInfo, TransceiverInfo)
        loaded.append(LoadedPlugin(record, *(tuple(i for i in infos if isinstance(i, kind)) for kind in kinds)))
    found = PluginPlan("0.1.0", (1, 0), False, tuple(each.record for each in loaded), resolved=True)
    return Registry(LoadedPlugins(found, tuple(loaded)))


def refused(call, *arguments, **named):
    with pytest.raises(PluginError) as caught:
        call(*arguments, **named)
    return str(caught.value)


# Cache managers


def test_a_model_type_finds_its_family():
    registry = build(a=[family("llamas", "llama", "mistral")], b=[family("mambas", "mamba2")])
    entry = registry.cache_manager("mamba2")
    assert (entry.info.name, entry.plugin.origin) == ("mambas", "kvist-b 1.0")
    assert entry.info.manager_factory == "kvist.manager:PagedCacheManager"


def test_a_model_type_that_nobody_serves():
    registry = build(a=[family("llamas", "llama", "mistral")])
    assert refused(registry.cache_manager, "lama") == (
        "no installed plugin serves model type 'lama'; did you mean 'llama'?\n"
        "hint: served are: llama, mistral; install the plugin of its family, or write one"
    )
    assert refused(build().cache_manager, "llama") == (
        "no installed plugin serves model type 'llama'\n"
        "hint: served are: none; install the plugin of its family, or write one"
    )


def test_a_named_family_must_exist_and_serve():
    registry = build(a=[family("llamas", "llama"), family("others", "other")])
    assert registry.cache_manager("llama", name="llamas").info.name == "llamas"
    assert refused(registry.cache_manager, "llama", name="llamaz") == (
        "there is no cache manager 'llamaz'; did you mean 'llamas'?\nhint: installed are: llamas, others"
    )
    assert refused(registry.cache_manager, "llama", name="others") == (
        "cache manager 'others' of kvist-a 1.0 does not serve model type 'llama'; it serves other"
    )


def test_a_tie_is_an_error():
    registry = build(a=[family("one", "llama")], b=[family("two", "llama")])
    assert refused(registry.cache_manager, "llama") == (
        "model type 'llama' is served by 'one' of kvist-a 1.0 and 'two' of kvist-b 1.0 with the same priority 0\n"
        "hint: choose one by name, or add the other's plugin to KVIST_DISABLE_PLUGINS"
    )
    assert registry.cache_manager("llama", name="two").info.name == "two"


def test_overriding_another_distribution_is_told():
    registry = build(a=[family("one", "llama")], b=[family("two", "llama", priority=5)])
    with pytest.warns(PluginWarning) as warned:
        assert registry.cache_manager("llama").info.name == "two"
    assert [str(each.message) for each in warned] == [
        "model type 'llama': 'two' of kvist-b 1.0 (priority 5) takes precedence over "
        "'one' of kvist-a 1.0 (priority 0)\nhint: choose by name to make this explicit"
    ]
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.cache_manager("llama", name="two").info.name == "two"


def test_priorities_within_one_distribution_need_no_telling():
    registry = build(a=[family("one", "llama"), family("two", "llama", priority=5)])
    assert registry.cache_manager("llama").info.name == "two"


def test_preceding_a_fallback_needs_no_telling():
    registry = build(a=[family("one", "llama", priority=-10)], b=[family("two", "llama")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.cache_manager("llama").info.name == "two"


# Attention backends

ASK = {"device": "cpu", "dtype": "float32", "family": "gqa"}


def test_the_backend_with_the_highest_priority_that_serves():
    registry = build(
        core=[
            backend("anywhere", devices=("*",), features=frozenset({"window"})),
            backend("fast", priority=10, dtypes=("float32",)),
        ]
    )
    assert registry.attention_backend(**ASK).info.name == "fast"
    assert registry.attention_backend(**ASK | {"dtype": "torch.bfloat16"}).info.name == "anywhere"
    assert registry.attention_backend(**ASK | {"device": "cuda:1"}).info.name == "anywhere"
    assert registry.attention_backend(**ASK, features={"window"}).info.name == "anywhere"


def test_the_built_in_backends():
    torch = pytest.importorskip("torch")
    registry = default_registry()
    asked = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "family": "gqa"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # preceding a fallback is not told
        assert registry.attention_backend(**asked).info.name in ("cpu-native", "cpu-torch")
    assert registry.attention_backend("cpu-torch", **asked).info.priority < 0
    assert registry.attention_backend("torch-reference", **asked).info.name == "torch-reference"


def test_no_backend_serves_gives_each_reason():
    registry = build(
        core=[
            backend("a", families=("mla",)),
            backend("b", devices=("cuda", "xpu")),
            backend("c", dtypes=("bfloat16",)),
            backend("d"),
            backend("e", features=frozenset({"window", "sinks"}), requires=("no_such_module_of_mine.part",)),
        ]
    )
    assert refused(registry.attention_backend, **ASK, features=["window", "sinks"]) == (
        "no attention backend serves family 'gqa' with sinks, window on cpu in float32:\n"
        "  'a' of kvist-core 1.0: serves the families mla\n"
        "  'b' of kvist-core 1.0: runs on cuda, xpu\n"
        "  'c' of kvist-core 1.0: computes in bfloat16\n"
        "  'd' of kvist-core 1.0: lacks sinks, window\n"
        "  'e' of kvist-core 1.0: needs the module 'no_such_module_of_mine.part', which is not installed\n" + LIST_HINT
    )
    assert refused(build().attention_backend, **ASK) == (
        "no attention backend serves family 'gqa' on cpu in float32: (none is installed)\n" + LIST_HINT
    )


def test_a_named_backend_is_never_exchanged():
    registry = build(core=[backend("fast", devices=("cuda",), install_hint="buy a GPU"), backend("slow")])
    assert registry.attention_backend("slow", **ASK).info.name == "slow"
    assert refused(registry.attention_backend, "fast", **ASK) == (
        "attention backend 'fast' of kvist-core 1.0 cannot serve family 'gqa' on cpu in float32: runs on cuda\n"
        "hint: buy a GPU"
    )
    assert refused(registry.attention_backend, "fasst", **ASK) == (
        "there is no attention backend 'fasst'; did you mean 'fast'?\nhint: installed are: fast, slow"
    )


# Transceivers


def test_schemes():
    registry = build(core=[transceiver("sockets", "tcp", "tcp6")], ucx=[transceiver("ucx", "ucx")])
    assert registry.transceiver("tcp6").info.name == "sockets"
    assert registry.transceiver("ucx", name="ucx").info.name == "ucx"
    assert refused(registry.transceiver, "ucxx") == (
        "no installed plugin serves address scheme 'ucxx'; did you mean 'ucx'?\nhint: served are: tcp, tcp6, ucx"
    )
    assert refused(registry.transceiver, "tcp", name="ucx") == (
        "transceiver 'ucx' of kvist-ucx 1.0 does not serve scheme 'tcp'; it serves ucx"
    )


# Names and objects


def test_one_name_from_two_plugins_is_refused_whatever_the_order():
    message = (
        "two plugins provide attention backend 'fast': 'a' of kvist-a 1.0 and 'b' of kvist-b 1.0\n"
        "hint: add one of the two plugins to KVIST_DISABLE_PLUGINS, or uninstall it"
    )
    assert refused(build, a=[backend("fast")], b=[backend("fast", priority=1)]) == message
    assert refused(build, b=[backend("fast", priority=1)], a=[backend("fast")]) == message


def test_one_name_for_records_of_two_kinds_is_fine():
    assert build(a=[family("x", "llama"), backend("x"), transceiver("x", "tcp")]).transceiver("tcp").info.name == "x"


def test_resolving():
    assert resolve("kvist.errors:KvistError.__init__") is not None
    assert refused(resolve, "kvist.errors") == "'kvist.errors' is not a \"package.module:Name\" string"
    assert refused(resolve, "kvist.errors:SpecEror", hint="look again") == (
        "'kvist.errors:SpecEror': there is no 'SpecEror'; did you mean 'SpecError'?\nhint: look again"
    )
    with pytest.raises(PluginError) as caught:
        resolve("no_such_module_of_mine:Name")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_record_resolves_in_its_own_name():
    record = PluginRecord("ucx", "kvist-ucx", "1.0", "ucx_plugin")
    entry = Entry(attrs.evolve(transceiver("ucx", "ucx"), factory="no_such_module_of_mine:Ucx"), record)
    message = (
        "cannot import 'no_such_module_of_mine' for 'ucx' of kvist-ucx 1.0: "
        "ModuleNotFoundError: No module named 'no_such_module_of_mine'\nhint: "
    )
    assert refused(entry.resolve, entry.info.factory) == message + "reinstall kvist-ucx, or choose another plugin"
    entry = attrs.evolve(entry, info=attrs.evolve(entry.info, install_hint="apt-get install libucp"))
    assert refused(entry.resolve, entry.info.factory) == message + "apt-get install libucp"
    assert Entry(transceiver("x", "x"), record).resolve(SPEC).__name__ == "SpecError"


def test_every_built_in_record_resolves():
    pytest.importorskip("torch")
    for entry in default_registry().attention_backends.values():
        if entry.plugin.name == "builtin":
            assert isinstance(entry.resolve(entry.info.factory), type)


# The registry of the process


def test_the_default_registry_is_made_once(site, monkeypatch):
    monkeypatch.setattr(registry_module, "_default", None)
    site.add("good")
    found = plan(site.environ())
    registry = default_registry(found)
    assert default_registry() is registry
    assert default_registry(found) is registry
    assert default_registry(registry.plan) is registry
    assert registry.cache_manager("good").info.name == "good"
    assert refused(default_registry, plan(site.environ(KVIST_DISABLE_PLUGINS="good"))) == (
        "this process has already loaded other plugins than the given plan names\n"
        "hint: pass the plan to the first call of default_registry()"
    )


def test_a_failed_default_registry_is_not_kept(site, monkeypatch):
    monkeypatch.setattr(registry_module, "_default", None)
    assert "KVIST_PLUGINS names 'nobody'" in refused(default_registry, plan(site.environ(KVIST_PLUGINS="nobody")))
    assert "builtin" in {record.name for record in default_registry(plan(site.environ())).plan.records}
