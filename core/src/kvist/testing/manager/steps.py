"""Steps: planned, refused, overlapping, cancelled."""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import pytest

from kvist.errors import CapacityError, RequestError, StateError
from kvist.manager import Run, Sequence
from kvist.testing.bookkeeping import refused
from kvist.testing.engine import Engine, Flight
from kvist.testing.manager.author import ManagerAuthor
from kvist.testing.memory import read_by
from kvist.testing.values import Array


class StepTests(ManagerAuthor):
    """What an engine may do with a step, and what it may not."""

    @pytest.mark.clause("CM-15")
    def test_wrong_calls_change_nothing(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            engine.turn(range(2 * block))
            sequence = engine.open(range(2 * block), 50, 51)
            asleep = engine.open(range(600, 600 + block))
            engine.prefill(sequence, asleep)
            engine.suspend(asleep)
            flying = engine.open(range(700, 700 + block))
            flight = engine.launch(Run(flying, 1))
            closed = engine.open(range(3))
            engine.close(closed)
            too_long = np.arange(1000 * manager.layout.slab_count * block)
            before, probed = manager.stats(), engine.probe(range(2 * block), 9)
            if not manager.layout.fits(len(too_long)):
                # Where every group drops blocks any length fits.
                refused(CapacityError, lambda: manager.open(too_long))
            for error, call in (
                (RequestError, lambda: manager.open([])),
                (RequestError, lambda: manager.open([-1])),
                (RequestError, lambda: manager.open([1.5])),
                (RequestError, lambda: manager.truncate(sequence, 0)),
                (RequestError, lambda: manager.truncate(sequence, sequence.known + 1)),
                (StateError, lambda: manager.plan([Run(sequence, 1), Run(sequence, 1)])),
                (RequestError, lambda: manager.plan([Run(sequence, 0)])),
                (StateError, lambda: manager.plan([Run(closed, 1)])),
                (StateError, lambda: manager.plan([Run(asleep, 1)])),
                (StateError, lambda: manager.fork(asleep)),
                (StateError, lambda: manager.suspend(flying)),
                (StateError, lambda: manager.resume(flying)),
                (StateError, lambda: manager.truncate(flying, 1)),
                (StateError, lambda: manager.fork(flying)),
                (StateError, lambda: manager.suspend(closed)),
                (StateError, lambda: manager.complete(flight.step, [2])),
            ):
                refused(error, call)
                assert manager.stats() == before, "a call that was refused has changed the manager's numbers"
                assert engine.probe(range(2 * block), 9) == probed
                engine.audit()
            engine.land(flight)
            refused(StateError, lambda: manager.complete(flight.step))
            refused(StateError, lambda: manager.cancel(flight.step))
            engine.resume(asleep)
            engine.prefill(asleep, flying)
            engine.decode(sequence, 2)
            engine.close(sequence, asleep, flying)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-15")
    def test_the_model_s_own_limits(self) -> None:
        for name, layout in self.layouts(20):
            spec = attrs.evolve(layout.spec, max_tokens=6, vocab_size=10)
            manager = self.manager(attrs.evolve(layout, spec=spec))
            refused(RequestError, partial(manager.open, range(7)))
            refused(RequestError, partial(manager.open, [10]))
            sequence = manager.open(range(6))
            refused(RequestError, partial(manager.plan, [Run(sequence, 7)]))
            assert manager.plan([Run(sequence, 6)]).fits, f"mix {name!r}: six tokens of at most six do not fit"

    @pytest.mark.clause("CM-16")
    def test_a_plan_that_does_not_fit(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            holders: list[Sequence] = []
            for number in range(100):
                sequence = engine.open(range(1000 * number, 1000 * number + 2 * block))
                plan = manager.plan([Run(sequence, 2 * block)])
                if not plan.fits:
                    break
                engine.prefill(sequence)
                holders.append(sequence)
            assert holders and not plan.fits, "any number of plans fits into the arena"
            before = manager.stats()
            refused(CapacityError, plan.commit, "the plan does not fit")
            assert manager.stats() == before, "a refused plan has changed the manager's numbers"
            engine.audit()
            # The others go on, and so does this one when somebody has left.
            engine.close(holders.pop(0), holders.pop(0))
            engine.prefill(sequence)
            for holder in holders[:1]:
                engine.suspend(holder)
                engine.resume(holder)
                engine.prefill(holder)
            engine.close(sequence, *holders)
            engine.drained()

        self.each(scenario, pages=12)

    @pytest.mark.clause("CM-16")
    def test_a_plan_is_stale_when_anything_has_changed(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            sequence, other = engine.open(range(block + 1)), engine.open(range(500, 500 + block + 1))
            engine.prefill(other)

            def commit_something() -> None:
                engine.land(engine.launch(Run(other, 1)))

            engine.learn(other)
            flying = [engine.launch(Run(engine.open(range(800, 803)), 3))]
            step_in_flight = flying[0]
            for change in (
                lambda: engine.open(range(600, 603)),
                commit_something,
                lambda: engine.suspend(other),
                lambda: engine.resume(other),
                lambda: engine.close(flying.pop().plan.sequences[0]),
                lambda: engine.close(other),
                lambda: manager.clear(),
            ):
                plan = manager.plan([Run(sequence, 1)])
                change()
                refused(StateError, plan.commit, "stale")
                engine.audit()
            engine.land(step_in_flight)
            engine.prefill(sequence)
            twice = manager.plan([Run(sequence, 1)])
            step = twice.commit()
            refused(StateError, twice.commit)
            manager.cancel(step, ran=False)

        self.each(scenario)

    @pytest.mark.clause("CM-18")
    @pytest.mark.parametrize("depth", [2, 3])
    def test_steps_of_one_prompt_overlap(self, depth: int) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            for begin, end in ((0, 5), (0, 5), (3, 8)):
                sequence = engine.open(range(begin * block, end * block + 3))
                flights: list[Flight] = []
                while sequence.scheduled < sequence.known:
                    count = min(block - 1 or 1, sequence.known - sequence.scheduled)
                    flights.append(engine.launch(Run(sequence, count)))
                    if len(flights) == depth:
                        engine.land(flights.pop(0))
                assert sequence.computed < sequence.scheduled == sequence.known
                for flight in flights:
                    engine.land(flight)
                assert sequence.computed == sequence.known
                engine.close(sequence)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-18")
    def test_tables_of_a_step_in_flight_stay(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            prompt = range(4 * block + 1)
            ours, twin = engine.open(prompt), engine.open(prompt)
            flights = [engine.launch(Run(ours, 2 * block))]
            flights.append(engine.launch(Run(ours, block + 1)))
            before = [what_is_read(engine, flight, ours) for flight in flights]
            # The same blocks become findable while ours are being computed.
            engine.prefill(twin)
            engine.close(twin)
            engine.turn(prompt, 77)
            land_unchanged(engine, ours, flights, before)
            engine.prefill(ours)
            engine.close(ours)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-18")
    def test_tables_stay_while_restore_points_are_published(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            ours = engine.open(range(4 * block + 1), restore_at=[3 * block])
            engine.run(Run(ours, 2 * block))
            # Somebody else leaves what resuming takes at a place where we keep nothing.
            engine.turn(range(2 * block))
            flights = [engine.launch(Run(ours, block)), engine.launch(Run(ours, block + 1))]
            land_unchanged(engine, ours, flights, [what_is_read(engine, flight, ours) for flight in flights])
            engine.decode(ours, block)
            engine.close(ours)
            engine.turn(range(3 * block), 77, 78)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-18")
    def test_steps_end_in_order(self) -> None:
        def scenario(engine: Engine) -> None:
            sequence, other = engine.open(range(12)), engine.open(range(50, 56))
            flights = [engine.launch(Run(sequence, 3)) for _ in range(3)]
            apart = engine.launch(Run(other, 3))
            before = engine.manager.stats()
            for later in flights[1:]:
                refused(StateError, partial(engine.manager.complete, later.step), "not the oldest")
            for earlier in flights[:-1]:
                refused(StateError, partial(engine.manager.cancel, earlier.step), "not the newest")
            assert engine.manager.stats() == before
            # Who shares no sequence with the others ends when it likes.
            engine.land(apart)
            for flight in flights:
                engine.land(flight)
            engine.prefill(sequence, other)
            engine.close(sequence, other)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-19")
    def test_a_step_that_did_not_run(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            engine.turn(range(2 * block + 2))
            # Its first step begins with copies of what it shares of a block, and of states.
            for extra in (90, 91):
                sequence = engine.open(range(2 * block + 2), extra, extra + 100)
                before = manager.stats()
                step = manager.plan([Run(sequence, 1)]).commit()
                engine.audit()
                manager.cancel(step, ran=False)
                engine.audit()
                stats = manager.stats()
                assert (stats.steps, stats.computed_tokens, stats.requests) == (
                    before.steps,
                    before.computed_tokens,
                    before.requests,
                ), "a step that did not run counts"
                if extra == 91:
                    # Others take the pages meanwhile.
                    engine.turn(range(700, 700 + 2 * block + 1))
                engine.prefill(sequence)
                engine.decode(sequence, block + 1)
                engine.close(sequence)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-19")
    def test_a_step_that_failed_on_its_way(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, layout, block = engine.manager, engine.manager.layout, engine.block
            for number in range(2):
                sequence = engine.open(range(1000 * number, 1000 * number + 3 * block + 1))
                older = engine.launch(Run(sequence, block))
                newer = engine.launch(Run(sequence, block + 1))
                manager.cancel(newer.step, ran=True)
                engine.audit()
                engine.land(older)
                lost = layout.has_states or layout.has_rings
                assert sequence.suspended == lost, (
                    "a step that ran overwrites states and rings: its sequences have to be resumed"
                    if lost
                    else "rows of a cancelled step are simply written again: nobody is suspended"
                )
                if lost:
                    engine.resume(sequence)
                assert sequence.computed <= block
                engine.prefill(sequence)
                engine.decode(sequence, 3)
                engine.close(sequence)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-19")
    def test_copies_of_a_step_that_failed_are_done(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            parent = engine.open(range(2 * block + 2))
            engine.prefill(parent)
            child = engine.fork(parent)
            engine.learn(parent)
            # Copies for the child come with this step, which then writes to their sources.
            manager.cancel(engine.launch(Run(parent, 1)).step, ran=True)
            engine.audit()
            engine.extend(child, range(500, 503))
            engine.prefill(child)
            if parent.suspended:
                engine.resume(parent)
            engine.prefill(parent)
            engine.decode(child, block)
            engine.close(parent, child)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-19")
    def test_what_is_owed_to_a_page_goes_with_its_owner(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            parent = engine.open(range(2 * block + 2))
            engine.prefill(parent)
            # The second child's state is known when it goes, and its page free.
            for _ in range(2):
                engine.close(engine.fork(parent))
            others = [engine.open(range(100 * n, 100 * n + 2), reuse=False) for n in range(1, 9)]
            engine.run(*(Run(sequence, 2) for sequence in others))
            engine.decode(parent, block)
            engine.close(parent, *others)
            engine.drained()

        self.each(scenario, pages=14)

    @pytest.mark.clause("CM-19")
    def test_a_step_that_failed_costs_no_whole_block(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            sequence = engine.open(range(block + 1))
            engine.prefill(sequence)
            for _ in range(2 * block):
                engine.run(Run(sequence, 1))
            # Only now are the ids known of what was generated.
            engine.learn(sequence, 0)
            text = sequence.tokens.tolist()
            engine.manager.cancel(engine.launch(Run(sequence, 1)).step, ran=True)
            engine.audit()
            other = engine.open(*text, 77)
            assert other.matched == 3 * block, (
                f"{other.matched} of {3 * block} tokens in whole blocks are known after a step behind them failed"
            )
            engine.resume(sequence)
            engine.prefill(sequence, other)
            engine.decode(sequence, block)
            engine.close(sequence, other)
            engine.drained()

        self.each(
            scenario,
            only=lambda layout: layout.has_states or layout.has_rings,
            unless="no mix has states or rings",
        )


def land_unchanged(engine: Engine, sequence: Sequence, flights: list[Flight], before: list[list[Array]]) -> None:
    """Complete steps of a sequence; each has been in flight until then and reads what it read ``before``."""
    for flight, seen in zip(flights, before):
        now = what_is_read(engine, flight, sequence)
        same = all(np.array_equal(left, right) for left, right in zip(now, seen))
        assert same, f"what step {flight.step.id} reads of its tables has changed while it was in flight"
        engine.land(flight)


def what_is_read(engine: Engine, flight: Flight, sequence: Sequence) -> list[Array]:
    """Copies of those parts of a step's tables that its row reads or writes."""
    step, block = flight.step, engine.block
    row = flight.plan.sequences.index(sequence)
    end, count = int(step.lengths[row]), int(step.query_lengths[row])
    found = []
    for group in engine.manager.layout.groups:
        spans = ((0, block),) if group.exact else read_by(group, end - count, end)
        for low, high in spans:
            found.append(step.tables[group.index][step.slots[row], low // block : -(-high // block)].copy())
    return found
