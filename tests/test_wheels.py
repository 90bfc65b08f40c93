"""Every distribution as its users get it: a wheel, installed beside the core's and what it declares, and nothing else.

An environment is made for each, offline: the wheels are installed, and of the packages of this environment exactly
those are linked into it that the wheels ask for, directly or through others. So a file that the wheel lacks or a
dependency that nobody declared is missing there too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import importlib_metadata
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FOLDERS = [
    ROOT / "core",
    *(path.parent for kind in ("plugins", "examples") for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))),
]
PROJECTS = {folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS}
OURS = {canonicalize_name(project["name"]): folder for folder, project in PROJECTS.items()}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """The wheel of each folder, built without network by the build backend that is installed here."""
    target = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    ran = subprocess.run([*command, "--wheel-dir", target, *FOLDERS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in target.glob("*.whl")}
    return {folder: built[PROJECTS[folder]["name"]] for folder in FOLDERS}


#: Extras that ask for the same library as another one, built for something that development does not have.
OTHER_BUILDS = {"cu13"}


def needed(requirements: Iterable[str], extras: frozenset[str] = frozenset()) -> Iterator[tuple[str, frozenset[str]]]:
    """Names and extras of the requirements that apply here."""
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(folder: Path, *, extras: bool) -> tuple[set[Path], set[str]]:
    """What an installer would bring: folders of this repository, and names of distributions of others."""
    project = PROJECTS[folder]
    optional = project.get("optional-dependencies", {})
    todo = list(needed(project["dependencies"]))
    chosen = [texts for extra, texts in optional.items() if extra not in OTHER_BUILDS]
    todo += [each for texts in chosen for each in needed(texts)] if extras else []
    folders, others, seen = {folder}, set(), set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        if name in OURS:
            its = PROJECTS[OURS[name]]
            folders.add(OURS[name])
            todo += needed(its["dependencies"])
            todo += [each for extra in wanted for each in needed(its["optional-dependencies"][extra])]
        else:
            others.add(name)
            todo += needed(importlib_metadata.distribution(name).requires or (), wanted)
    return folders, others


def link(name: str, site: Path) -> None:
    """Make a distribution of this environment importable from the folder ``site``."""
    distribution = importlib_metadata.distribution(name)
    for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
        source, target = Path(str(distribution.locate_file(top))), site / top
        if source.exists() and not target.exists():
            target.symlink_to(source)


def environment(where: Path, wheels: dict[Path, Path], folder: Path, *, extras: bool) -> Path:
    """The interpreter of a new environment with the distribution and what it asks for."""
    venv.create(where, with_pip=False, symlinks=True)
    python = where / "bin" / "python"
    (site,) = where.glob("lib/python*/site-packages")
    folders, others = closure(folder, extras=extras)
    for name in others:
        link(name, site)
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    ran = subprocess.run([*command, *(wheels[each] for each in folders)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return python


def python(executable: Path, *arguments: str, cwd: Path | None = None) -> str:
    """What it prints; it must succeed and say nothing else."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KVIST_", "PYTHON"))}
    ran = subprocess.run([executable, *arguments], env=environ, cwd=cwd, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    return ran.stdout


def modules(folder: Path) -> list[str]:
    paths = (path.relative_to(folder / "src").with_suffix("") for path in (folder / "src").rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


def shipped(folder: Path) -> set[str]:
    """Files of the package, as they lie in the source."""
    files = (path for path in (folder / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder / "src").as_posix() for path in files}


IMPORT_ALL = """
import importlib, json, sys
missing = {}
for module in json.loads(sys.argv[1]):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing[module] = error.name
print(json.dumps(missing))
"""

RESOLVE_ALL = """
import sys
from kvist.plugins import load, plan
from kvist.records import targets
from kvist.registry import Registry
registry = Registry(load(plan({})))
for kind in (registry.cache_managers, registry.attention_backends, registry.transceivers):
    for entry in (entry for entry in kind.values() if entry.plugin.distribution == sys.argv[1]):
        for _, target in targets(entry.info):
            entry.resolve(target)
"""


def names(folders: Iterable[Path]) -> set[str]:
    """The entry points of the group kvist that the folders declare."""
    return {name for folder in folders for name in PROJECTS[folder]["entry-points"]["kvist"]}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_wheel_has_every_file_and_says_what_it_needs(folder, wheels):
    with zipfile.ZipFile(wheels[folder]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        text = wheel.read(metadata).decode()
    assert packed == shipped(folder)
    required = {canonicalize_name(Requirement(line).name) for line in re.findall("^Requires-Dist: (.*)$", text, re.M)}
    optional = [each for texts in PROJECTS[folder].get("optional-dependencies", {}).values() for each in texts]
    declared = [*PROJECTS[folder]["dependencies"], *optional]
    assert required == {canonicalize_name(Requirement(each).name) for each in declared}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_loads_beside_the_core_alone(folder, wheels, tmp_path):
    clean = environment(tmp_path, wheels, folder, extras=False)
    told = json.loads(python(clean, "-m", "kvist", "plugins", "--load", "--json"))
    assert told["problems"] == []
    folders, _ = closure(folder, extras=False)
    assert {record["name"]: (record["status"], record["reason"]) for record in told["plugins"]} == dict.fromkeys(
        names(folders), ("loaded", "")
    )
    assert PROJECTS[folder]["name"] in {record["distribution"] for record in told["plugins"]}
    # A module either imports, or says what of an extra it lacks.
    lacking = json.loads(python(clean, "-I", "-W", "error", "-c", IMPORT_ALL, json.dumps(modules(folder))))
    extra = closure(folder, extras=True)[1] - closure(folder, extras=False)[1]
    assert set(map(canonicalize_name, lacking.values())) <= extra, lacking
    for command in PROJECTS[folder]["entry-points"].get("kvist.commands", {}):
        assert "--help" in python(tmp_path / "bin" / "kvist", command, "--help")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_all_of_it_works_with_its_extras(folder, wheels, tmp_path):
    full = environment(tmp_path, wheels, folder, extras=True)
    assert python(full, "-I", "-W", "error", "-c", IMPORT_ALL, json.dumps(modules(folder))) == "{}\n"
    assert python(full, "-I", "-W", "error", "-c", RESOLVE_ALL, PROJECTS[folder]["name"]) == ""


def test_the_core_alone_makes_a_plugin(wheels, tmp_path):
    environment(tmp_path / "venv", wheels, ROOT / "core", extras=False)
    python(tmp_path / "venv" / "bin" / "kvist", "new-plugin", "fresh", cwd=tmp_path)
    made = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "kvist-fresh").rglob("*") if path.is_file()}
    assert made == {
        "kvist-fresh/pyproject.toml",
        "kvist-fresh/src/kvist_fresh/__init__.py",
        "kvist-fresh/tests/test_conformance.py",
    }
