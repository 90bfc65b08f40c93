"""What a batch would need, on paper: a plan changes nothing until it is committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from kvist.errors import CapacityError
from kvist.sequence import Sequence

if TYPE_CHECKING:
    from kvist.batch import DecodeBatch
    from kvist.eviction import Victim
    from kvist.step import Step


@attrs.frozen(eq=False)
class Run:
    """Compute ``new_tokens`` more tokens of ``sequence`` and reserve room for ``drafts`` speculated ones after them."""

    sequence: Sequence
    new_tokens: int
    drafts: int = 0

    @property
    def query_tokens(self) -> int:
        return self.new_tokens + self.drafts


@attrs.frozen
class Shortage:
    """One group lacks pages: it needs ``needed`` and can get ``available``, evictions included."""

    group: str
    needed: int
    available: int

    def __str__(self) -> str:
        return f"{self.group} needs {self.needed} pages and can get {self.available}"


@attrs.define(eq=False)
class Plan:
    """Made by ``manager.plan``. Valid until anything else changes the manager.

    runs: the single runs in row order, after the rows of ``decode``.
    due: sequences of the decode batch that open a new block.
    blocks: new blocks over all rows. needed: new pages per group.
    """

    decode: DecodeBatch | None
    runs: list[Run]
    due: list[Sequence]
    blocks: int
    needed: list[int]
    victims: list[Victim]
    shortages: tuple[Shortage, ...]
    epoch: int
    _commit: Callable[[Plan], Step]

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def sequences(self) -> list[Sequence]:
        """One per row of the step, in row order."""
        rows = list(self.decode.sequences) if self.decode is not None else []
        return rows + [run.sequence for run in self.runs]

    def commit(self) -> Step:
        """Evict, allocate, and return the step.

        Raises CapacityError if the plan does not fit, StateError if the manager changed since it was made; nothing
        has changed then.
        """
        if self.shortages:
            raise CapacityError(
                "the plan does not fit: " + "; ".join(map(str, self.shortages)),
                hint="plan fewer tokens, or close a sequence first",
            )
        return self._commit(self)
