"""A place to write traces, and the brute-force model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BRUTEFORCE = Path(__file__).resolve().parents[3] / "benchmarks" / "bruteforce.py"


@pytest.fixture(scope="session")
def bruteforce() -> ModuleType:
    """``benchmarks/bruteforce.py``, which shares nothing with Kvist."""
    if not BRUTEFORCE.exists():
        pytest.skip("the brute-force model is in the repository only, not in the source distribution")
    spec = importlib.util.spec_from_file_location("bruteforce", BRUTEFORCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines, given as text or as objects, and returns the path."""

    def write(lines: Iterable[str | dict[str, Any]], name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write
