"""What a measurement yields: one record per figure, and the machine it was taken on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Figure:
    """One measured figure.

    figure: its id, which never changes its meaning.
    value: Kvist's, in ``unit``; ``None`` when it could not be measured, and ``note`` says why.
    peer, peer_value: what was measured beside it in the same run; ``None`` for a peer that is not installed.
    ratio: how many times better Kvist is, the median over the runs; ``None`` without a peer.
    runs: interleaved runs behind the medians.
    target: the least ratio (or value, without a peer) that the project wants to keep.
    at_most: the largest value that it wants to keep, for figures that have no target.
    """

    figure: str
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    runs: int = 1
    target: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; ``None`` when there is none or nothing was measured."""
        if self.at_most is not None:
            return None if self.value is None else self.value <= self.at_most
        reached = self.value if self.peer is None else self.ratio
        return None if self.target is None or reached is None else reached >= self.target


def paired(figure: str, unit: str, ours: Sequence[float], peer: str, theirs: Sequence[float], **more: Any) -> Figure:
    """A figure where less is better, from interleaved runs of Kvist and a peer. The ratio is taken run by run."""
    return Figure(
        figure=figure,
        value=statistics.median(ours),
        unit=unit,
        peer=peer,
        peer_value=statistics.median(theirs),
        ratio=statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        runs=len(ours),
        **more,
    )


def without_peer(figure: str, unit: str, ours: Sequence[float], peer: str, why: str, **more: Any) -> Figure:
    """The same where the peer is not there: it is named as missing and never guessed."""
    return Figure(
        figure=figure,
        value=statistics.median(ours),
        unit=unit,
        peer=peer,
        runs=len(ours),
        note=f"peer missing: {why}",
        **more,
    )


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "processor": _processor(),
        "cores": str(cores),
        "memory": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in ("kvist", "numpy", "torch", "transformers"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return {name: value for name, value in facts.items() if value}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write(path: Path, script: str, quick: bool, figures: Sequence[Figure]) -> None:
    """One JSON file per script."""
    content = {
        "script": script,
        "quick": quick,
        "machine": machine(),
        "figures": [attrs.asdict(figure) for figure in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[Figure]:
    """The figures of a file that ``write`` made."""
    return [Figure(**record) for record in json.loads(path.read_text(encoding="utf-8"))["figures"]]
