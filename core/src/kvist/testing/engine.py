"""A small engine for scenarios: every step runs against the value oracle, and every operation is audited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from kvist.manager import Plan, Run
from kvist.sequence import Sequence
from kvist.spec import History, Retention, Scope, State, Window
from kvist.step import IntArray, Step
from kvist.testing.under_test import ManagerUnderTest
from kvist.testing.values import Values, tokens

#: Every kind of group, and the combinations in which one can hide the fault of another.
MIXES: Mapping[str, tuple[Retention, ...]] = {
    "history": (History(),),
    "window": (Window(5),),
    "sinks": (Window(6, sinks=3),),
    "state": (State(),),
    "history+window": (History(), Window(6)),
    "history+state": (History(), State()),
    "window+state": (Window(5), State()),
    "history+windows+state": (History(), Window(7, sinks=2), Window(3), State()),
}


@attrs.frozen(eq=False)
class Flight:
    """A step that has run and is not completed."""

    step: Step
    plan: Plan
    accepted: list[int]


class Engine:
    """Drives a manager like an engine would. ``texts`` has the tokens each sequence will turn out to have; past the
    known ones the model "generates" ``100_000 + position``."""

    def __init__(self, manager: ManagerUnderTest, seed: int = 0, values: type[Values] = Values) -> None:
        self.manager = manager
        self.values = values(manager)
        self.block = manager.layout.block_tokens
        self.texts: dict[int, np.ndarray] = {}
        self._audits = 0
        manager.shuffle_free_pages(np.random.default_rng(seed))

    def free_pages(self, group: int) -> IntArray:
        """Ids of the pages of a group that nobody holds or can find."""
        return self.manager.free_pages(group)

    def probe(self, *parts: int | range, scope: Scope = Scope()) -> int:  # noqa: B008
        return self.manager.probe(tokens(*parts), scope)

    def open(self, *parts: int | range, scope: Scope = Scope(), **options: Any) -> Sequence:  # noqa: B008
        prompt = tokens(*parts)
        expected = self.manager.probe(prompt, scope) if options.get("reuse", True) else 0
        sequence = self.manager.open(prompt, scope, **options)
        assert sequence.reused == sequence.computed == expected < len(prompt), (
            f"probe() promises {expected} of {len(prompt)} tokens, open() reuses {sequence.reused}, and "
            f"{sequence.computed} count as computed"
        )
        self._whole_rows(sequence)
        self.texts[id(sequence)] = prompt
        self.audit()
        return sequence

    def extend(self, sequence: Sequence, *parts: int | range) -> None:
        """Make these the next tokens of ``sequence``; what it would have generated instead is forgotten."""
        added = tokens(*parts)
        self.texts[id(sequence)] = np.concatenate([sequence.tokens, added])
        sequence.extend(added)

    def learn(self, sequence: Sequence, more: int = 1) -> None:
        """Tell the ids of the computed tokens and of ``more`` after them."""
        end = sequence.computed + more
        sequence.extend(self._text(sequence, end)[sequence.known : end])

    def launch(self, *runs: Run, decode: Any = None, accepted: Mapping[Sequence, int] | None = None) -> Flight:
        """Commit a step and run it. accepted: query tokens that will stay, by sequence; otherwise the new ones."""
        plan = self.manager.plan(runs, decode)
        assert plan.fits, plan.shortages
        sequences = plan.sequences
        longest = max((run.query_tokens for run in runs), default=1)
        for sequence in sequences:
            self._text(sequence, max(sequence.scheduled, sequence.known) + longest)
        kept = [(accepted or {}).get(run.sequence, run.new_tokens) for run in plan.runs]
        step = plan.commit()
        self.audit()
        self.values.run(step, sequences, self.texts, [1] * (len(sequences) - len(kept)) + kept)
        return Flight(step, plan, kept)

    def land(self, flight: Flight) -> None:
        self.manager.complete(flight.step, flight.accepted)
        self.audit()

    def run(self, *runs: Run, decode: Any = None, accepted: Mapping[Sequence, int] | None = None) -> Step:
        flight = self.launch(*runs, decode=decode, accepted=accepted)
        self.land(flight)
        return flight.step

    def prefill(self, *sequences: Sequence, chunk: int = 1 << 30, polite: bool = True) -> None:
        """Compute all known tokens, all sequences in the same steps. polite: end chunks where the manager asks for."""
        while True:
            runs = []
            for sequence in sequences:
                end = min(sequence.known, sequence.computed + chunk)
                end = sequence.next_end(end) if polite else end
                if end > sequence.computed:
                    runs.append(Run(sequence, end - sequence.computed))
            if not runs:
                return
            self.run(*runs)

    def turn(
        self,
        *parts: int | range,
        scope: Scope = Scope(),  # noqa: B008
        chunk: int = 1 << 30,
        polite: bool = True,
        **options: Any,
    ) -> int:
        """One request from opening to closing. Returns what it reused."""
        sequence = self.open(*parts, scope=scope, **options)
        self.prefill(sequence, chunk=chunk, polite=polite)
        self.close(sequence)
        return sequence.reused

    def decode(self, sequence: Sequence, count: int) -> None:
        """Generate ``count`` tokens one by one, each known before the next."""
        for _ in range(count):
            if sequence.known == sequence.computed:
                self.learn(sequence)
            self.run(Run(sequence, 1))

    def close(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.manager.close(sequence)
            self.audit()

    def suspend(self, sequence: Sequence) -> None:
        self.manager.suspend(sequence)
        assert sequence.suspended and sequence.computed == 0, "suspended, and tokens count as computed"
        self.audit()

    def resume(self, sequence: Sequence) -> int:
        computed = self.manager.resume(sequence)
        assert computed == sequence.computed and not sequence.suspended, (
            f"resume() returns {computed}, and {sequence.computed} tokens are computed"
        )
        self._whole_rows(sequence)
        self.audit()
        return computed

    def truncate(self, sequence: Sequence, length: int) -> int:
        computed = self.manager.truncate(sequence, length)
        assert computed == sequence.computed <= length == sequence.known, (
            f"truncate() to {length} returns {computed}; {sequence.computed} are computed, {sequence.known} known"
        )
        self.texts[id(sequence)] = self.texts[id(sequence)][:length]
        self.audit()
        return computed

    def fork(self, sequence: Sequence) -> Sequence:
        child = self.manager.fork(sequence)
        self.texts[id(child)] = self.texts[id(sequence)][: child.known].copy()
        self.audit()
        return child

    def audit(self) -> None:
        """Every page is in exactly one place: the manager's own recount, and now and then the sums."""
        self.manager.check()
        self._audits += 1
        if self._audits % 8 == 0:
            self._add_up()

    def _add_up(self) -> None:
        # Groups with equal pages share them, so only their sum is fixed.
        groups = self.manager.stats().groups
        if len({group.page_bytes for group in groups}) == 1 and not any(self.manager.layout.floors):
            free = [self.manager.free_pages(group.index) for group in self.manager.layout.groups]
            # Slabs that no group owns are free pages of every group; equal pages make their ids comparable.
            unused = len(np.unique(np.concatenate(free)))
            used = sum(group.cached + group.held for group in groups)
            assert unused + used == groups[0].capacity, (
                f"{unused} pages are free and {used} cached or held, of {groups[0].capacity}"
            )

    def drained(self) -> None:
        """Nothing is held any more, and clearing the cache frees every page."""
        assert self.manager.stats().open_sequences == 0
        assert all(group.held == 0 for group in self.manager.stats().groups), "pages are held by nobody"
        self._add_up()
        self.manager.clear()
        self.audit()
        self._add_up()
        stats = self.manager.stats()
        assert stats.extents == 0
        assert all(group.cached == group.held == 0 for group in stats.groups), "pages are in use after clear()"

    def _whole_rows(self, sequence: Sequence) -> None:
        """A sequence does not go on inside a row of several tokens that somebody else has begun."""
        unit = self.manager.layout.reuse_unit
        assert sequence.computed % unit == 0, (
            f"{sequence.computed} tokens are reused, which ends inside a row; rows are whole at multiples of {unit}"
        )

    def used(self) -> list[tuple[int, int]]:
        """Cached and held pages of each group."""
        return [(group.cached, group.held) for group in self.manager.stats().groups]

    def _text(self, sequence: Sequence, length: int) -> np.ndarray:
        text = self.texts[id(sequence)]
        if len(text) < length:
            text = np.concatenate([text, 100_000 + np.arange(len(text), length)]).astype(np.int32)
            self.texts[id(sequence)] = text
        return text


def held_blocks(sequence: Sequence, step: Step, group: int) -> list[int]:
    """Block ordinals for which the sequence's table names a page."""
    return np.flatnonzero(step.tables[group][sequence.slot] > 0).tolist()


def shared_length(left: np.ndarray, right: np.ndarray) -> int:
    """Leading tokens that two texts share."""
    count = min(len(left), len(right))
    differs = np.flatnonzero(left[:count] != right[:count])
    return int(differs[0]) if len(differs) else count
