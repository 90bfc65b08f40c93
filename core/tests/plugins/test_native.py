"""C files that are compiled once per machine, and what is said where they cannot be."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import kvist
from kvist.native import KernelUnavailableError, build, find_compiler, first_variant

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")

FLAGS = ("-O0", "-fPIC")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where kernels are kept; nothing is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "kvist" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def compiler(path: Path, script: str) -> str:
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def refusal(source: Path) -> str:
    with pytest.raises(KernelUnavailableError) as error:
        first_variant(source, lambda path: path)
    return str(error.value)


@needs_compiler
def test_the_first_variant_that_can_be_used_is(source: Path, cache: Path) -> None:
    assert first_variant(source, lambda path: ctypes.CDLL(str(path)).answer()) == 42
    tried = []

    def refuse_two(path: Path) -> int:
        tried.append(path)
        if len(tried) < 3:
            raise OSError("undefined symbol")
        return len(tried)

    assert first_variant(source, refuse_two) == 3
    assert {*tried} == {*cache.iterdir()}


@needs_compiler
def test_processes_that_start_together_share_one_build(source: Path, cache: Path) -> None:
    code = f"import sys, pathlib; from kvist import native as n; print(n.build(pathlib.Path({str(source)!r}), "
    code += f"n.find_compiler(), {FLAGS})); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(kvist.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    [file] = cache.iterdir()
    assert outputs == [str(file)] * 3
    assert re.fullmatch(r"answer-[0-9a-f]{32}\.so", file.name)


@needs_compiler
def test_the_name_covers_source_flags_and_compiler(source: Path, tmp_path: Path) -> None:
    command = find_compiler()
    first = build(source, command, FLAGS)
    changed = first.stat().st_mtime_ns
    assert build(source, command, FLAGS) == first
    assert first.stat().st_mtime_ns == changed, "it was built again"
    assert build(source, command, (*FLAGS, "-DOTHER")) != first
    wrapped = compiler(tmp_path / "mycc", f'exec {" ".join(command)} "$@"\n')
    assert build(source, [wrapped], FLAGS) != first
    source.write_text("int answer(void) { return 43; }\n")
    assert build(source, command, FLAGS) != first


def test_what_a_broken_compiler_says_is_told(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$1" in --version) echo 1.0;; *) echo "answer.c:1: no such luck" >&2; exit 3;; esac\n'
    broken = compiler(tmp_path / "badcc", script)
    monkeypatch.setenv("CC", broken)
    assert refusal(source) == f"{broken} ended with status 3: answer.c:1: no such luck"
    assert [*cache.iterdir()] == []


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CC", "no-such-compiler -O2", "CC=no-such-compiler -O2 is not a program"),
        ("PATH", "/nowhere", "there is no C compiler (cc, gcc, clang)"),
    ],
)
def test_there_is_no_compiler(
    variable: str, value: str, reason: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert refusal(source) == reason


@needs_compiler
def test_a_cache_that_cannot_be_made_is_replaced_by_a_private_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    target = build(source, find_compiler(), FLAGS)
    assert target.exists()
    assert target.parent.stat().st_mode & 0o777 == 0o700
    assert build(source, find_compiler(), FLAGS) == target
