"""The conformance kit: the faults that it finds, and how long it takes on what comes with the core.

* mutants found: share of the faults in core/tests/kit/mutants (a fifth of them with --quick) that a test of the clause
  named with them finds. Packaged plugins, spec factories, cache managers and attention backends, one fault each; those
  of mutants.toml among them, but for a few in the store of the disk tier.
* seconds: `kvist conform builtin`, in a process of its own: packaging, the cache manager and two backends. Not with
  --quick. The distribution has to be installed with its present entry points; a clause that failed or was not run for
  want of a suite leaves the figure without a value.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import harness
from records import Figure

FIGURES = ("kit.mutants_found", "kit.seconds")
PARTS = ("mutants", "seconds")
CONTRACT = ("packaging", "managers", "backends", "further")
LIMIT_S = 180.0
TESTS = Path(__file__).resolve().parent.parent / "core" / "tests"


def found(quick: bool) -> Figure:
    # As in the tests' own configuration, and without this folder, where this script has the name of their package.
    sys.path[:1] = [str(TESTS), str(TESTS / "support")]
    from kit.mutants.base import find
    from kit.mutants.further import untried

    survivors, count = [], 0
    for part in CONTRACT:
        for mutant in importlib.import_module(f"kit.mutants.{part}").MUTANTS[:: 5 if quick else 1]:
            begin = time.monotonic()
            failures = find(part, mutant)
            took = time.monotonic() - begin
            harness.progress(f"{took:5.1f} s  {mutant.clause} {mutant.name}: {'found' if failures else 'SURVIVED'}")
            count += 1
            if not failures:
                survivors.append(f"{mutant.clause} {mutant.name}")
    notes = [f"survived: {', '.join(survivors)}"] if survivors else []
    notes += [f"not tried: {', '.join(untried())}"] if untried() else []
    return Figure(
        figure="kit.mutants_found",
        value=(count - len(survivors)) / count,
        unit=f"of {count}",
        target=1.0,
        note="; ".join(notes),
    )


def seconds(quick: bool) -> Figure:
    if quick:
        return Figure(figure="kit.seconds", value=None, unit="s", note="takes minutes; left out of a quick look")
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "kvist", "conform", "builtin", "--json"], capture_output=True, text=True
    )
    took = time.monotonic() - begin
    if not ran.stdout:
        return Figure(figure="kit.seconds", value=None, unit="s", note=ran.stderr.strip().splitlines()[-1])
    told = json.loads(ran.stdout)["clauses"]
    wrong = [
        f"{clause['number']} {clause['status']}"
        for clause in told
        if clause["status"] == "failed" or (clause["status"] == "not run here" and not clause["tests"])
    ]
    return Figure(
        figure="kit.seconds",
        value=None if wrong else took,
        unit="s",
        at_most=LIMIT_S,
        note=", ".join(wrong) or f"{sum(len(clause['tests']) > 0 for clause in told)} of {len(told)} clauses apply",
    )


def measure(options: argparse.Namespace) -> list[Figure]:
    parts = options.only or PARTS
    measured = []
    if "mutants" in parts:
        measured.append(found(options.quick))
    if "seconds" in parts:
        measured.append(seconds(options.quick))
    return measured


def main() -> int:
    return harness.run(__file__, __doc__, FIGURES, measure, parts=PARTS)


if __name__ == "__main__":
    sys.exit(main())
