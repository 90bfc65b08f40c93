"""Runs the kernels' tests, each kind in a process that has chosen interpreter or compiler before importing triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=HERE.parents[2], timeout=500
    )


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which):
    script = str(HERE / "interpreted_kernels.py")
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, script, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert "passed" in ran.stdout and "skipped" not in ran.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    ran = run("-W", "ignore", str(HERE / "compile_kernels.py"), TRITON_INTERPRET="0")
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert len(ran.stdout.splitlines()) == 14
