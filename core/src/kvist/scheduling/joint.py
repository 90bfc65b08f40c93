"""Several managers in one transaction: a target model's cache and a draft model's either both advance, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs

from kvist.batch import DecodeBatch
from kvist.contract import CacheManager
from kvist.plan import Plan, Run, Shortage
from kvist.scheduling.job import Job
from kvist.sequence import Sequence as CacheSequence
from kvist.step import Step


class Companion(Protocol):
    """A second cache that goes along with a scheduler's own, e.g. of a draft model that shares no arena with it.

    Models that compute the same tokens in the same steps need none: their specs go into one ``Layout.build``.

    The scheduler plans both together: what either lacks is a shortage of both. Who owns the companion opens and closes
    its sequences, completes and cancels its steps.
    """

    manager: CacheManager

    def sequence(self, job: Job) -> CacheSequence | None:
        """The job's sequence in this cache, if it has one."""

    def begin(self, job: Job) -> None:
        """The job has just got a sequence, and will be planned."""

    def runs(self, chunks: Sequence[tuple[Job, int]]) -> tuple[Iterable[Run], DecodeBatch | None]:
        """What this cache needs in a step in which these jobs compute so many tokens of their prompts, and all jobs
        that decode compute one. Asked several times per step; changes nothing."""

    def give_up(self, job: Job) -> None:
        """The job ends or gives way: close its sequence, or suspend it."""


# No slots: one is made in every step, and a frozen class with slots costs twice as much to make.
@attrs.frozen(eq=False, slots=False)
class JointPlan:
    """Plans of different managers, made at the same time."""

    managers: tuple[CacheManager, ...]
    plans: tuple[Plan, ...]

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        return tuple(shortage for plan in self.plans for shortage in plan.shortages)

    @property
    def fits(self) -> bool:
        for plan in self.plans:  # noqa: SIM110 - in every step, and three times as fast as a generator
            if plan.shortages:
                return False
        return True

    def commit(self) -> tuple[Step, ...]:
        """One step per manager. Raises what ``Plan.commit`` raises; no manager has a step then, and nothing has changed
        where the reason is that a plan does not fit."""
        steps: list[Step] = []
        try:
            # What does not fit first: it raises.
            for plan in (*(plan for plan in self.plans if not plan.fits), *self.plans):
                steps.append(plan.commit())
        except BaseException:
            self.cancel(steps, ran=False)
            raise
        return tuple(steps)

    def cancel(self, steps: Sequence[Step], *, ran: bool) -> None:
        """Cancel these steps of the first managers, the last one first."""
        for manager, step in reversed(list(zip(self.managers, steps))):
            manager.cancel(step, ran=ran)
