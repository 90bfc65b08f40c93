"""A new plugin: its files, what is refused, and the template of this repository, which is one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import importlib_metadata
import pytest
from uninstalled import environ_with

import kvist
from kvist.errors import PluginError
from kvist.plugins import plan
from kvist.template import create, plugin_files
from kvist.template.command import command
from kvist.testing.packaging import PluginTests
from kvist.testing.spec import CacheSpecTests

ROOT = Path(__file__).parents[3]
CORE_VERSION = importlib_metadata.version("kvist")


def refused(call, *arguments):
    with pytest.raises(PluginError) as caught:
        call(*arguments)
    return str(caught.value)


def test_the_template_of_the_repository_is_what_a_new_plugin_gets():
    """After a change: `kvist new-plugin template --folder plugins/_template`, into an empty folder."""
    made = plugin_files("template", CORE_VERSION)
    folder = ROOT / "plugins" / "_template"
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in (".py", ".toml")}
    assert there == set(made)
    assert {path: (folder / path).read_text() for path in made} == made


def test_a_new_plugin_passes_its_own_tests(tmp_path):
    made = create("two-words", tmp_path / "made")
    assert [path.relative_to(tmp_path / "made").as_posix() for path in made] == [
        "pyproject.toml",
        "src/kvist_two_words/__init__.py",
        "tests/test_conformance.py",
    ]
    environ = environ_with(tmp_path / "made", tmp_path / "site")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests"],
        env=environ,
        cwd=tmp_path / "made",
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    tests = [name for suite in (PluginTests, CacheSpecTests) for name in dir(suite) if name.startswith("test_")]
    assert f"{len(tests)} passed" in ran.stdout


def test_a_new_plugin_has_the_spec_that_it_describes(tmp_path):
    create("tiny", tmp_path)
    names = {"__name__": "tiny"}
    exec((tmp_path / "src/kvist_tiny/__init__.py").read_text(), names)
    config = {"model_type": "tiny", "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
    spec = names["cache_spec"](config, block_tokens=32, dtype="bfloat16")
    (group,) = kvist.Layout.build(spec, memory_bytes=1 << 20).groups
    # 3 layers x keys and values x 2 heads x 8 elements of 2 bytes, for 32 tokens
    assert (len(spec.layers), group.page_bytes) == (3, 3 * 2 * 2 * 8 * 2 * 32)
    assert names["cache_spec"]({**config, "head_dim": 4}, dtype="bfloat16").fingerprint != spec.fingerprint


@pytest.mark.parametrize("name", ["", "Mamba", "1st", "my plugin", "a--b", "-a", "../x", "kvist-mamba", "über"])
def test_a_name_that_cannot_be_one(name, tmp_path):
    assert refused(create, name, tmp_path / "made") == (
        f"{name!r} is no name for a plugin\n"
        "hint: use lower-case letters and digits, in parts joined by '-' or '_', and leave out 'kvist'"
    )
    assert not (tmp_path / "made").exists()


def test_a_name_that_is_taken(tmp_path):
    assert refused(create, "builtin", tmp_path / "made", plan({})) == (
        f"the name 'builtin' is taken by kvist {CORE_VERSION}\n"
        "hint: choose another: two plugins of one name are never loaded together"
    )


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert refused(create, "fresh", tmp_path) == f"{tmp_path} is not empty\nhint: give another with --folder"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (
        refused(create, "fresh", tmp_path / "mine.txt") == f"cannot write to {tmp_path / 'mine.txt'}: Not a directory"
    )


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command("my_family")
    assert capsys.readouterr().out == (
        "written: kvist-my-family/pyproject.toml\n"
        "written: kvist-my-family/src/kvist_my_family/__init__.py\n"
        "written: kvist-my-family/tests/test_conformance.py\n"
        "\ntry it:\n  pip install -e kvist-my-family 'kvist[testing]'\n  kvist plugins --load\n"
        "  pytest kvist-my-family\n"
    )


def test_the_command_is_one_of_the_cores():
    points = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["kvist.commands"]["new-plugin"] == f"{command.__module__}:{command.__name__}"
