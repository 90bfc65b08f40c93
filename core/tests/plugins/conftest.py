"""Distributions that are not installed: a folder on the path with ``.dist-info`` and modules in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import importlib_metadata
import pytest

GOOD = """
from kvist.hookspecs import hookimpl
from kvist.records import CacheManagerInfo

KVIST_SPEC = (1, 0)

@hookimpl
def kvist_cache_managers():
    return [CacheManagerInfo(name={name!r}, model_types=({name!r},), spec_factory="{name}_plugin:spec")]

def spec(config):
    return config
"""


class FakeSite:
    """Makes distributions that live until the test ends."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.real = sorted({point.name for point in importlib_metadata.entry_points(group="kvist")})
        self._monkeypatch = monkeypatch
        self.path("site")

    def path(self, folder: str) -> Path:
        """A folder of its own on ``sys.path``, before the ones made earlier."""
        where = self.root / folder
        where.mkdir(exist_ok=True)
        if str(where) not in sys.path:
            self._monkeypatch.syspath_prepend(str(where))
        return where

    def add(
        self,
        name: str,
        source: str | None = GOOD,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        value: str | None = None,
        requires: tuple[str, ...] = (),
        commands: Mapping[str, str] | None = None,
        folder: str = "site",
    ) -> None:
        """A distribution ``kvist-<name>`` with the plugin ``<name>`` in the module ``<name>_plugin``."""
        where = self.path(folder)
        distribution = distribution or f"kvist-{name}"
        info = where / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        points = ""
        if source is not None or value is not None:
            points += f"[kvist]\n{name} = {value or f'{name}_plugin'}\n"
        if commands:
            points += "[kvist.commands]\n" + "".join(f"{key} = {target}\n" for key, target in commands.items())
        (info / "entry_points.txt").write_text(points)
        if source is not None:
            (where / f"{name}_plugin.py").write_text(source.replace("{name!r}", repr(name)).replace("{name}", name))

    def environ(self, **variables: str) -> dict[str, str]:
        """Variables that switch off what happens to be installed beside the core, plus the given ones."""
        denied = [name for name in self.real if name != "builtin"]
        if extra := variables.pop("KVIST_DISABLE_PLUGINS", ""):
            denied.append(extra)
        return {"KVIST_DISABLE_PLUGINS": ",".join(denied), **variables}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    for variable in ("KVIST_PLUGINS", "KVIST_DISABLE_PLUGINS", "KVIST_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    yield FakeSite(tmp_path, monkeypatch)
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]
