"""The tutorial on the first plugin: its commands and files, in order, as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from uninstalled import environ_with

PAGE = Path(__file__).parent.parent / "docs" / "tutorial" / "first-plugin.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text())

#: What the test does itself for a command that needs the network.
INSTALL = "pip install -e '.[torch]'"


def ran(arguments: list[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def written(folder: Path) -> list[str]:
    """Put every file of the tutorial where it says. The last block is no file."""
    paths = []
    for kind, text in BLOCKS:
        if kind in ("toml", "python") and (named := re.match(r"# ([\w/.]+\.\w+)\n", text)):
            (folder / named[1]).write_text(text[named.end() :])
            paths.append(named[1])
    return paths


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The finished plugin, and an environment that has it."""
    where = tmp_path_factory.mktemp("tutorial")
    ran(["kvist", "new-plugin", "chunked"], where)
    folder = where / "kvist-chunked"
    assert sorted(path.name for path in folder.iterdir()) == ["pyproject.toml", "src", "tests"]
    assert written(folder) == [
        "pyproject.toml",
        "src/kvist_chunked/retention.py",
        "src/kvist_chunked/__init__.py",
        "src/kvist_chunked/backend.py",
        "tests/test_conformance.py",
    ]
    return folder, environ_with(folder, where / "site")


def test_the_commands_are_those_that_the_test_runs():
    commands = [line for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
    assert commands == [
        "$ kvist new-plugin chunked",
        "$ cd kvist-chunked",
        f"$ {INSTALL}",
        "$ kvist plugins --load",
        "$ pytest",
    ]


def test_the_plugin_is_loaded_and_used(made):
    folder, environ = made
    (row,) = [
        line
        for line in ran(["kvist", "plugins", "--load"], folder, environ | {"COLUMNS": "160"}).splitlines()
        if "kvist-chunked" in line
    ]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "chunked",
        "kvist-chunked",
        "0.1.0",
        "1.0",
        "loaded",
        "chunked, chunked-torch",
    ]
    (use,) = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# ")]
    (folder / "use.py").write_text(use)
    printed = ran(["use"], folder, environ)
    assert printed == "'chunked-torch' of kvist-chunked 0.1.0 serves 2 layers that keep something\n"


def test_its_retention_has_all_that_one_has_to_have(made):
    """The kit says it too, in the slow set."""
    folder, environ = made
    check = "from kvist.spec import Retention\nfrom kvist_chunked.retention import Chunk\n"
    (folder / "check.py").write_text(check + "print(isinstance(Chunk(8), Retention))")
    assert ran(["check"], folder, environ) == "True\n"


@pytest.mark.slow
def test_the_plugin_passes_the_kit(made):
    folder, environ = made
    told = ran(["pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "error", "--strict-markers"], folder, environ)
    assert re.search(r"\d+ passed", told)
    assert "not run here" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "suite", "told"),
    [
        (
            "backend",
            " & (read // kept.chunk == queries[:, None] // kept.chunk)",
            "",
            "TestBackend",
            "AB-04 Outputs are those of dense",
        ),
        (
            "retention",
            "end = begin // block_tokens",
            "end = begin // block_tokens + 1",
            "TestSpec",
            "CM-04 A retention tells what queries read",
        ),
    ],
    ids=["attends across chunks", "drops a block too early"],
)
def test_the_faults_that_it_suggests_are_found(made, file, old, new, suite, told):
    folder, environ = made
    path = folder / "src" / "kvist_chunked" / f"{file}.py"
    right = path.read_text()
    assert right.count(old) == 1
    path.write_text(right.replace(old, new))
    try:
        with pytest.raises(AssertionError) as caught:
            ran(["pytest", "-q", "-p", "no:cacheprovider", "-k", suite], folder, environ)
    finally:
        path.write_text(right)
    assert told in str(caught.value)
