"""The figures of `kvist demo`: a real model with real weights, beside transformers' own batching.

Runs the demo as a user would and takes the figures from the JSON file that it writes: `identical` says that greedy
tokens are the same as transformers' for every request, `speedup_*` how many times the tokens per second of
`generate_batch` Kvist reaches (bf16 and fp32), `reuse_of_unbounded` the share of what an unbounded cache could reuse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from records import Figure

FIGURES = (
    "demo.identical",
    "demo.speedup_generate_batch",
    "demo.speedup_generate_batch_fp32",
    "demo.reuse_of_unbounded",
)

#: Key in the demo's JSON: unit and target.
_KEYS = {
    "identical": ("(1 = same)", 1.0),
    "speedup_generate_batch": ("x", 2.0),
    "speedup_generate_batch_fp32": ("x", 1.5),
    "reuse_of_unbounded": ("of all", 1.0),
}


def measure(options: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "kvist", "demo", "--json", str(path), *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not path.exists():
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            reason = next((line for line in lines if line.startswith("error:")), lines[-1])
            why = f"`kvist demo` ended with exit code {done.returncode}: {reason}"
            return [_figure(key, None, why) for key in _KEYS]
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [_figure(key, content.get(key), f"`kvist demo` wrote no {key!r}") for key in _KEYS]


def _figure(key: str, value: Any, why: str) -> Figure:
    unit, target = _KEYS[key]
    return Figure(
        figure=f"demo.{key}",
        value=None if value is None else float(value),
        unit=unit,
        target=target,
        note=why if value is None else "",
    )


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
