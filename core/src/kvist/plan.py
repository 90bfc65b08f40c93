"""What a batch would need, on paper: a plan changes nothing until it is committed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import attrs

from kvist.errors import CapacityError, RequestError, StateError
from kvist.sequence import Sequence

if TYPE_CHECKING:
    from kvist.batch import DecodeBatch
    from kvist.eviction import Eviction
    from kvist.step import Step


# No slots: a frozen class with slots costs twice as much to make.
@attrs.frozen(eq=False, slots=False)
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
    snapshots: sequences whose states are to be kept, with the position that each will have reached.
    """

    decode: DecodeBatch | None
    runs: list[Run]
    due: list[Sequence]
    blocks: int
    needed: list[int]
    snapshots: list[tuple[Sequence, int]] | tuple[()]
    eviction: Eviction
    shortages: tuple[Shortage, ...]
    epoch: int
    _commit: Callable[[Plan], Step]
    #: For the manager, from commit to completion.
    step: Step | None = None
    #: Rows of the decode batch in the step, and the batch's steps before it.
    decode_rows: int = 0
    tick: int = 0

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


def ordered_runs(
    runs: Iterable[Run], known: Mapping[int, Sequence], max_tokens: int | None, most_drafts: int | None
) -> list[Run]:
    """Runs of one query token first, every one checked. ``known``: the manager's sequences by slot.

    Raises StateError and RequestError as ``plan`` promises, TypeError for counts that are not integers.
    """
    ordered = list(runs)
    seen = set()
    for run in ordered:
        sequence = run.sequence
        if sequence.closed or sequence.closing:
            raise StateError("plan() of a closed sequence", hint="open a new one")
        if sequence.suspended:
            raise StateError("plan() of a suspended sequence", hint="resume() it first")
        if sequence.below is not None and sequence.below.loading:
            raise StateError("plan() of a sequence that is loading", hint="poll() until it is not")
        if sequence.arriving:
            raise StateError("plan() of a sequence that is arriving", hint="wait for its transfer, then call landed()")
        sequence.settle()
        if known.get(sequence.slot) is not sequence:
            raise StateError("plan() of another manager's sequence", hint="plan it with the manager that opened it")
        if sequence.undecided or sequence.batch is not None or sequence.slot in seen:
            raise StateError(
                "plan() of a sequence that has drafts in a step, is in a decode batch, or is named twice in this plan",
                hint="complete its step first, and name each sequence once",
            )
        seen.add(sequence.slot)
        if operator.index(run.new_tokens) < 1 or operator.index(run.drafts) < 0:
            raise RequestError(
                f"Run(new_tokens={run.new_tokens}, drafts={run.drafts}) computes nothing",
                hint="compute at least one new token, with zero or more drafts",
            )
        if most_drafts is not None and run.drafts > most_drafts:
            raise RequestError(
                f"Run(drafts={run.drafts}): what the spec keeps can take back {most_drafts} at most",
                hint="draft fewer tokens, or give the spec's ring or history more room",
            )
        end = sequence.scheduled + run.query_tokens
        if max_tokens is not None and end > max_tokens:
            raise RequestError(
                f"a run to {end} tokens goes past the model's {max_tokens}",
                hint="stop generating at the model's length",
            )
    return sorted(ordered, key=lambda run: run.query_tokens > 1) if len(ordered) > 1 else ordered


def accepted_counts(
    runs: SequenceOf[Run], accepted: SequenceOf[int] | None, *, overwrites: bool, most_drafts: int | None
) -> list[int]:
    """Tokens of each run that stay; without ``accepted`` the new tokens and no draft. ``overwrites``: there are states
    or rings, which a run without drafts overwrites. ``most_drafts``: tokens that can be taken back. Raises
    StateError."""
    if accepted is None:
        return [run.new_tokens for run in runs]
    kept = [operator.index(count) for count in accepted]
    if len(kept) != len(runs):
        raise StateError(f"complete() got {len(kept)} accepted counts for {len(runs)} runs")
    for run, count in zip(runs, kept):
        if not 0 <= count <= run.query_tokens:
            raise StateError(f"complete() accepts {count} of {run.query_tokens} tokens")
        if overwrites and not run.drafts and count != run.new_tokens:
            raise StateError(
                f"complete() accepts {count} of {run.new_tokens} tokens, but the run had no drafts and its state is "
                "overwritten",
                hint="plan the tokens that may be rejected as drafts",
            )
        if most_drafts is not None and run.query_tokens - count > most_drafts:
            raise StateError(
                f"complete() accepts {count} of {run.query_tokens} tokens, and what the spec keeps can take "
                f"back {most_drafts} at most"
            )
    return kept
