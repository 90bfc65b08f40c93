"""A plugin's folder as if it had been installed: what an installer makes of its pyproject.toml, without one."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path


def environ_with(folder: Path, site: Path) -> dict[str, str]:
    """The environment of a process that finds the plugin in ``folder``, whose metadata is written to ``site``."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    requirements = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n{requirements}")
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["kvist"].items())
    (info / "entry_points.txt").write_text(f"[kvist]\n{points}")
    paths = (str(site), str(folder / "src"), os.environ.get("PYTHONPATH", ""))
    # Threads of torch that wait for each other cost more than they bring at the sizes of tests.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
