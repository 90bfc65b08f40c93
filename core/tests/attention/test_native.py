"""Building, caching and loading the C kernel, and what happens without it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvist
from kvist.attention import cpu, native
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
WARNING = "backend 'cpu' uses torch instead of its own kernel, which is slower: "
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")

QUICK = ("-O0", "-fPIC")

row = RowFormat((1, 16), "float32")
SPEC = CacheSpec((Layer(0, (Stream("k", row, History()), Stream("v", row, History()))),), 16, "test")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a new process, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("KVIST_CPU_KERNEL", raising=False)
    native.load_kernel.cache_clear()
    cpu._implementation.cache_clear()
    yield
    native.load_kernel.cache_clear()
    cpu._implementation.cache_clear()


def _choose() -> list[str]:
    """The tag of the chosen page layout, then every warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tags = [cpu.CpuBackend.page_layout(SPEC).tag for _ in range(2)]
    assert tags[0] == tags[1]
    return [tags[0], *(str(warning.message) for warning in caught)]


def _kernels(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "kvist" / "kernels").iterdir())


def _compiler(path: Path, script: str) -> str:
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_compiler
def test_processes_that_start_together_share_one_build(tmp_path: Path) -> None:
    code = f"from kvist.attention import native; print(native.build(native.find_compiler(), {QUICK}))"
    env = {**os.environ, "PYTHONPATH": str(Path(kvist.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    files = _kernels(tmp_path)
    assert outputs == [str(files[0])] * 3
    assert [bool(re.fullmatch(r"attention-[0-9a-f]{32}\.so", file.name)) for file in files] == [True]


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_kernel_is_cached_and_uses_the_openmp_runtime_of_torch(tmp_path: Path) -> None:
    assert _choose() == ["gqa-key-tiles-1"]
    assert len(_kernels(tmp_path)) == 1
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "omp" in line.split("/")[-1]}) == 1
    undefined = subprocess.run(["nm", "-D", str(_kernels(tmp_path)[0])], capture_output=True, text=True, check=True)
    assert "GOMP_parallel" in undefined.stdout


@needs_compiler
def test_the_name_covers_flags_and_compiler(tmp_path: Path) -> None:
    compiler = native.find_compiler()
    first = native.build(compiler, QUICK)
    changed = first.stat().st_mtime_ns
    assert native.build(compiler, QUICK) == first
    assert first.stat().st_mtime_ns == changed, "it was built again"
    assert native.build(compiler, (*QUICK, "-DOTHER")) != first
    wrapped = _compiler(tmp_path / "mycc", f'exec {" ".join(compiler)} "$@"\n')
    assert native.build([wrapped], QUICK) != first


def test_a_broken_compiler_falls_back_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'case "$1" in --version) echo 1.0;; *) echo "kernel.c:1: no such luck" >&2; exit 3;; esac\n'
    broken = _compiler(tmp_path / "badcc", script)
    monkeypatch.setenv("CC", broken)
    assert _choose() == ["row-major-1", f"{WARNING}{broken} ended with status 3: kernel.c:1: no such luck"]
    assert _kernels(tmp_path) == []


def test_a_compiler_that_builds_rubbish_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'for last; do :; done; case "$1" in --version) echo 1.0;; *) echo rubbish > "$last";; esac\n'
    monkeypatch.setenv("CC", _compiler(tmp_path / "oddcc", script))
    tag, warning = _choose()
    assert tag == "row-major-1"
    assert warning.startswith(WARNING)


def test_another_layout_of_the_arguments_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text(
        "long kvist_arguments_bytes(void) { return 8; } int kvist_attend(void *a) { return a != 0; }"
        "long kvist_scratch_floats(int a, int b, int c) { return a + b + c; }"
    )
    library = tmp_path / "old.so"
    subprocess.run([*native.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(native.KernelUnavailableError) as error:
        native._open(library)
    expected = ctypes.sizeof(native.LayerArguments) + ctypes.sizeof(native.StepArguments)
    assert str(error.value) == f"{library} takes arguments of 8 bytes, expected {expected}"


REASONS = [
    ({"KVIST_CPU_KERNEL": "0"}, "KVIST_CPU_KERNEL=0 switches it off"),
    ({"KVIST_CPU_KERNEL": "off"}, "KVIST_CPU_KERNEL=off switches it off"),
    ({"CC": "no-such-compiler -O2"}, "CC=no-such-compiler -O2 is not a program"),
    ({"PATH": "/nowhere"}, "there is no C compiler (cc, gcc, clang)"),
]


@pytest.mark.parametrize(("environment", "reason"), REASONS, ids=str)
def test_reasons_for_torch(environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _choose() == ["row-major-1", WARNING + reason]


@needs_compiler
def test_a_cache_that_cannot_be_made_is_replaced_by_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    target = native.build(native.find_compiler(), QUICK)
    assert target.exists()
    assert target.parent.stat().st_mode & 0o777 == 0o700
    assert native.build(native.find_compiler(), QUICK) == target
