"""What benchmarks/kernels.py would time on a GPU gives what its peers give: in Triton's interpreter, at tiny sizes."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "kernels.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_kernel_and_its_peer_agree(tmp_path: Path) -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(tmp_path / "figures.json")]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (declared,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FIGURES"
    ]
    assert [line for line in ran.stderr.splitlines() if line.startswith("kernels.")] == list(declared)
    told = (tmp_path / "figures.json").read_text(encoding="utf-8")
    assert told.count("in Triton's interpreter it gives what its peer gives") == len(declared)
