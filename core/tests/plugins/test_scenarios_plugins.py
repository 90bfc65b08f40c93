"""Scenarios 54 to 57 and the faults of other systems' plugin loaders, each with distributions on the path."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import attrs
import importlib_metadata
import pytest

from kvist import cli
from kvist.errors import PluginError
from kvist.layout import Layout, RowMajor
from kvist.plugins import PluginWarning, examine, inspect_sources, load, plan
from kvist.registry import Registry
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream

CORE_VERSION = importlib_metadata.version("kvist")

BACKEND = """
from kvist.hookspecs import hookimpl
from kvist.records import AttentionBackendInfo
KVIST_SPEC = (1, 0)
@hookimpl
def kvist_attention_backends():
    return [AttentionBackendInfo(name={backend!r}, factory={factory!r}, devices=("cpu",), dtypes=("*",),
                                 families=("gqa",), priority={priority})]
"""


def backend(name, factory="kvist.attention.reference:ReferenceBackend", priority=0):
    return BACKEND.format(backend=name, factory=factory, priority=priority)


def ask(registry, name=None):
    return registry.attention_backend(name, device="cpu", dtype="float32", family="gqa")


def registry_of(site, **variables):
    return Registry(load(plan(site.environ(**variables))))


def refused(call, *arguments, **named):
    with pytest.raises(PluginError) as caught:
        call(*arguments, **named)
    return str(caught.value)


# 54: broken, slow, unknown


def three(site):
    site.add("good")
    site.add("broken", "import no_such_module_of_mine")
    site.add("slow", "import time; time.sleep(60)")


def test_54_a_selecting_a_good_plugin_imports_no_other(site):
    """54 (a)"""
    three(site)
    registry = registry_of(site, KVIST_PLUGINS="good")
    assert registry.cache_manager("good").plugin.origin == "kvist-good 1.0"
    assert not {"broken_plugin", "slow_plugin"} & set(sys.modules)


def test_54_b_selecting_a_broken_plugin_ends_the_start(site):
    """54 (b)"""
    three(site)
    assert refused(registry_of, site, KVIST_PLUGINS="broken") == (
        "plugin 'broken' of kvist-broken 1.0 is broken (entry point 'broken' = 'broken_plugin'): "
        "ModuleNotFoundError: No module named 'no_such_module_of_mine'\n"
        "hint: mend or uninstall kvist-broken, or add 'broken' to KVIST_DISABLE_PLUGINS"
    )


def test_54_c_an_unknown_name_is_an_error_with_the_known_ones(site):
    """54 (c)"""
    three(site)
    known = ", ".join(sorted([*site.real, "good", "broken", "slow"]))
    assert refused(registry_of, site, KVIST_PLUGINS="goood") == (
        f"KVIST_PLUGINS names 'goood', which is not installed; did you mean 'good'?\nhint: installed plugins: {known}"
    )


def test_54_d_listing_imports_none(site):
    """54 (d)"""
    three(site)
    found = inspect_sources(plan(site.environ()))
    assert {"good", "broken", "slow"} <= {record.name for record in found.records if record.status == "ready"}
    assert not {"good_plugin", "broken_plugin", "slow_plugin"} & set(sys.modules)


HALF = """
from kvist.hookspecs import hookimpl
from kvist.records import AttentionBackendInfo, CacheManagerInfo, TransceiverInfo
KVIST_SPEC = (1, 0)
@hookimpl
def kvist_cache_managers():
    return [CacheManagerInfo(name="one", model_types=("one",), spec_factory="half_plugin:one")]
@hookimpl
def kvist_attention_backends():
    return [AttentionBackendInfo(name="two", factory="half_plugin:two", devices=["*"], dtypes=["*"], families=("two",))]
@hookimpl
def kvist_transceivers():
    raise RuntimeError("the third fails")
"""


def test_54_e_a_plugin_that_fails_half_way_leaves_nothing(site):
    """54 (e)"""
    site.add("half", HALF)
    site.add("good")
    with pytest.warns(PluginWarning, match="RuntimeError: the third fails"):
        registry = registry_of(site)
    assert "one" not in registry.cache_managers
    assert "two" not in registry.attention_backends
    assert "good" in registry.cache_managers


# 55: every process the same


ROLE = """
import pickle, sys
from kvist.errors import PluginError
from kvist.registry import default_registry
plan = pickle.loads(sys.stdin.buffer.read())
try:
    registry = default_registry(plan, role=sys.argv[1])
    default_registry(plan, role=sys.argv[1])  # a second call changes nothing
    print(registry.cache_manager("good").plugin.origin, registry.plan == plan)
except PluginError as error:
    print(error.message)
"""


def test_55_every_role_resolves_the_same_or_fails_by_name(site):
    """55: a scheduler, two workers and a headless process; one worker's environment lacks the package."""
    site.add("good", version="1.3")
    parent = load(plan(site.environ())).plan
    # A child's interpreter finds the core where this one does.
    core = os.pathsep.join(path for path in sys.path if path and not Path(path).is_relative_to(site.root))
    whole = os.pathsep.join([str(site.path("site")), core])
    roles = {"scheduler": whole, "worker rank 0": whole, "worker rank 1": core, "headless": whole}
    children = {
        role: subprocess.Popen(
            [sys.executable, "-c", ROLE, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        for role, path in roles.items()
    }
    said = {role: child.communicate(pickle.dumps(parent), timeout=60)[0].decode() for role, child in children.items()}
    lacking = said.pop("worker rank 1")
    assert said == dict.fromkeys(("scheduler", "worker rank 0", "headless"), "kvist-good 1.3 True\n")
    assert lacking == (
        f"worker rank 1 (pid {children['worker rank 1'].pid}): the plan has kvist-good 1.3 for plugin 'good', "
        "which is not installed here\n"
    )


# 56: one name, one place


def test_56_a_the_same_plugin_over_two_routes_is_registered_once(site):
    """56 (a): imported by its path before, found twice on the path, and loaded again."""
    site.add("good")
    site.path("again")
    site.add("good", folder="again")
    __import__("good_plugin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = load(plan(site.environ()))
        second = load(first.plan)
    assert first == second
    assert [plugin.record.name for plugin in first.plugins].count("good") == 1


def test_56_b_two_packages_with_one_name_whatever_the_order(site):
    """56 (b)"""
    for first, second in (("kvist-a", "kvist-b"), ("kvist-b", "kvist-a")):
        site.add("x", distribution=first, folder=f"{first} first")
        site.add("x", distribution=second, folder=f"{first} first")
        assert {record.reason for record in plan(site.environ()).records if record.name == "x"} == {
            "entry point 'x' is offered by kvist-a 1.0 and kvist-b 1.0; none of them is loaded"
        }


def test_56_c_the_name_of_a_built_in_plugin_is_refused(site):
    """56 (c)"""
    site.add("builtin", backend("mine"), distribution="kvist-evil")
    with pytest.warns(PluginWarning) as warned:
        registry = registry_of(site)
    assert [str(each.message) for each in warned] == [
        "plugin 'builtin' of kvist-evil 1.0 is in conflict (entry point 'builtin' = 'builtin_plugin'): "
        f"the name 'builtin' belongs to kvist {CORE_VERSION}\n"
        "hint: uninstall kvist-evil, or ask its authors for another name of the entry point"
    ]
    assert ask(registry).plugin.distribution == "kvist"


def test_56_d_a_blocked_plugin_is_listed_as_blocked(site):
    """56 (d)"""
    site.add("x")
    loaded = load(plan(site.environ(KVIST_DISABLE_PLUGINS="x")))
    (record,) = [record for record in loaded.plan.records if record.name == "x"]
    assert (record.status, record.reason) == ("disabled", "denied by KVIST_DISABLE_PLUGINS")
    assert "x_plugin" not in sys.modules


# 57: versions and methods

FULL = """
from kvist.attention.base import AttentionBackend
class {name}(AttentionBackend):
    @classmethod
    def page_layout(cls, spec): ...
    def __init__(self, context): ...
    def begin(self, step): ...
"""


def test_57_v1_arguments_come_in_one_object(site):
    """57 v1: whatever a later core passes to a backend is a new attribute of the context, not a new argument."""
    base = pytest.importorskip("kvist.attention.base")
    reference = pytest.importorskip("kvist.attention.reference")

    @attrs.frozen(kw_only=True)
    class LaterContext(base.BackendContext):
        pages: str

    row = RowFormat((1, 4), "float32")
    spec = CacheSpec((Layer(0, tuple(Stream(name, row, History()) for name in ("k", "v"))),), 16, "")
    memory = pytest.importorskip("kvist.memory.device").DeviceMemory(
        Layout.build(spec, memory_bytes=1 << 20, page_layout=RowMajor())
    )
    assert reference.ReferenceBackend(LaterContext(memory=memory, pages="described")) is not None


def test_57_v2_the_version_is_checked_before_anything_is_built(site):
    """57 v2"""
    for name, version, spec in (("major", "2.0", "(2, 0)"), ("minor", "1.4", "(1, 4)")):
        site.add(name, f"KVIST_SPEC = {spec}\nraise SystemExit('built')")
        (record,) = [each for each in inspect_sources(plan(site.environ())).records if each.name == name]
        assert (record.status, record.reason) == ("broken", f"written for hook version {version}, this kvist has 1.0")
    assert not {"major_plugin", "minor_plugin"} & set(sys.modules)


def test_57_v3_a_missing_method_is_named(site):
    """57 v3: a subclass of the contract's class, and a class of its own."""
    site.add("sub", backend("sub", "sub_backend:Sub"))
    site.add("own", backend("own", "own_backend:Own"))
    (site.path("site") / "sub_backend.py").write_text(FULL.format(name="Sub"))
    (site.path("site") / "own_backend.py").write_text("class Own:\n    def begin(self, step): ...\n")
    registry = registry_of(site)
    hint = "\nhint: update kvist-{}; its authors find such faults with `kvist conform`"
    entry = ask(registry, "sub")
    assert refused(entry.resolve, entry.info.factory) == (
        "'sub_backend:Sub' for 'sub' of kvist-sub 1.0 lacks forward, which AttentionBackend asks for"
        + hint.format("sub")
    )
    entry = ask(registry, "own")
    assert refused(entry.resolve, entry.info.factory) == (
        "'own_backend:Own' for 'own' of kvist-own 1.0 lacks forward, page_layout, which AttentionBackend asks for"
        + hint.format("own")
    )


MANAGER = """
from kvist.hookspecs import hookimpl
from kvist.manager import PagedCacheManager
from kvist.records import CacheManagerInfo
KVIST_SPEC = (1, 0)
@hookimpl
def kvist_cache_managers():
    return [CacheManagerInfo(name="half", model_types=("half",), spec_factory="half_plugin:spec",
                             manager_factory="half_plugin:Manager")]
def spec(config): ...
names = {name for name in dir(PagedCacheManager) if not name.startswith("_")} - {"fork", "probe"}
Manager = type("Manager", (), {name: getattr(PagedCacheManager, name) for name in names})
"""


def test_57_v3_a_manager_that_lacks_methods_is_named(site):
    """57 v3"""
    site.add("half", MANAGER)
    entry = registry_of(site).cache_manager("half")
    assert entry.resolve(entry.info.spec_factory)(None) is None
    assert refused(entry.resolve, entry.info.manager_factory) == (
        "'half_plugin:Manager' for 'half' of kvist-half 1.0 lacks fork, probe, which CacheManager asks for\n"
        "hint: update kvist-half; its authors find such faults with `kvist conform`"
    )


def test_57_v4_an_unknown_method_is_accepted(site):
    """57 v4"""
    site.add("more", backend("more", "more_backend:More"))
    extra = "    def forward(self, layer_id, inputs): ...\n    def later(self): ...\n"
    (site.path("site") / "more_backend.py").write_text(FULL.format(name="More") + extra)
    entry = ask(registry_of(site), "more")
    assert entry.resolve(entry.info.factory).__name__ == "More"


# The faults A to G of other systems


def test_fault_a_order_cannot_poison_the_built_ins(site):
    """A: a plugin that comes first in every order takes nothing away."""
    site.add("aaa", backend("aaa"))
    registry = registry_of(site)
    assert next(iter(registry.attention_backends)) == "aaa"
    assert {"aaa", "cpu-torch", "torch-reference"} <= set(registry.attention_backends)


def test_fault_b_import_and_hook_errors_are_one_policy(site):
    """B: failing at import and failing in a hook cost the same, one warning each; nothing is dropped silently."""
    site.add("early", "raise RuntimeError('no')")
    site.add("late", backend("late").replace("    return", "    raise RuntimeError('no')\n    return"))
    with pytest.warns(PluginWarning) as warned:
        load(plan(site.environ()))
    assert [str(each.message) for each in warned] == [
        f"plugin {name!r} of kvist-{name} 1.0 is broken (entry point {name!r} = '{name}_plugin'): RuntimeError: no\n"
        f"hint: mend or uninstall kvist-{name}, or add {name!r} to KVIST_DISABLE_PLUGINS"
        for name in ("early", "late")
    ]


ALL_KINDS = """
from kvist.hookspecs import hookimpl
from kvist.records import AttentionBackendInfo, CacheManagerInfo, TransceiverInfo
KVIST_SPEC = (1, 0)
@hookimpl
def kvist_cache_managers():
    return [CacheManagerInfo(name="m", model_types=("m",), spec_factory="all_plugin:thing")]
@hookimpl
def kvist_attention_backends():
    return [AttentionBackendInfo(name="b", factory="all_plugin:thing", devices=("*",), dtypes=("*",), families=("f",))]
@hookimpl
def kvist_transceivers():
    return [TransceiverInfo(name="t", factory="all_plugin:thing", schemes=("t",))]
def thing(): ...
"""


def test_fault_c_what_is_registered_can_be_used(site):
    """C: every kind of record can be selected by name and resolved."""
    site.add("all", ALL_KINDS)
    registry = registry_of(site)
    family = registry.cache_manager("m", name="m")
    attention = registry.attention_backend("b", device="cpu", dtype="int8", family="f")
    transport = registry.transceiver("t", name="t")
    assert family.resolve(family.info.spec_factory).__name__ == "thing"
    assert attention.resolve(attention.info.factory).__name__ == "thing"
    assert transport.resolve(transport.info.factory).__name__ == "thing"


def test_fault_d_a_built_in_is_never_replaced_silently(site):
    """D: its name is refused; a higher priority than another's is told; a choice by name is what was chosen."""
    site.add("fast", backend("cpu-torch"))
    message = (
        f"two plugins provide attention backend 'cpu-torch': 'builtin' of kvist {CORE_VERSION} and 'fast' of "
        "kvist-fast 1.0\n"
        "hint: add one of the two plugins to KVIST_DISABLE_PLUGINS, or uninstall it"
    )
    assert refused(registry_of, site) == message
    assert list(registry_of(site, KVIST_DISABLE_PLUGINS="builtin").attention_backends) == ["cpu-torch"]
    del sys.modules["fast_plugin"]
    site.add("fast", backend("fast", priority=99))
    assert ask(registry_of(site)).info.name == "fast", "built-in fallbacks are there to be preceded"
    site.add("solid", backend("solid"))
    registry = registry_of(site)
    with pytest.warns(PluginWarning) as warned:
        assert ask(registry).info.name == "fast"
    assert [str(each.message) for each in warned] == [
        "attention family 'gqa' on cpu in float32: 'fast' of kvist-fast 1.0 (priority 99) takes precedence over "
        "'solid' of kvist-solid 1.0 (priority 0)\nhint: choose by name to make this explicit"
    ]
    assert ask(registry, "cpu-torch").plugin.distribution == "kvist"


def test_fault_e_a_misspelt_hook_is_no_silence(site):
    """E"""
    site.add("typo", backend("x").replace("kvist_attention_backends", "kvist_attention_backend"))
    assert refused(registry_of, site, KVIST_PLUGINS="typo") == (
        "plugin 'typo' of kvist-typo 1.0 is broken (entry point 'typo' = 'typo_plugin'): implements the unknown hook "
        "'kvist_attention_backend'; did you mean 'kvist_attention_backends'?\n"
        "hint: mend or uninstall kvist-typo, or add 'typo' to KVIST_DISABLE_PLUGINS"
    )


def test_fault_f_loading_any_number_of_times_is_harmless(site):
    """F: no author has to ask whether a name is there already."""
    site.add("fast", backend("fast"))
    first = load(plan(site.environ()))
    for _ in range(3):
        assert load(plan(site.environ())) == first
        assert load(first.plan) == first
        assert "fast" in Registry(load(first.plan)).attention_backends


MISSING = {
    "a submodule": ("kvist.no_such_part:Backend", ""),
    "a package": ("no_such_module_of_mine:Backend", ""),
    "a submodule of a package that may be missing": ("kvist.no_such_part:Backend", "pip install more"),
}


@pytest.mark.parametrize("case", MISSING)
def test_fault_g_a_factory_that_cannot_exist_is_found_when_the_plugin_is_loaded(site, case):
    """G: not when a model is loaded, and without importing it."""
    factory, hint = MISSING[case]
    site.add("fake", backend("fake", factory).replace("priority=0", f"install_hint={hint!r}"))
    (record,) = [each for each in examine(plan(site.environ())).plan.records if each.name == "fake"]
    module = factory.partition(":")[0]
    assert record.status == "broken"
    assert record.reason == (
        f"AttentionBackendInfo 'fake': factory is {factory!r}, but no module {module!r} can be found"
    )


def test_fault_g_a_package_that_one_can_install_is_asked_for_on_selection(site):
    """G: a record that says how to get a missing package costs nothing until somebody wants it."""
    source = backend("far", "no_such_module_of_mine:Backend").replace("priority=0", "install_hint='pip install it'")
    site.add("far", source)
    entry = ask(registry_of(site), "far")
    assert refused(entry.resolve, entry.info.factory) == (
        "cannot import 'no_such_module_of_mine' for 'far' of kvist-far 1.0: "
        "ModuleNotFoundError: No module named 'no_such_module_of_mine'\nhint: pip install it"
    )


# Shadowing


@pytest.mark.parametrize("layout", ["good_plugin.py", "good_plugin/__init__.py"])
def test_a_module_that_hides_the_installed_one_is_told(site, layout):
    """A folder that happens to come first must not decide what runs under the plugin's name and version."""
    site.add("good")
    own = site.path("site") / "good_plugin.py"
    (info,) = site.path("site").glob("kvist_good-*.dist-info")
    (info / "RECORD").write_text("kvist_good-1.0.dist-info/METADATA,,\ngood_plugin.py,sha256=x,10\n")
    assert "good" in registry_of(site).cache_managers
    del sys.modules["good_plugin"]
    other = site.path("work") / layout
    other.parent.mkdir(exist_ok=True)
    other.write_text(own.read_text())
    reason = f"the module 'good_plugin' is hidden by {other}; the distribution's own is {own}"
    (record,) = [each for each in inspect_sources(plan(site.environ())).records if each.name == "good"]
    assert (record.status, record.reason) == ("broken", reason)
    assert refused(registry_of, site, KVIST_PLUGINS="good") == (
        f"plugin 'good' of kvist-good 1.0 is broken (entry point 'good' = 'good_plugin'): {reason}\n"
        "hint: mend or uninstall kvist-good, or add 'good' to KVIST_DISABLE_PLUGINS"
    )


# Telling everything, reading once


def test_the_command_line_reads_the_environment_once_for_its_commands(site, monkeypatch, capsys):
    site.add("say", None, commands={f"say{number}": "say_plugin:command" for number in range(10)})
    calls = []
    real = cli.entry_points
    monkeypatch.setattr(cli, "entry_points", lambda group: calls.append(group) or real(group))
    monkeypatch.setattr(sys, "argv", ["kvist", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main()
    assert "say9" in capsys.readouterr().out
    assert calls == [cli.COMMAND_GROUP]


def test_listing_loads_no_machinery_of_loading():
    """What costs time is imported by whoever needs it."""
    script = (
        "import sys, json; from kvist.plugins import inspect_sources, plan; inspect_sources(plan());"
        "print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    slow = {"numpy", "typer", "rich", "torch", "packaging.requirements", "email.parser", "kvist.plugins.loading"}
    assert not slow & set(json.loads(ran.stdout))
