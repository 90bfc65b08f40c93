"""Rows of a step that are special: with drafts, of a decode batch, with states."""

from __future__ import annotations

from functools import partial

import pytest

from kvist.errors import StateError
from kvist.layout import Layout
from kvist.manager import Run, Sequence
from kvist.testing.bookkeeping import refused
from kvist.testing.engine import Engine, Flight
from kvist.testing.manager.author import ManagerAuthor


class RowTests(ManagerAuthor):
    """What becomes of drafts, of rows that come and go, and of states."""

    @pytest.mark.clause("CM-20")
    def test_rejected_drafts_leave_nothing_behind(self) -> None:
        def scenario(engine: Engine) -> None:
            most, block = engine.manager.layout.most_drafts, engine.block
            drafts = 3 if most is None else min(3, most)
            for rejected in range(drafts + 1):
                sequence = engine.open(range(100 * rejected, 100 * rejected + block + 1))
                engine.prefill(sequence)
                for _ in range(block + 1):
                    engine.learn(sequence)
                    kept = 1 + drafts - rejected
                    before = sequence.computed
                    flight = engine.launch(Run(sequence, 1, drafts), accepted={sequence: kept})
                    for group, each in zip(engine.manager.layout.groups, engine.manager.stats().groups):
                        one = group.exact and not group.retention.draft_pages
                        assert not one or each.held == 1, f"{group.name}: {each.held} pages for one state, not one"
                    refused(StateError, partial(engine.manager.plan, [Run(sequence, 1)]))
                    engine.land(flight)
                    assert sequence.computed == before + kept
                engine.learn(sequence, 0)
                engine.decode(sequence, 2)
                engine.close(sequence)
            engine.drained()

        self.each(scenario, pages=120)

    @pytest.mark.clause("CM-20")
    def test_drafts_that_the_step_rejects_altogether(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            sequence = engine.open(range(2 * block))
            engine.prefill(sequence)
            engine.learn(sequence)
            engine.run(Run(sequence, 1, 2), accepted={sequence: 0})
            assert sequence.computed == 2 * block
            engine.run(Run(sequence, 1, 1), accepted={sequence: 2})
            engine.learn(sequence, 0)
            engine.suspend(sequence)
            engine.resume(sequence)
            engine.prefill(sequence)
            engine.decode(sequence, block)
            engine.close(sequence)
            engine.turn(range(2 * block), 5)
            engine.drained()

        def free(layout: Layout) -> bool:
            return layout.most_drafts is None

        self.each(scenario, only=free, unless="every mix has a ring, which takes back a few drafts only")

    @pytest.mark.clause("CM-21")
    @pytest.mark.parametrize("depth", [1, 2])
    def test_rows_of_a_batch_advance_by_one(self, depth: int) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            batch = manager.decode_batch()
            everyone = [engine.open(range(50 * n, 50 * n + block + 1 + n)) for n in range(4)]
            engine.prefill(*everyone)
            ticks = [0] * len(everyone)
            flights: list[Flight] = []
            # Rows come and go, also while steps with them are in flight.
            for number in range(5 * block + 4):
                for place, sequence in enumerate(everyone):
                    outside = sequence.batch is None and not sequence.in_flight
                    if outside and (number + place) % 3 == 0 and _may_join(sequence, block):
                        batch.join(sequence)
                    elif sequence in batch.sequences and (number + 2 * place) % 7 == 6:
                        batch.leave(sequence)
                if len(batch):
                    for sequence in batch.sequences:
                        ticks[everyone.index(sequence)] += 1
                    flights.append(engine.launch(decode=batch))
                while len(flights) >= depth:
                    engine.land(flights.pop(0))
            for flight in flights:
                engine.land(flight)
            for n, sequence in enumerate(everyone):
                assert sequence.computed == block + 1 + n + ticks[n], "a row has not advanced by one token a step"
                engine.learn(sequence, 0)
            engine.close(*everyone)
            engine.drained()

        self.each(scenario, pages=200)

    @pytest.mark.clause("CM-21")
    def test_a_batch_whose_step_is_cancelled(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            batch = manager.decode_batch()
            rows = [engine.open(range(50 * n, 50 * n + 2 * block - 1 + n)) for n in range(3)]
            engine.prefill(*rows)
            late = rows.pop()
            for sequence in rows:
                batch.join(sequence)
            for number in range(2 * block):
                # The same step once more, over every position of a block.
                manager.cancel(manager.plan(decode=batch).commit(), ran=False)
                engine.audit()
                if number == block:
                    step = manager.plan(decode=batch).commit()
                    batch.leave(rows[0])
                    if _may_join(late, block):
                        batch.join(late)
                    manager.cancel(step, ran=False)
                    engine.audit()
                engine.run(decode=batch)
            engine.learn(rows[0], 0)
            engine.decode(rows[0], 2)
            for sequence in list(batch.sequences):
                batch.leave(sequence)
                engine.learn(sequence, 0)
            engine.close(late, *rows)
            engine.drained()

        self.each(scenario, pages=200)

    @pytest.mark.clause("CM-21")
    def test_rows_that_come_back_to_a_batch(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            batch = manager.decode_batch()
            rows = [engine.open(range(50 * n, 50 * n + 2 * block - 1 + n)) for n in range(3)]
            engine.prefill(*rows)
            for sequence in rows:
                batch.join(sequence)
            for number in range(3 * block):
                sequence = rows[number % len(rows)]
                step = manager.plan(decode=batch).commit()
                batch.leave(sequence)
                manager.cancel(step, ran=False)
                batch.join(sequence)
                manager.cancel(manager.plan(decode=batch).commit(), ran=False)
                engine.audit()
                before = [row.computed for row in rows]
                engine.run(decode=batch)
                assert [row.computed for row in rows] == [length + 1 for length in before], (
                    "a row that left a batch and came back does not advance"
                )
                for row in rows:
                    assert row.reserved - row.computed < block, (
                        f"a row with {row.computed} tokens has pages for {row.reserved}: steps that were cancelled "
                        "have opened a block again and again"
                    )
            for sequence in rows:
                batch.leave(sequence)
                engine.learn(sequence, 0)
            engine.close(*rows)
            engine.drained()

        self.each(scenario, pages=200)

    @pytest.mark.clause("CM-22")
    def test_states_begin_with_zeros(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            # The oracle demands zeros before a first token, and fills every free page with junk.
            for number in range(8):
                sequences = [engine.open(range(1000 * number + 90 * n, 1000 * number + 90 * n + 2)) for n in range(3)]
                engine.prefill(*sequences)
                engine.decode(sequences[0], block)
                engine.close(*sequences)
            engine.drained()

        self.each(scenario, only=lambda layout: layout.has_states, unless="no mix has states", pages=24)

    @pytest.mark.clause("CM-22")
    def test_states_are_kept_where_chunks_end(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            prompt = range(4 * block + 2)
            sequence = engine.open(prompt, restore_at=[2 * block])
            assert 2 * block in sequence.chunk_ends, "a position that the caller named is no end of a chunk"
            engine.prefill(sequence)
            engine.decode(sequence, 2)
            for position in (2 * block, 4 * block):
                found = engine.probe(range(position), 900, 901)
                assert found == position, f"a state at {position} was to be kept, and {found} tokens can be resumed"
            # Whoever ignores the ends of chunks gets no such state, and nothing wrong.
            careless = engine.open(range(500, 500 + 4 * block + 2), restore_at=[2 * block])
            engine.prefill(careless, polite=False)
            engine.turn(range(500, 500 + 2 * block), 3, 4)
            engine.close(sequence, careless)
            engine.drained()

        self.each(scenario, only=lambda layout: layout.has_states, unless="no mix has states")


def _may_join(sequence: Sequence, block: int) -> bool:
    """Has it the page for its next token, or does that open a block?"""
    has_state = bool(sequence.state_columns) or not sequence.layout.has_states
    return has_state and (sequence.computed % block == 0 or sequence.reserved > sequence.computed)
