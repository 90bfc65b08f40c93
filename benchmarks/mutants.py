"""Faults planted in copies of the core, one at a time: what a fuzz run that is worth its time must notice.

Each, in mutants.toml, is a replacement of source text that occurs exactly once; ``plant`` refuses anything else by
name, so that the list cannot rot unseen. The sources themselves are never changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "core" / "src"


@attrs.frozen
class Mutant:
    """file: below ``core/src/kvist``. breaks: what is wrong with it, in words. kind: what ``kvist.testing.drive`` must
    drive to notice it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    kind: str = "plain"


def _read() -> tuple[Mutant, ...]:
    found = tomllib.loads((Path(__file__).with_suffix(".toml")).read_text(encoding="utf-8"))
    return tuple(
        Mutant(f"{Path(file).stem}: {row['name']}", file, row["old"], row["new"], row["breaks"], _kind(file, row))
        for file, rows in found.items()
        for row in rows
    )


def _kind(file: str, row: dict[str, str]) -> str:
    return row.get(
        "kind", "tiers" if file.startswith(("tiers/", "memory/disk", "memory/blockfile", "watches")) else "plain"
    )


MUTANTS = _read()


def misfits() -> list[str]:
    """Mutants whose old text does not occur exactly once any more, in words."""
    found = []
    for mutant in MUTANTS:
        count = (SOURCE / "kvist" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1:
            found.append(f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}, not once")
    return found


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy the core's sources to ``folder`` with one fault in them. Raises ValueError naming a mutant that rotted."""
    shutil.copytree(SOURCE / "kvist", folder / "kvist", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "kvist" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"mutant {mutant.name!r}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def hunt(mutant: Mutant, seconds: float) -> str | None:
    """Run the cache machine on a mutant for at most ``seconds``. Returns how it was caught, ``None`` if it survived."""
    with tempfile.TemporaryDirectory() as folder:
        plant(mutant, Path(folder))
        return drive(Path(folder), seconds, kind=mutant.kind)["failure"]


def drive(source: Path, seconds: float, first_seed: int = 0, kind: str = "plain") -> dict[str, object]:
    """Seeded traffic on the core in ``source``, in a process of its own: what kvist.testing.drive prints."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "kvist.testing.drive", str(seconds), str(first_seed), kind]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 20)
    except subprocess.TimeoutExpired:
        return {"operations": 0, "failure": "one operation did not come to an end"}
    if ran.returncode:
        return {"operations": 0, "failure": ran.stderr.strip().splitlines()[-1]}
    result: dict[str, object] = json.loads(ran.stdout)
    if not str(result["source"]).startswith(str(source)):
        raise AssertionError(f"ran the core in {result['source']}, not the one in {source}")
    return result
