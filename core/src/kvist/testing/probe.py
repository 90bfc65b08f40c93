"""What the kit asks a clean process about a plugin, so that nothing that the tests imported is in the way.

:func:`ask` starts the process; the questions are the other public functions, which run in it. Questions and answers
are plain values. Nothing here imports torch, so that what a plugin imports can be told from what the kit does.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import importlib_metadata

from kvist.errors import KvistError, PluginError
from kvist.plugins import LoadedPlugin, examine, inspect_sources, load, plan
from kvist.plugins.discovery import ALLOW_VARIABLE, CORE, about, canonical
from kvist.records import ANY, AttentionBackendInfo, CacheManagerInfo, TransceiverInfo, targets
from kvist.registry import Entry

#: What an entry module must not import: each takes seconds, or needs a device.
HEAVY = ("torch", "triton", "transformers", "tensorflow", "jax", "cupy", "numba", "vllm", "sglang")

Answer = dict[str, Any]


@attrs.frozen
class Reply:
    """What a process answered: ``None`` when no plugin has the name.

    printed: all that it wrote to its standard output and error by itself.
    """

    answer: Answer | None
    printed: str


def ask(question: str, folders: Sequence[Path] = (), **values: Any) -> Reply:
    """Put a question of this module to a process of its own.

    folders: where distributions lie that are not installed; they come first on its path. The variables that choose
    plugins do not reach it. Raises AssertionError with its output when it does not answer.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVIST_")}
    paths = [*map(str, folders), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        told, heard = Path(folder, "question.json"), Path(folder, "answer.json")
        told.write_text(json.dumps([question, values]), encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, "-c", "from kvist.testing.probe import _main; _main()", str(told), str(heard)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not heard.exists():
            raise AssertionError(f"a clean process ended with exit code {ran.returncode} and printed:\n{ran.stdout}")
        return Reply(json.loads(heard.read_text(encoding="utf-8")), ran.stdout)


def _main() -> None:
    told, heard = Path(sys.argv[1]), Path(sys.argv[2])
    question, values = json.loads(told.read_text(encoding="utf-8"))
    known = any(record.name == values["name"] for record in plan({}).records)
    heard.write_text(json.dumps(_QUESTIONS[question](**values) if known else None), encoding="utf-8")


def metadata(name: str) -> Answer:
    """What is known of the plugin before it is imported."""
    found = [record for record in inspect_sources(plan({})).records if record.name == name]
    first = found[0]
    return {
        "places": [f"{record.origin} ({record.value})" for record in found],
        "status": first.status,
        "reason": first.reason,
        "core": canonical(first.distribution) == CORE,
        "spec": first.spec,
        "requirements": _requirements(first.distribution),
    }


def _requirements(distribution: str) -> list[str]:
    try:
        return about(importlib_metadata.distribution(distribution))[2]
    except importlib_metadata.PackageNotFoundError:
        return []


def loading(name: str) -> Answer:
    """What happens when the plugin is loaded, and loaded again. The answer carries the plan for other processes."""
    before, modules = _surroundings(), set(sys.modules)
    allowed = plan({ALLOW_VARIABLE: name})
    first = examine(allowed)
    record = next(record for record in first.plan.records if record.name == name)
    heavy = sorted({each.partition(".")[0] for each in set(sys.modules) - modules} & set(HEAVY))
    changed = [what for what, value in _surroundings().items() if before[what] != value]
    mine = _mine(name, first.plugins)
    again = examine(allowed)
    resolved = attrs.evolve(first.plan, resolved=True, problems=())
    return {
        "status": record.status,
        "reason": record.reason,
        "heavy": heavy,
        "changed": changed,
        "provides": mine,
        "again": _mine(name, again.plugins),
        "again_reason": next(each for each in again.plan.records if each.name == name).reason,
        "plan": base64.b64encode(pickle.dumps(resolved)).decode(),
    }


def elsewhere(name: str, plan: str, role: str) -> Answer:
    """What a child process gets that is given its parent's plan."""
    try:
        return {"error": "", "provides": _mine(name, load(pickle.loads(base64.b64decode(plan)), role=role).plugins)}
    except PluginError as error:
        return {"error": str(error), "provides": None}


def neighbours(name: str) -> Answer:
    """Names and equal claims that the plugin shares with another plugin of the environment, or with itself."""
    plugins = examine(plan({})).plugins
    entries = [Entry(info, plugin.record) for plugin in plugins for info in _infos(plugin)]
    shared = []
    for place, entry in enumerate(entries):
        for other in entries[place + 1 :]:
            if name in (entry.plugin.name, other.plugin.name) and type(entry.info) is type(other.info):
                if entry.info.name == other.info.name:
                    shared.append(f"{entry} and {other} have one name")
                elif what := _both_serve(entry.info, other.info):
                    shared.append(f"{entry} and {other} both serve {what} with the priority {entry.info.priority}")
    return {"shared": shared}


def factories(name: str) -> Answer:
    """Every object that the plugin's records name: its error, or nothing where it could be had."""
    found: list[list[str]] = []
    for entry in _entries(name):
        for field, target in targets(entry.info):
            error = ""
            try:
                named = entry.resolve(target)
            except PluginError as problem:
                error = str(problem)
            else:
                error = "" if callable(named) else f"{target!r} is {named!r}, which cannot be called"
            found.append([str(entry), field, error])
    return {"objects": found}


def configs(name: str, given: Sequence[Mapping[str, Any]], block_tokens: int, dtype: str) -> Answer:
    """What the plugin's spec factories make of model configs: ``[kind of result, text]`` for each."""
    by_type = {
        model_type: entry
        for entry in _entries(name)
        if isinstance(entry.info, CacheManagerInfo)
        for model_type in entry.info.model_types
    }
    results = []
    for config in given:
        entry = by_type.get(config.get("model_type", ""))
        if entry is None:
            results.append(["", f"no record of {name!r} serves the model type {config.get('model_type')!r}"])
            continue
        try:
            made = entry.resolve(entry.info.spec_factory)(config, block_tokens=block_tokens, dtype=dtype)
        except KvistError as error:
            results.append([type(error).__name__, str(error)])
        except Exception as error:
            results.append([f"{type(error).__name__}, which is no KvistError", str(error)])
        else:
            results.append([type(made).__name__, ""])
    return {"results": results, "model_types": sorted(by_type)}


def _infos(plugin: LoadedPlugin) -> Iterable[Any]:
    return (*plugin.cache_managers, *plugin.attention_backends, *plugin.transceivers)


def _entries(name: str) -> list[Entry[Any]]:
    plugins = examine(plan({ALLOW_VARIABLE: name})).plugins
    return [Entry(info, plugin.record) for plugin in plugins if plugin.record.name == name for info in _infos(plugin)]


def _mine(name: str, plugins: Iterable[LoadedPlugin]) -> list[list[Any]] | None:
    """Every field of every record of the plugin, as plain values; ``None`` when it was not loaded."""
    for plugin in plugins:
        if plugin.record.name == name:
            return [[type(info).__name__, _plain(attrs.asdict(info, recurse=False))] for info in _infos(plugin)]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in sorted(value.items())}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def _both_serve(info: Any, other: Any) -> str:
    """What two records of one kind would both be chosen for; empty if nothing."""
    if info.priority != other.priority:
        return ""
    if isinstance(info, CacheManagerInfo):
        common = set(info.model_types) & set(other.model_types)
    elif isinstance(info, TransceiverInfo):
        common = set(info.schemes) & set(other.schemes)
    else:
        assert isinstance(info, AttentionBackendInfo)
        together = _meet(info.devices, other.devices) and _meet(info.dtypes, other.dtypes)
        common = set(info.families) & set(other.families) if together else set()
    return ", ".join(repr(each) for each in sorted(common))


def _meet(some: tuple[str, ...], others: tuple[str, ...]) -> bool:
    return ANY in some or ANY in others or bool(set(some) & set(others))


def _surroundings() -> dict[str, Any]:
    """What importing a module has no business to change."""
    return {
        "environment variables": dict(os.environ),
        "the working folder": os.getcwd(),
        "sys.path": list(sys.path),
        "the number of threads": threading.active_count(),
        "the state of random": random.getstate(),
    }


_QUESTIONS: Mapping[str, Callable[..., Answer]] = {
    "metadata": metadata,
    "loading": loading,
    "elsewhere": elsewhere,
    "neighbours": neighbours,
    "factories": factories,
    "configs": configs,
}
