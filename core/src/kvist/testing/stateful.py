"""The cache machine under Hypothesis, which shrinks a failure to a few operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvist.testing.machine import OPERATIONS, CacheMachine
from kvist.testing.mixes import Draw, Setup

_BELOW = [st.integers(0, below) for below in range(64)]


def drawing(data: st.DataObject) -> Draw:
    """Numbers that Hypothesis chooses."""

    def draw(below: int) -> int:
        if below <= 1:
            return 0
        return data.draw(_BELOW[below - 1] if below <= len(_BELOW) else st.integers(0, below - 1))

    return draw


class _Traffic(RuleBasedStateMachine):
    """Rules are added by :func:`run_with_hypothesis`, from a table of operations."""

    start: Callable[[Draw], CacheMachine]
    executed = 0

    def __init__(self) -> None:
        super().__init__()
        self.machine: CacheMachine | None = None
        self.broken = False

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.machine = type(self).start(drawing(data))

    def operate(self, name: str, data: st.DataObject) -> None:
        type(self).executed += 1
        # What fails leaves the machine anywhere: its end says nothing then.
        self.broken = True
        getattr(self.machine, name)(drawing(data))
        self.broken = False

    @invariant()
    def everything_holds(self) -> None:
        if self.machine is not None:
            self.machine.check()

    def teardown(self) -> None:
        if self.machine is not None and not self.broken:
            self.machine.finish(lambda _: 0)


def _rule(name: str) -> Callable[..., None]:
    def operation(self: _Traffic, data: st.DataObject) -> None:
        self.operate(name, data)

    operation.__name__ = name
    added: Callable[..., None] = rule(data=st.data())(operation)
    return added


def run_with_hypothesis(
    examples: int,
    steps: int,
    machine: Callable[[Setup], CacheMachine] = CacheMachine,
    operations: Mapping[str, int] = OPERATIONS,
    choose: Callable[[Draw], Setup] = Setup.choose,
) -> int:
    """Run ``machine`` in ``examples`` runs of at most ``steps`` operations, auditing after each. Returns how many
    operations there were. Raises the first violation, shrunk.

    operations: names of methods of the machine, with weights. choose: what it is tried on.
    """
    # Hypothesis chooses among rules evenly, so what is to come often is there more than once.
    rules = {f"{name}_{n}": _rule(name) for name, weight in operations.items() for n in range(-(-weight // 8))}
    start = staticmethod(lambda draw: machine(choose(draw)))
    traffic = type("Traffic", (_Traffic,), {"start": start, **rules})
    run_state_machine_as_test(
        traffic,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    executed: int = traffic.executed  # type: ignore[attr-defined]
    return executed
