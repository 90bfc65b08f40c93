"""The smallest complete plugin, and the files of a new one made from it: ``kvist new-plugin NAME``."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from kvist.errors import PluginError
from kvist.hookspecs import SPEC_VERSION
from kvist.plugins.discovery import CORE, PluginPlan, plan

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def plugin_files(name: str, core_version: str) -> dict[str, str]:
    """The files of a new plugin by their paths in its folder.

    name: of the entry point, and after ``kvist-`` of the distribution. core_version: that it shall fit, and every
    later one with the same minor version. Raises PluginError for a name that cannot be one.
    """
    if _NAME.fullmatch(name) is None or name.startswith(CORE):
        raise PluginError(
            f"{name!r} is no name for a plugin",
            hint="use lower-case letters and digits, in parts joined by '-' or '_', and leave out 'kvist'",
        )
    major, minor = core_version.split(".")[:2]
    package = f"kvist_{name.replace('-', '_')}"
    words = {
        "name": name,
        "distribution": f"kvist-{name.replace('_', '-')}",
        "package": package,
        "type": name.replace("-", "_"),
        "cores": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "spec": str(SPEC_VERSION),
    }
    sources = {
        "pyproject.toml": "pyproject.toml.txt",
        f"src/{package}/__init__.py": "plugin.py.txt",
        "tests/test_conformance.py": "test_conformance.py.txt",
    }
    folder = files("kvist.template") / "files"
    return {path: Template((folder / source).read_text("utf-8")).substitute(words) for path, source in sources.items()}


def create(name: str, folder: Path, installed: PluginPlan | None = None) -> list[Path]:
    """Write the files of a new plugin into ``folder``, which is made. Returns their paths.

    Raises PluginError, and writes nothing, for a bad name, for one that an installed plugin has, and for a folder that
    has something in it.
    """
    found = installed or plan({})
    made = plugin_files(name, found.core_version)
    for record in found.records:
        if record.name == name:
            raise PluginError(
                f"the name {name!r} is taken by {record.origin}",
                hint="choose another: two plugins of one name are never loaded together",
            )
    try:
        if folder.exists() and any(folder.iterdir()):
            raise PluginError(f"{folder} is not empty", hint="give another with --folder")
        for path, text in made.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"cannot write to {folder}: {error.strerror or error}") from error
    return [folder / path for path in made]
