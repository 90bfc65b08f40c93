"""Random traffic against models: operations without a violation, and planted faults that it notices.

The machine of kvist.testing.machine drives everything that the contract of the cache manager allows, in any order, on
random mixes of retentions and arenas of any tightness; that of kvist.testing.tier_machine does so with host and disk
below the device, whose copies run in any order and fail, and whose process ends at times. Steps are executed some time
after their commit by an owner of the memory that stores a value per row; a model that stores every token prefix bounds
what may and what must be reused. Every fifth operation all books are audited.

* operations: in one minute (ten seconds with --quick), by the seeded driver. A violation makes the figure 0.
* mutants killed: share of the faults in mutants.toml (a quarter of them with --quick), planted one at a time in a copy
  of the core, that a run of at most 60 seconds notices. A run ends at the first violation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import harness
import mutants
from records import Figure

FIGURES = ("fuzz.operations", "fuzz.mutants_killed")
PARTS = ("operations", "mutants")


def operations(seconds: float, first_seed: int, target: float | None) -> Figure:
    """Two thirds of the time without tiers, one third with them."""
    plain = mutants.drive(mutants.SOURCE, seconds * 2 / 3, first_seed)
    tiers = mutants.drive(mutants.SOURCE, seconds / 3, first_seed, "tiers")
    failure = plain["failure"] or tiers["failure"]
    return Figure(
        figure="fuzz.operations",
        value=0.0 if failure else float(str(plain["operations"])) + float(str(tiers["operations"])),
        unit="operations",
        target=target,
        note=f"violation: {failure}" if failure else f"{tiers['operations']} of them with host and disk tiers",
    )


def killed(planted: Sequence[mutants.Mutant], seconds: float) -> Figure:
    survivors = []
    for mutant in planted:
        begin = time.monotonic()
        failure = mutants.hunt(mutant, seconds)
        took = time.monotonic() - begin
        harness.progress(f"{took:5.1f} s  {mutant.name}: {'killed' if failure else 'SURVIVED'}")
        if failure is None:
            survivors.append(mutant.name)
    count = len(planted)
    return Figure(
        figure="fuzz.mutants_killed",
        value=(count - len(survivors)) / count,
        unit=f"of all {count}",
        target=1.0,
        note=f"survived: {', '.join(survivors)}" if survivors else "",
    )


def measure(options: argparse.Namespace) -> list[Figure]:
    parts = options.only or PARTS
    figures = []
    if "operations" in parts:
        seconds = options.seconds or (10.0 if options.quick else 60.0)
        figures.append(operations(seconds, options.seed, 200_000 if seconds >= 60 else None))
    if "mutants" in parts:
        figures.append(killed(mutants.MUTANTS[:: 4 if options.quick else 1], 60.0))
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, help="how long to look for violations; default: 60, with --quick 10")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; another one finds other violations")


def main() -> int:
    return harness.run(__file__, __doc__, FIGURES, measure, add_options, PARTS)


if __name__ == "__main__":
    sys.exit(main())
