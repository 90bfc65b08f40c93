"""The cache machine without Hypothesis: seeded traffic, many times as fast.

As a script, for measurements and for faults planted in a copy of the core:

    python -m kvist.testing.drive SECONDS [FIRST_SEED [plain|tiers]]

prints one JSON object: operations, seconds, of the first violation the setup and the text, and which core it was.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from kvist.testing.machine import OPERATIONS, CacheMachine
from kvist.testing.mixes import Draw, Setup
from kvist.testing.tier_bookkeeping import TierSetup
from kvist.testing.tier_machine import TIER_OPERATIONS, TierMachine

#: Operations of one manager, and every how many of them its books are audited.
LENGTH, AUDIT = 250, 5


class ViolationError(AssertionError):
    """What went wrong, and how to see it again."""


def drive(
    seed: int,
    *,
    length: int = LENGTH,
    audit: int = AUDIT,
    machine: Callable[[Setup], CacheMachine] = CacheMachine,
    operations: Mapping[str, int] = OPERATIONS,
    choose: Callable[[Draw], Setup] = Setup.choose,
) -> int:
    """One manager from its beginning to its end. Returns the operations. Raises ViolationError.

    operations: names of methods of the machine, with weights. choose: what it is tried on.
    """
    rng = random.Random(seed)

    def draw(below: int) -> int:
        return int(rng.random() * below)

    setup = choose(draw)
    names, weights = list(operations), list(operations.values())
    done = "nothing"
    try:
        engine = machine(setup)
        for number, name in enumerate(rng.choices(names, weights, k=length)):
            done = f"operation {number}, {name}"
            getattr(engine, name)(draw)
            if number % audit == audit - 1:
                engine.check()
        done = "the end"
        engine.finish(draw)
    except Exception as error:
        text = f"seed {seed}, {setup}, after {done}: {type(error).__name__}: {error}"
        raise ViolationError(text) from error
    return length


#: What the script drives: the machine, its operations, what it is tried on.
KINDS: dict[str, tuple[Callable[[Any], CacheMachine], Mapping[str, int], Callable[[Draw], Setup]]] = {
    "plain": (CacheMachine, OPERATIONS, Setup.choose),
    "tiers": (TierMachine, TIER_OPERATIONS, TierSetup.with_tiers),
}


def main(seconds: float, first_seed: int = 0, kind: str = "plain") -> dict[str, object]:
    """As many runs of a kind as fit into ``seconds``, until the first violation."""
    machine, table, choose = KINDS[kind]
    begin, operations, seed, failure = time.monotonic(), 0, first_seed, None
    while time.monotonic() - begin < seconds:
        try:
            operations += drive(seed, machine=machine, operations=table, choose=choose)
        except ViolationError as violation:
            cause = violation.__cause__
            where = traceback.extract_tb(cause.__traceback__)[-1] if cause is not None else None
            failure = f"{violation} ({where.name if where else ''})"
            break
        seed += 1
    took = time.monotonic() - begin
    result = {"operations": operations, "seconds": took, "runs": seed - first_seed, "failure": failure}
    return {**result, "source": __file__}


if __name__ == "__main__":
    seconds, *rest = sys.argv[1:]
    outcome = main(float(seconds), int(rest[0]) if rest else 0, *rest[1:])
    sys.stdout.write(json.dumps(outcome) + "\n")
