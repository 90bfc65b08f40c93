"""What knowing the installed plugins costs: CPU time of a new process, beyond that of an interpreter doing nothing.

Fifty distributions lie in a folder on the path, each with its metadata, its entry point and the module that it names,
beside everything that is installed in this environment. Times are user and system time of the child process; the
interpreter alone and each case take turns, and a difference is taken repetition by repetition.

* import and list: ``import kvist``, then the plan of all plugins with versions, statuses and reasons.
* command: ``kvist plugins --json``, which is the same with the command line around it.
* load: the registry of the process, for which every plugin is imported and checked.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from records import Figure

FIGURES = ("plugins.import_and_list_ms", "plugins.command_ms", "plugins.load_ms")
LIMITS = {"plugins.import_and_list_ms": 150.0}

PLUGINS = 50

METADATA = """Metadata-Version: 2.4
Name: kvist-family-{number}
Version: 1.{number}
Summary: One of many
Requires-Python: >=3.11
Requires-Dist: kvist<1,>=0.1
Requires-Dist: torch>=2.8

A page of text.
"""

MODULE = """from kvist.hookspecs import hookimpl
from kvist.records import CacheManagerInfo

KVIST_SPEC = (1, 0)


@hookimpl
def kvist_cache_managers():
    return [
        CacheManagerInfo(
            name="family-{number}",
            model_types=("family_{number}",),
            spec_factory="kvist_family_{number}.plugin:spec",
        )
    ]


def spec(config):
    raise NotImplementedError
"""

LIST = """
import json, kvist
from kvist.plugins import inspect_sources, plan
found = inspect_sources(plan())
print(json.dumps([[record.name, record.status, record.spec] for record in found.records]))
"""
LOAD = """
import json, kvist
registry = kvist.default_registry()
print(json.dumps([[record.name, record.status, record.spec] for record in registry.plan.records]))
"""

NOTHING = ("-c", "pass")
CASES = {
    "plugins.import_and_list_ms": ("-c", LIST),
    "plugins.command_ms": ("-m", "kvist", "plugins", "--json"),
    "plugins.load_ms": ("-c", LOAD),
}


def install(folder: Path) -> None:
    """What pip would leave in a folder of packages."""
    for number in range(PLUGINS):
        info = folder / f"kvist_family_{number}-1.{number}.dist-info"
        package = folder / f"kvist_family_{number}"
        info.mkdir()
        package.mkdir()
        (info / "METADATA").write_text(METADATA.format(number=number))
        (info / "entry_points.txt").write_text(f"[kvist]\nfamily-{number} = kvist_family_{number}.plugin\n")
        files = [f"{info.name}/{name}" for name in ("METADATA", "entry_points.txt", "RECORD")]
        files += [f"{package.name}/{name}" for name in ("__init__.py", "plugin.py")]
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        (package / "__init__.py").write_text("")
        (package / "plugin.py").write_text(MODULE.format(number=number))


def run(arguments: tuple[str, ...], folder: Path) -> tuple[float, str]:
    """CPU time of one process in ms, and what it printed."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(folder))))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVIST_")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, *arguments], env={**environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3, ran.stdout


def check(case: str, printed: str) -> None:
    """Every plugin was seen, with the version of its hooks."""
    found = json.loads(printed)
    if isinstance(found, dict):
        found = [[each["name"], each["status"], each["hook_version"]] for each in found["plugins"]]
    status = "loaded" if case == "plugins.load_ms" else "ready"
    wanted = {(f"family-{number}", status, (1, 0)) for number in range(PLUGINS)}
    seen = {(name, state, tuple(spec or ())) for name, state, spec in found}
    if missing := wanted - seen:
        raise AssertionError(f"{case}: not listed as {status}: {sorted(missing)}")


def measure(options: argparse.Namespace) -> list[Figure]:
    runs = 5 if options.quick else 15
    times: dict[str, list[float]] = {case: [] for case in CASES}
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder)
        for case, arguments in CASES.items():  # the first run writes bytecode
            check(case, run(arguments, folder)[1])
        for _ in range(runs):
            bare.append(run(NOTHING, folder)[0])
            for case, arguments in CASES.items():
                times[case].append(run(arguments, folder)[0] - bare[-1])
    return [
        Figure(
            figure=case,
            value=statistics.median(values),
            unit="ms CPU",
            runs=runs,
            at_most=LIMITS.get(case),
            note=f"{PLUGINS} plugins; {min(values):.0f} to {max(values):.0f}; the interpreter alone takes "
            f"{statistics.median(bare):.0f} more",
        )
        for case, values in times.items()
    ]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
