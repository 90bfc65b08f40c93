"""Loading the kernel, and who serves where that cannot be."""

from __future__ import annotations

import ctypes
import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.errors import PluginError
from kvist.native import KernelUnavailableError, find_compiler
from kvist.plugins.loading import load
from kvist.registry import Registry, default_registry
from kvist_attention_cpu import native

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a new process, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    native.load_kernel.cache_clear()
    yield
    native.load_kernel.cache_clear()


def _kernels(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "kvist" / "kernels").iterdir())


def _compiler(path: Path, script: str) -> str:
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_kernel_is_cached_and_uses_the_openmp_runtime_of_torch(tmp_path: Path) -> None:
    assert native.why_not() == ""
    native.load_kernel()
    assert len(_kernels(tmp_path)) == 1, "it was built twice"
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "omp" in line.split("/")[-1]}) == 1
    undefined = subprocess.run(["nm", "-D", str(_kernels(tmp_path)[0])], capture_output=True, text=True, check=True)
    assert "GOMP_parallel" in undefined.stdout


def test_what_a_compiler_built_and_nobody_can_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'for last; do :; done; case "$1" in --version) echo 1.0;; *) echo rubbish > "$last";; esac\n'
    monkeypatch.setenv("CC", _compiler(tmp_path / "oddcc", script))
    with pytest.raises(KernelUnavailableError, match=r"invalid ELF header|file too short"):
        native.load_kernel()


def test_another_layout_of_the_arguments_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text(
        "long kvist_arguments_bytes(void) { return 8; } int kvist_attend(void *a) { return a != 0; }"
        "long kvist_scratch_floats(int a, int b, int c) { return a + b + c; }"
    )
    library = tmp_path / "old.so"
    subprocess.run([*find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(KernelUnavailableError) as error:
        native._open(library)
    expected = ctypes.sizeof(native.LayerArguments) + ctypes.sizeof(native.StepArguments)
    assert str(error.value) == f"{library} takes arguments of 8 bytes, expected {expected}"


REASONS = [
    ({"CC": "no-such-compiler -O2"}, "CC=no-such-compiler -O2 is not a program"),
    ({"PATH": "/nowhere"}, "there is no C compiler (cc, gcc, clang)"),
]


@pytest.mark.parametrize(("environment", "reason"), REASONS, ids=str)
def test_without_a_compiler_torch_serves_and_the_reason_is_told(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    registry = Registry(load(default_registry().plan))
    asked = {"device": "cpu", "dtype": "float32", "family": "gqa"}
    assert registry.attention_backends["cpu-native"].info.unavailable == reason
    assert registry.attention_backend(**asked).info.name == "cpu-torch"
    with pytest.raises(PluginError) as error:
        registry.attention_backend("cpu-native", **asked)
    assert error.value.message.endswith(f"cannot serve family 'gqa' on cpu in float32: {reason}")
    shown = CliRunner().invoke(app, ["plugins", "--load", "--json"])
    [plugin] = [each for each in json.loads(shown.stdout)["plugins"] if each["name"] == "attention-cpu"]
    assert plugin["unavailable"] == {"cpu-native": reason}
