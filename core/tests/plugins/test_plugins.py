"""Finding plugins without importing them, and loading what may be loaded."""

from __future__ import annotations

import multiprocessing
import pickle
import sys

import attrs
import importlib_metadata
import pytest

from kvist.errors import PluginError
from kvist.plugins import PluginPlan, PluginRecord, PluginWarning, examine, inspect_sources, load, plan

CORE_VERSION = importlib_metadata.version("kvist")

HOOK = """
from kvist.hookspecs import hookimpl
from kvist.records import CacheManagerInfo
KVIST_SPEC = {spec}
@hookimpl
def {hook}({parameters}):
    {body}
"""


def source(hook="kvist_cache_managers", spec="(1, 0)", parameters="", body="return []"):
    return HOOK.format(hook=hook, spec=spec, parameters=parameters, body=body)


def record(found: PluginPlan, name: str) -> PluginRecord:
    (only,) = [each for each in found.records if each.name == name]
    return only


def assert_not_imported(*names: str) -> None:
    assert not {f"{name}_plugin" for name in names} & set(sys.modules)


# Phase one


def test_a_good_plugin_is_ready_and_not_imported(site):
    site.add("good", version="1.2")
    found = record(plan(site.environ()), "good")
    assert found == PluginRecord("good", "kvist-good", "1.2", "good_plugin", status="ready")
    assert found.origin == "kvist-good 1.2"
    assert_not_imported("good")


def test_the_built_ins_come_through_the_same_door(site):
    found = record(plan(site.environ()), "builtin")
    assert (found.distribution, found.value, found.status) == ("kvist", "kvist.builtin", "ready")
    (builtin,) = [plugin for plugin in load(plan(site.environ())).plugins if plugin.record.name == "builtin"]
    assert [info.name for info in builtin.attention_backends] == ["torch-reference", "cpu-torch"]
    assert [info.name for info in builtin.transceivers] == ["local", "tcp", "shm"]
    assert builtin.record.hooks == ("kvist_attention_backends", "kvist_transceivers")


def test_deny_list_is_stripped_and_keeps_plugins_from_being_imported(site):
    site.add("good")
    site.add("other")
    found = plan(site.environ(KVIST_DISABLE_PLUGINS=" good , other "))
    assert record(found, "good").status == record(found, "other").status == "disabled"
    assert record(found, "good").reason == "denied by KVIST_DISABLE_PLUGINS"
    load(found)
    assert_not_imported("good", "other")


def test_deny_all(site):
    site.add("good")
    found = plan({"KVIST_DISABLE_PLUGINS": "*"})
    assert {each.status for each in found.records} == {"disabled"}
    assert load(found).plugins == ()


def test_allow_list_chooses_among_others_and_leaves_the_core(site):
    site.add("good")
    site.add("other")
    found = plan({"KVIST_PLUGINS": "good"})
    assert record(found, "good") == PluginRecord("good", "kvist-good", "1.0", "good_plugin", explicit=True)
    assert record(found, "other").status == "disabled"
    assert record(found, "other").reason == "not listed in KVIST_PLUGINS"
    assert record(found, "builtin").status == "ready"
    load(found)
    assert_not_imported("other")


@pytest.mark.parametrize(("value", "status"), [("", "disabled"), ("*", "ready")])
def test_empty_allow_list_means_none_and_a_star_all(site, value, status):
    site.add("good")
    assert record(plan(site.environ(KVIST_PLUGINS=value)), "good").status == status


def test_deny_wins_over_allow(site):
    site.add("good")
    found = plan(site.environ(KVIST_PLUGINS="good", KVIST_DISABLE_PLUGINS="good"))
    assert (record(found, "good").status, record(found, "good").explicit) == ("disabled", False)


def test_unknown_names_are_errors_with_the_nearest_match(site):
    site.add("good")
    found = plan({"KVIST_PLUGINS": "god", "KVIST_DISABLE_PLUGINS": "zzz"})
    with pytest.raises(PluginError) as caught:
        load(found)
    known = ", ".join(sorted([*site.real, "good"]))
    assert str(caught.value) == (
        "KVIST_PLUGINS names 'god', which is not installed; did you mean 'good'?\n"
        "KVIST_DISABLE_PLUGINS names 'zzz', which is not installed\n"
        f"hint: installed plugins: {known}"
    )


def test_two_distributions_with_one_name_conflict_and_neither_is_loaded(site):
    site.add("good", distribution="kvist-b", version="2.0")
    site.add("good", distribution="kvist-a")
    found = plan(site.environ())
    reason = "entry point 'good' is offered by kvist-a 1.0 and kvist-b 2.0; none of them is loaded"
    assert [(each.distribution, each.status, each.reason) for each in found.records if each.name == "good"] == [
        ("kvist-a", "conflict", reason),
        ("kvist-b", "conflict", reason),
    ]
    with pytest.warns(PluginWarning) as warned:
        load(found)
    assert [str(each.message).partition("\n")[0] for each in warned] == [
        f"plugin 'good' of kvist-a 1.0 is in conflict (entry point 'good' = 'good_plugin'): {reason}",
        f"plugin 'good' of kvist-b 2.0 is in conflict (entry point 'good' = 'good_plugin'): {reason}",
    ]
    hint = "\nhint: uninstall all but one of them, or add 'good' to KVIST_DISABLE_PLUGINS"
    assert all(str(each.message).endswith(hint) for each in warned)
    assert_not_imported("good")


def test_a_selected_conflict_is_an_error(site):
    site.add("good", distribution="kvist-b")
    site.add("good", distribution="kvist-a")
    with pytest.raises(PluginError) as caught:
        load(plan(site.environ(KVIST_PLUGINS="good")))
    reason = "entry point 'good' is offered by kvist-a 1.0 and kvist-b 1.0; none of them is loaded"
    assert str(caught.value) == (
        f"plugin 'good' (kvist-a 1.0) cannot be used: {reason}\n"
        f"plugin 'good' (kvist-b 1.0) cannot be used: {reason}\n"
        "hint: `kvist plugins` shows every installed plugin with its status"
    )


def test_the_names_of_the_core_cannot_be_taken_over(site):
    site.add("builtin", distribution="kvist-evil")
    found = plan(site.environ())
    assert [(each.distribution, each.status) for each in found.records if each.name == "builtin"] == [
        ("kvist", "ready"),
        ("kvist-evil", "conflict"),
    ]
    (evil,) = [each for each in found.records if each.distribution == "kvist-evil"]
    assert evil.reason == f"the name 'builtin' belongs to kvist {CORE_VERSION}"


def test_one_distribution_on_two_paths_counts_once(site):
    site.add("good", version="1.0")
    site.add("good", version="1.1", folder="earlier")
    assert record(plan(site.environ()), "good").version == "1.1"


@pytest.mark.parametrize("requirement", ["kvist<0.0.1", "Kvist[torch]<0.0.1"])
def test_too_old_plugins_are_found_by_their_metadata(site, requirement):
    site.add("old", requires=("attrs", requirement))
    found = record(plan(site.environ()), "old")
    assert (found.status, found.reason) == ("incompatible", f"needs kvist<0.0.1, have kvist {CORE_VERSION}")
    with pytest.warns(PluginWarning) as warned:
        load(plan(site.environ()))
    assert [str(each.message) for each in warned] == [
        "plugin 'old' of kvist-old 1.0 is incompatible (entry point 'old' = 'old_plugin'): "
        f"needs kvist<0.0.1, have kvist {CORE_VERSION}\n"
        "hint: install versions of kvist-old and kvist that fit, or add 'old' to KVIST_DISABLE_PLUGINS"
    ]
    assert_not_imported("old")


def test_requirements_that_do_not_apply_are_not_held_against_a_plugin(site):
    others = ("kvist-other<0.0.1", "kvist_more ~~ 1", "kvist-far @ https://example.invalid/far.whl", "")
    site.add("good", requires=("kvist>=0.0.1", 'kvist<0.0.1; extra == "old"', "kvist (>=0.0.1)", "kvist", *others))
    assert record(plan(site.environ()), "good").status == "ready"


def test_requirements_under_a_condition_that_holds_are_heeded(site):
    site.add("old", requires=('kvist[torch] (<0.0.1); python_version > "3"',))
    assert record(plan(site.environ()), "old").reason == f"needs kvist<0.0.1, have kvist {CORE_VERSION}"


def test_unreadable_requirement(site):
    site.add("good", requires=("kvist ~~ 1",))
    assert record(plan(site.environ()), "good").reason == "its metadata has an unreadable requirement 'kvist ~~ 1'"


def test_a_malformed_distribution_does_not_hide_the_others(site):
    site.add("good")
    site.add("fake")
    (path,) = site.root.glob("site/kvist_fake-*/entry_points.txt")
    path.write_text("[console_scripts]\nnonsense\n")
    found = plan(site.environ())
    assert record(found, "good").status == record(found, "builtin").status == "ready"
    odd = record(found, "kvist-fake")
    assert (odd.distribution, odd.version, odd.status) == ("kvist-fake", "1.0", "broken")
    assert odd.reason.startswith("its entry_points.txt cannot be read: TypeError: ")
    with pytest.warns(PluginWarning, match="plugin 'kvist-fake' of kvist-fake 1.0 is broken"):
        load(found)


def test_a_distribution_without_metadata_is_told(site):
    site.add("fake")
    (path,) = site.root.glob("site/kvist_fake-*/METADATA")
    path.unlink()
    found = record(plan(site.environ()), "fake")
    assert (found.status, found.reason) == ("broken", "the metadata of its distribution cannot be read")
    assert_not_imported("fake")


def test_strict_must_be_a_flag(site):
    with pytest.raises(PluginError) as caught:
        load(plan(site.environ(KVIST_STRICT_PLUGINS="yes")))
    assert str(caught.value) == (
        "KVIST_STRICT_PLUGINS must be 0 or 1, got 'yes'\nhint: unset KVIST_STRICT_PLUGINS or set it to 1"
    )


def test_a_core_that_is_not_installed_is_told(monkeypatch):
    def absent(name):
        raise importlib_metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib_metadata, "distribution", absent)
    with pytest.raises(PluginError) as caught:
        load(plan({}))
    assert str(caught.value) == (
        "the distribution 'kvist' is not installed, so its built-in plugins cannot be found\n"
        "hint: install it, e.g. `pip install -e ./core[testing]` in a checkout"
    )


# Phase two


def test_loading_gives_the_records(site):
    site.add("good")
    loaded = load(plan(site.environ()))
    (good,) = [plugin for plugin in loaded.plugins if plugin.record.name == "good"]
    assert [info.name for info in good.cache_managers] == ["good"]
    assert good.record == PluginRecord(
        "good", "kvist-good", "1.0", "good_plugin", status="loaded", spec=(1, 0), hooks=("kvist_cache_managers",)
    )
    assert record(loaded.plan, "good") == good.record


def test_loading_twice_is_harmless(site):
    site.add("good")
    first = load(plan(site.environ()))
    assert load(plan(site.environ())) == first
    assert load(first.plan) == first


def test_an_entry_point_may_name_an_instance(site):
    site.add(
        "object",
        "from kvist.hookspecs import hookimpl\nKVIST_SPEC = (1, 0)\n"
        "class Plugin:\n    @hookimpl\n    def kvist_transceivers(self):\n        return []\nplugin = Plugin()\n",
        value="object_plugin:plugin",
    )
    (loaded,) = [each for each in load(plan(site.environ())).plugins if each.record.name == "object"]
    assert loaded.record.hooks == ("kvist_transceivers",)


BROKEN = {
    "import error": ("import no_such_module_of_mine", "ModuleNotFoundError: No module named 'no_such_module_of_mine'"),
    "syntax error": ("def", "SyntaxError: invalid syntax (fake_plugin.py, line 1)"),
    "no version": (
        source(spec="None"),
        "declares no KVIST_SPEC; add `KVIST_SPEC = (1, 0)` to the module",
    ),
    "odd version": (source(spec="'1.0'"), "KVIST_SPEC must be a pair of ints such as (1, 0), got '1.0'"),
    "newer minor": (source(spec="(1, 9)"), "written for hook version 1.9, this kvist has 1.0"),
    "other major": (source(spec="(2, 0)"), "written for hook version 2.0, this kvist has 1.0"),
    "typo": (
        source(hook="kvist_cache_manager"),
        "implements the unknown hook 'kvist_cache_manager'; did you mean 'kvist_cache_managers'?",
    ),
    "no hook": ("KVIST_SPEC = (1, 0)", "implements no kvist hook; mark the functions with kvist.hookspecs.hookimpl"),
    "default": (
        source(parameters="extra=1"),
        "kvist_cache_managers takes 'extra=1'; only plain positional parameters without defaults work",
    ),
    "keyword only": (
        source(parameters="*, extra"),
        "kvist_cache_managers takes 'extra'; only plain positional parameters without defaults work",
    ),
    "wrapper": (
        source(body="yield").replace("@hookimpl", "@hookimpl(wrapper=True)"),
        "kvist_cache_managers is a hook wrapper; hooks of kvist cannot be wrapped",
    ),
    "no list": (
        source(body="return None or 3"),
        "kvist_cache_managers must return a list of CacheManagerInfo, got int",
    ),
    "no return": (
        source(body="pass"),
        "kvist_cache_managers must return a list of CacheManagerInfo, got NoneType",
    ),
    "no record": (source(body="return ['x']"), "kvist_cache_managers must return CacheManagerInfo records, got str"),
    "raises half way": (source(body="raise RuntimeError('no')"), "RuntimeError: no"),
    "same name twice": (
        source(body="return [CacheManagerInfo(name='x', model_types=('y',), spec_factory='a:b')] * 2"),
        "kvist_cache_managers returns two records named 'x'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_installed_and_broken_is_one_warning_and_a_record(site, fault):
    text, reason = BROKEN[fault]
    site.add("fake", text)
    site.add("good")
    with pytest.warns(PluginWarning) as warned:
        loaded = load(plan(site.environ()))
    assert [str(each.message) for each in warned] == [
        f"plugin 'fake' of kvist-fake 1.0 is broken (entry point 'fake' = 'fake_plugin'): {reason}\n"
        "hint: mend or uninstall kvist-fake, or add 'fake' to KVIST_DISABLE_PLUGINS"
    ]
    assert (record(loaded.plan, "fake").status, record(loaded.plan, "fake").reason) == ("broken", reason)
    assert [plugin.record.name for plugin in loaded.plugins] == ["builtin", "good"]


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("how", [{"KVIST_PLUGINS": "fake"}, {"KVIST_STRICT_PLUGINS": "1"}])
def test_selected_or_strict_and_broken_raises(site, fault, how):
    text, reason = BROKEN[fault]
    site.add("fake", text)
    with pytest.raises(PluginError) as caught:
        load(plan(site.environ(**how)))
    assert str(caught.value) == (
        f"plugin 'fake' of kvist-fake 1.0 is broken (entry point 'fake' = 'fake_plugin'): {reason}\n"
        "hint: mend or uninstall kvist-fake, or add 'fake' to KVIST_DISABLE_PLUGINS"
    )
    assert caught.value.__cause__ is not None


def test_an_argument_the_hook_does_not_have_is_refused_by_pluggy(site):
    site.add("fake", source(parameters="config"))
    with pytest.raises(PluginError) as caught:
        load(plan(site.environ(KVIST_PLUGINS="fake")))
    assert "is broken (entry point 'fake' = 'fake_plugin'): PluginValidationError: " in str(caught.value)
    assert "{'config'}" in str(caught.value)


def test_a_class_is_no_plugin(site):
    site.add("fake", source() + "class Plugin: pass\n", value="fake_plugin:Plugin")
    with pytest.warns(PluginWarning, match="the entry point names a class; name a module or an instance"):
        load(plan(site.environ()))


def test_a_bad_record_says_which_field(site):
    site.add("fake", source(body="return [CacheManagerInfo(name='x', model_types=('y',), spec_factory='nowhere')]"))
    loaded = examine(plan(site.environ()))
    assert record(loaded.plan, "fake").reason == (
        "PluginError: CacheManagerInfo 'x': spec_factory must be a \"package.module:Name\" string, got 'nowhere'\n"
        "hint: name the object instead of importing it; it is imported when the record is selected"
    )


def test_examine_never_raises(site):
    site.add("fake", "1 / 0")
    found = examine(plan(site.environ(KVIST_PLUGINS="fake, nobody")))
    assert record(found.plan, "fake").reason == "ZeroDivisionError: division by zero"
    assert [problem.message for problem in found.plan.problems] == [
        "KVIST_PLUGINS names 'nobody', which is not installed"
    ]


# Reading versions from the source


def test_sources_tell_the_hook_version_without_being_run(site):
    site.add("good", "raise SystemExit('run!')\nKVIST_SPEC = (1, 0)")
    site.add("typed", "KVIST_SPEC: tuple[int, int] = (1, 0)")
    site.add("future", "KVIST_SPEC = (1, 9)")
    site.add("dynamic", "KVIST_SPEC = tuple([1, 0])")
    site.add("absent", None, value="absent_plugin")
    site.add("half", "def")
    found = inspect_sources(plan(site.environ()))
    assert [
        (each.name, each.status, each.spec, each.reason) for each in found.records if each.name not in site.real
    ] == [
        ("absent", "broken", None, "no module 'absent_plugin' can be found"),
        ("dynamic", "ready", None, ""),
        ("future", "broken", None, "written for hook version 1.9, this kvist has 1.0"),
        ("good", "ready", (1, 0), ""),
        ("half", "ready", None, ""),
        ("typed", "ready", (1, 0), ""),
    ]
    assert record(found, "builtin").spec == (1, 0)
    assert_not_imported("good", "typed", "future", "dynamic", "absent", "half")


# Other processes


def test_the_plan_can_be_pickled_and_compares_by_value(site):
    site.add("good")
    found = plan(site.environ())
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        found.strict = True


def test_a_spawned_child_loads_the_plan_of_its_parent(site):
    site.add("good")
    site.add("fake", "1 / 0")
    with pytest.warns(PluginWarning):
        parent = load(plan(site.environ()))
    elsewhere = attrs.evolve(record(parent.plan, "good"), version="0.9")
    others = tuple(each for each in parent.plan.records if each.name != "good")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(load, (parent.plan,)) == parent
        with pytest.raises(PluginError) as caught:
            pool.apply(load, (attrs.evolve(parent.plan, records=(elsewhere, *others)),), {"role": "worker rank 3"})
    message, hint = str(caught.value).split("\n")
    assert message.startswith("worker rank 3 (pid ")
    assert message.endswith("): the plan has kvist-good 0.9 for plugin 'good', here is version 1.0")
    assert hint == "hint: give every process the same environment, or make the plan again"


def test_a_child_that_lacks_a_distribution_names_itself(site):
    parent = plan(site.environ())
    absent = PluginRecord("far", "kvist-far", "1.0", "far_plugin")
    with pytest.raises(PluginError) as caught:
        load(attrs.evolve(parent, records=(*parent.records, absent)), role="worker rank 3")
    message = str(caught.value).partition("\n")[0]
    assert message.endswith("): the plan has kvist-far 1.0 for plugin 'far', which is not installed here")


def test_what_the_parent_loaded_must_load_in_the_child(site):
    site.add("good")
    parent = load(plan(site.environ())).plan
    del sys.modules["good_plugin"]
    site.add("good", "1 / 0  # other code")
    with pytest.raises(PluginError) as caught:
        load(parent, role="worker rank 3")
    message = str(caught.value).partition("\n")[0]
    assert message.startswith("worker rank 3 (pid ")
    assert message.endswith(
        "): plugin 'good' of kvist-good 1.0 is broken (entry point 'good' = 'good_plugin'): "
        "ZeroDivisionError: division by zero"
    )


def test_a_plan_for_other_hooks_is_refused(site):
    with pytest.raises(PluginError) as caught:
        load(attrs.evolve(plan(site.environ()), spec_version=(2, 0)), role="child")
    assert str(caught.value).partition("\n")[0].endswith("): the plan was made for hook version (2, 0), here is (1, 0)")
