"""Make the environment of the peers: python benchmarks/peers/setup.py

It is apart from the project's own, because peers pin other versions of the same packages. Only what the driver of a
peer imports is installed, each package at a fixed version and without its dependencies: no CUDA build, no compiler.
Takes about two minutes. Remove the folder to start again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / ".venv-peers"
REQUIREMENTS = (HERE / "requirements.txt", HERE / "requirements-serving.txt")
DRIVER = HERE / "vllm_manager.py"


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="default: .venv-peers of the repository")
    folder: Path = parser.parse_args().folder
    python = python_of(folder)
    if not python.exists():
        print(f"creating {folder}", flush=True)
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    lists = [argument for path in REQUIREMENTS for argument in ("--requirement", path)]
    if subprocess.run([*install, *lists]).returncode:
        print(
            "error: the peers cannot be installed\n"
            "hint: where pip finds no CPU build of torch, name an index that has one in PIP_EXTRA_INDEX_URL",
            file=sys.stderr,
        )
        return 1
    return subprocess.run([python, DRIVER, "--versions"]).returncode


if __name__ == "__main__":
    sys.exit(main())
