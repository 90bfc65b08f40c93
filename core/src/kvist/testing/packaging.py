"""Tests of a plugin as a distribution: what its metadata declares, and what its entry module does.

A plugin's own tests subclass them::

    class TestPackaging(PluginTests):
        name = "acme"

        def configs(self):
            return [{"model_type": "acme", "hidden_size": 64}]

        def bad_configs(self):
            return [({"model_type": "acme"}, "acme: config field 'hidden_size' is missing")]

Everything happens in clean processes, as at an operator's. The clauses are in ``docs/reference/contract/packaging.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from packaging.requirements import Requirement

from kvist.hookspecs import SPEC_VERSION
from kvist.plugins.discovery import CORE, canonical
from kvist.testing.outcomes import not_applicable, not_run_here
from kvist.testing.probe import Answer, Reply, ask

Config = Mapping[str, Any]


class PluginTests:
    """What every plugin fulfils, whatever it brings. An author fills in what is above the first test."""

    #: The entry point's name in the group ``kvist``.
    name: ClassVar[str]
    #: Where to look for the distribution when it is not installed: folders with its packages and its ``.dist-info``.
    folders: ClassVar[Sequence[Path]] = ()
    #: What spec factories are called with beside a config.
    block_tokens: ClassVar[int] = 16
    dtype: ClassVar[str] = "float32"

    def configs(self) -> Sequence[Config] | None:
        """Model configs that the plugin serves, small ones. ``None``: not told, and what needs them is not run."""
        return None

    def bad_configs(self) -> Sequence[tuple[Config, str]] | None:
        """Model configs that cannot work, each with the exact text of the error, hint included."""
        return None

    @pytest.mark.clause("PL-01")
    def test_it_is_found_in_metadata(self) -> None:
        known = self._metadata()
        assert len(known["places"]) == 1, f"{self.name!r} is offered by {' and '.join(known['places'])}"
        assert known["status"] == "ready", f"{self.name!r} is {known['status']}: {known['reason']}"

    @pytest.mark.clause("PL-02")
    def test_it_says_which_cores_it_fits(self) -> None:
        known = self._metadata()
        if known["core"]:
            not_applicable("a part of the core needs no requirement of it")
        mine = [Requirement(text) for text in known["requirements"]]
        mine = [each for each in mine if canonical(each.name) == CORE and each.marker is None]
        assert mine, 'the distribution does not require kvist; add e.g. "kvist>=0.1,<0.2" to its dependencies'
        operators = {specifier.operator for each in mine for specifier in each.specifier}
        shown = ", ".join(str(each) for each in mine)
        assert operators & {"<", "<=", "==", "~="}, f"{shown} has no upper bound, so a later core would be taken to fit"
        assert operators & {">", ">=", "==", "~="}, (
            f"{shown} has no lower bound, so an older core would be taken to fit"
        )
        assert known["status"] != "incompatible", known["reason"]

    @pytest.mark.clause("PL-03")
    def test_the_hook_version_can_be_read_without_running_it(self) -> None:
        known = self._metadata()
        assert known["status"] == "ready", known["reason"]
        assert known["spec"] is not None, (
            f"the source of the entry module assigns no literal to KVIST_SPEC; write `KVIST_SPEC = {SPEC_VERSION}`"
        )

    @pytest.mark.clause("PL-04")
    def test_the_entry_module_is_light(self) -> None:
        heavy = self._loading()["heavy"]
        assert not heavy, (
            f"loading the plugin imports {', '.join(heavy)}; import them in the modules that factories name, and look "
            "at the package's __init__ too"
        )

    @pytest.mark.clause("PL-05")
    def test_importing_it_changes_nothing(self) -> None:
        loaded = self._loading()
        assert not loaded["changed"], f"loading the plugin changes {', '.join(loaded['changed'])}"
        assert not loaded["printed"], f"loading the plugin prints:\n{loaded['printed']}"

    @pytest.mark.clause("PL-06")
    def test_its_hooks_return_records(self) -> None:
        loaded = self._loading()
        assert loaded["status"] == "loaded", f"{self.name!r} is {loaded['status']}: {loaded['reason']}"
        assert loaded["provides"], f"{self.name!r} loads, but its hooks return no record at all"

    @pytest.mark.clause("PL-07")
    def test_its_names_are_its_own(self) -> None:
        shared = self._ask("neighbours")["shared"]
        assert not shared, "; ".join(shared)

    @pytest.mark.clause("PL-08")
    def test_every_named_object_is_there(self) -> None:
        found = self._ask("factories")["objects"]
        assert found, f"{self.name!r} names no object"
        wrong = [f"{record}, {field}: {error}" for record, field, error in found if error]
        assert not wrong, "\n".join(wrong)

    @pytest.mark.clause("PL-09")
    def test_loading_it_again_gives_the_same(self) -> None:
        loaded = self._loading()
        assert loaded["status"] == "loaded", f"{self.name!r} is {loaded['status']}: {loaded['reason']}"
        assert loaded["again"] is not None, f"loaded a second time, {self.name!r} fails: {loaded['again_reason']}"
        assert loaded["again"] == loaded["provides"], "loaded a second time, its hooks return other records"

    @pytest.mark.clause("PL-09")
    def test_another_process_gets_the_same(self) -> None:
        loaded = self._loading()
        assert loaded["status"] == "loaded", f"{self.name!r} is {loaded['status']}: {loaded['reason']}"
        child = self._ask("elsewhere", plan=loaded["plan"], role="worker rank 1")
        assert not child["error"], child["error"]
        assert child["provides"] == loaded["provides"], "in another process its hooks return other records"

    @pytest.mark.clause("PL-10")
    def test_its_configs_become_specs(self) -> None:
        configs = self.configs()
        if not self._model_types():
            not_applicable("the plugin brings no cache manager")
        if configs is None:
            not_run_here("the author's class has no configs()")
        for config, (kind, text) in zip(configs, self._results(configs)):
            assert kind == "CacheSpec", f"{config!r} gives {kind or 'nothing'}: {text}"

    @pytest.mark.clause("PL-11")
    def test_an_empty_config_is_no_crash(self) -> None:
        types = self._model_types()
        if not types:
            not_applicable("the plugin brings no cache manager")
        configs = [{"model_type": model_type} for model_type in types]
        for config, (kind, text) in zip(configs, self._results(configs)):
            assert kind in ("CacheSpec", "SpecError"), (
                f"{config!r} gives {kind}: {text}; raise SpecError that names the field which is missing"
            )

    @pytest.mark.clause("PL-11")
    def test_bad_configs_give_the_documented_errors(self) -> None:
        bad = self.bad_configs()
        if not self._model_types():
            not_applicable("the plugin brings no cache manager")
        if bad is None:
            not_run_here("the author's class has no bad_configs()")
        for (config, wanted), (kind, text) in zip(bad, self._results([config for config, _ in bad])):
            assert kind == "SpecError", f"{config!r} gives {kind}: {text}; wanted is SpecError: {wanted}"
            assert text == wanted, f"{config!r}: the error is not as documented"

    def _metadata(self) -> Answer:
        return self._ask("metadata")

    def _loading(self) -> Answer:
        return self._ask("loading")

    def _model_types(self) -> list[str]:
        found: list[str] = self._configs(())["model_types"]
        return found

    def _results(self, configs: Sequence[Config]) -> list[list[str]]:
        found: list[list[str]] = self._configs(configs)["results"]
        return found

    def _configs(self, configs: Sequence[Config]) -> Answer:
        given = [dict(config) for config in configs]
        return self._ask("configs", given=given, block_tokens=self.block_tokens, dtype=self.dtype)

    def _ask(self, question: str, **values: Any) -> Answer:
        reply = _reply(self.name, tuple(self.folders), question, json.dumps(values))
        assert reply.answer is not None, (
            f'no distribution has an entry point {self.name!r} in the group "kvist"; add [project.entry-points.kvist] '
            f'{self.name} = "package.module" to pyproject.toml and install it again'
        )
        return {**reply.answer, "printed": reply.printed}


@cache
def _reply(name: str, folders: tuple[Path, ...], question: str, values: str) -> Reply:
    """What a process answers; the tests of one plugin share it, because starting one takes most of their time."""
    return ask(question, folders, name=name, **json.loads(values))
