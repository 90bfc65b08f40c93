"""Sequences that fork, sleep, are cut short and leave; a cache that is cleared; what is told of all that."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.keys import block_keys, format_digest, scope_seed
from kvist.manager import Run
from kvist.spec import Scope
from kvist.testing.engine import Engine
from kvist.testing.follower import Follower
from kvist.testing.manager.author import ManagerAuthor
from kvist.testing.values import tokens


class LifeTests(ManagerAuthor):
    """The calls that concern one sequence, or the whole cache."""

    @pytest.mark.clause("CM-23")
    def test_a_fork_and_its_parent_never_see_each_other(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            for number, length in enumerate((block, 2 * block + 1, 3 * block - 1)):
                parent = engine.open(range(1000 * number, 1000 * number + length))
                engine.prefill(parent)
                child = engine.fork(parent)
                assert child.computed == parent.computed == length, "a fork is computed as far as its parent"
                # They differ from here on, first the child, so that what it writes would be seen.
                engine.extend(child, range(50, 50 + block))
                engine.extend(parent, range(80, 80 + block))
                engine.prefill(child)
                engine.prefill(parent)
                grandchild = engine.fork(child)
                engine.close(child)
                engine.extend(grandchild, range(60, 60 + block + 1))
                engine.decode(parent, 2)
                engine.prefill(grandchild)
                engine.close(parent, grandchild)
            engine.drained()

        self.each(scenario, pages=60)

    @pytest.mark.clause("CM-23")
    def test_a_fork_of_a_row_of_a_batch(self) -> None:
        def scenario(engine: Engine) -> None:
            block, batch = engine.block, engine.manager.decode_batch()
            parent = engine.open(range(2 * block + 1))
            engine.prefill(parent)
            batch.join(parent)
            for _ in range(2 * block):
                engine.run(decode=batch)
            batch.leave(parent)
            engine.learn(parent, 0)
            child = engine.fork(parent)
            engine.close(parent)
            engine.turn(range(900, 900 + 6 * block))
            engine.decode(child, block + 1)
            engine.close(child)
            engine.drained()

        self.each(scenario, pages=16)

    @pytest.mark.clause("CM-23")
    def test_a_fork_before_the_first_step(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            engine.turn(range(2 * block + 1))
            parent = engine.open(range(2 * block + 1), 40, 41)
            child = engine.fork(parent)
            engine.prefill(child)
            engine.prefill(parent)
            engine.decode(child, 2)
            engine.decode(parent, block)
            engine.close(child, parent)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-24")
    def test_truncated_tokens_are_forgotten(self) -> None:
        def scenario(engine: Engine) -> None:
            layout, block = engine.manager.layout, engine.block
            sparse = any(group.sparse for group in layout.groups) or layout.has_rings
            for number, length in enumerate((1, block, block + 1, 2 * block + 1, 3 * block)):
                begin = 1000 * number
                sequence = engine.open(range(begin, begin + 3 * block))
                engine.prefill(sequence)
                left = engine.truncate(sequence, length)
                assert sequence.known == length and len(sequence.tokens) == length, "tokens behind the cut are known"
                unit = layout.reuse_unit
                assert sparse or left == length - length % unit, f"cut to {length}, {left} tokens are left"
                # Other tokens come in their place.
                engine.extend(sequence, range(700 + begin, 700 + begin + block + 1))
                engine.prefill(sequence)
                engine.decode(sequence, 2)
                engine.close(sequence)
            engine.drained()

        self.each(scenario, pages=60)

    @pytest.mark.clause("CM-24")
    def test_truncation_never_goes_forward(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            prompt = range(3 * block + 1)
            sequence = engine.open(prompt)
            engine.run(Run(sequence, block))
            # Somebody else has computed what it has not.
            engine.turn(prompt)
            left = engine.truncate(sequence, 2 * block + 1)
            assert left <= block, f"{block} tokens were computed, and {left} are after truncation"
            engine.prefill(sequence)
            engine.close(sequence)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-25")
    def test_a_suspended_sequence_holds_nothing(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            sequence = engine.open(range(3 * block))
            engine.prefill(sequence)
            engine.decode(sequence, 3)
            engine.learn(sequence, 0)
            engine.suspend(sequence)
            assert all(group.held == 0 for group in manager.stats().groups), "a suspended sequence holds pages"
            before = manager.stats()
            engine.suspend(sequence)
            assert manager.stats() == before, "suspending twice is not suspending once"
            back = engine.resume(sequence)
            assert 3 * block <= back <= 3 * block + 3, f"{back} of {3 * block + 3} tokens came back, undisturbed"
            assert engine.resume(sequence) == back, "resuming twice is not resuming once"
            engine.prefill(sequence)
            # Now others need all the room.
            engine.suspend(sequence)
            for number in range(1, 5):
                engine.turn(range(1000 * number, 1000 * number + 5 * block))
            engine.resume(sequence)
            engine.prefill(sequence)
            engine.decode(sequence, block)
            engine.close(sequence)
            engine.drained()

        self.each(scenario, pages=14)

    @pytest.mark.clause("CM-26")
    def test_to_close_is_to_leave_everything_to_others(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            sequence = engine.open(range(2 * block))
            engine.prefill(sequence)
            engine.close(sequence)
            before = manager.stats()
            engine.close(sequence)
            assert manager.stats() == before and sequence.closed, "closing twice is not closing once"
            assert all(group.held == 0 for group in before.groups), "a closed sequence holds pages"
            assert engine.probe(range(2 * block), 9) == 2 * block, "what was computed is not found after close()"
            # During a step it takes effect at its end.
            flying = engine.open(range(500, 500 + 2 * block))
            flight = engine.launch(Run(flying, 2 * block))
            engine.close(flying)
            assert not flying.closed, "closed under a step in flight"
            engine.land(flight)
            assert flying.closed, "not closed at the end of its step"
            assert all(group.held == 0 for group in manager.stats().groups)
            assert engine.probe(range(500, 500 + 2 * block), 9) == 2 * block
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-27")
    def test_a_cleared_cache_knows_nothing(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            old = range(3 * block)
            engine.turn(old)
            holder = engine.open(old, 70, 71)
            engine.prefill(holder)
            asleep = engine.open(range(300, 300 + 2 * block))
            engine.prefill(asleep)
            engine.suspend(asleep)
            held = [group.held for group in manager.stats().groups]
            cleared = manager.clear()
            engine.audit()
            assert list(cleared.held) == held == [group.held for group in manager.stats().groups]
            assert all(group.cached == 0 for group in manager.stats().groups), "something is cached after clear()"
            assert engine.probe(old, 1) == 0, "old rows are found after clear()"
            assert engine.resume(asleep) == 0, "old rows are taken back after clear()"
            # Who holds something goes on with it, and what it computes is made of old rows.
            engine.prefill(asleep)
            engine.decode(holder, 2 * block)
            engine.learn(holder, 0)
            engine.close(holder, asleep)
            assert engine.probe(old, 1) == engine.probe(range(300, 300 + 2 * block), 1) == 0, (
                "what older sequences compute after clear() is found by others"
            )
            assert engine.turn(old) == 0
            assert engine.turn(old, 5) > 0, "nothing is found after clear(), not even what came after it"
            engine.drained()

        self.each(scenario, pages=60)

    @pytest.mark.clause("CM-28")
    def test_events_lead_to_the_index(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, layout, block = engine.manager, engine.manager.layout, engine.block
            follower = Follower(manager)
            for number in range(7):
                begin = 1000 * (number % 4)
                sequence = engine.open(range(begin, begin + 3 * block + number))
                engine.prefill(sequence)
                follower.follow()
                engine.decode(sequence, block)
                engine.learn(sequence, 0)
                engine.close(sequence)
                follower.follow()
            manager.clear()
            follower.follow()
            assert not follower.index, "entries are left after clear()"
            prompt = range(2 * block + 1)
            engine.turn(prompt)
            follower.follow()
            # Anybody can compute the keys from the tokens.
            seed = scope_seed(format_digest(layout), Scope())
            keys = block_keys(seed, np.ascontiguousarray(tokens(prompt)), block)
            for group in layout.groups:
                if not group.sparse:
                    assert {key for key, where, _ in follower.index if where == group.index} == set(keys), (
                        f"{group.name}: the index is not that of the blocks that were computed"
                    )
            engine.drained()

        # Without pages to spare there is something to tell.
        self.each(scenario, pages=14)

    @pytest.mark.clause("CM-29")
    def test_numbers_add_up(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            length = 2 * block + 1
            first = engine.turn(range(length))
            second = engine.turn(range(length))
            cancelled = engine.open(range(400, 400 + block))
            manager.cancel(manager.plan([Run(cancelled, block)]).commit(), ran=False)
            engine.close(cancelled)
            parent = engine.open(range(700, 700 + block))
            engine.prefill(parent)
            child = engine.fork(parent)
            engine.extend(child, range(3))
            engine.prefill(child)
            engine.suspend(parent)
            back = engine.resume(parent)
            engine.extend(parent, range(9, 11))
            engine.prefill(parent)
            stats = manager.stats()
            computed = (length - first) + (length - second) + block + 3 + (block - back) + 2
            for name, found, wanted in (
                ("requests", stats.requests, 3),
                ("prompt_tokens", stats.prompt_tokens, 2 * length + block),
                ("reused_tokens", stats.reused_tokens, first + second),
                ("computed_tokens", stats.computed_tokens, computed),
                ("forks", (stats.forks, stats.forked_tokens), (1, block)),
                ("resumes", (stats.resumes, stats.resumed_tokens), (1, back)),
                ("open_sequences", stats.open_sequences, 2),
            ):
                assert found == wanted, f"{name}: {found}, and it is {wanted}"
            peaks = [group.held_peak for group in stats.groups]
            assert all(peak >= group.held > 0 for peak, group in zip(peaks, stats.groups)), "a peak below the present"
            if len(stats.groups) == 1:
                (group,) = stats.groups
                assert group.free + group.cached + group.held == group.capacity, "pages that are nowhere, or twice"
            engine.close(parent, child)
            assert [group.held_peak for group in manager.stats().groups] >= peaks
            engine.drained()

        self.each(scenario, pages=60)

    @pytest.mark.clause("CM-30")
    def test_what_has_capacity_fits(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            engine.turn(range(3 * block))
            holder = engine.open(range(3 * block), 7)
            engine.prefill(holder)
            length = 2 * block + 1
            capacity = manager.capacity()
            count = capacity.requests(length)
            assert 0 < count < 1000, f"capacity() promises room for {count} requests"
            longest = capacity.tokens
            assert longest is None or longest >= length
            others = [engine.open(range(1000 * n, 1000 * n + length)) for n in range(1, count + 1)]
            if len(manager.layout.groups) == 1:
                more = engine.open(range(90_000, 90_000 + length))
                plan = manager.plan([Run(sequence, length) for sequence in [*others, more]])
                assert not plan.fits, f"capacity() promises room for {count} requests, and one more fits"
                engine.close(more)
            plan = manager.plan([Run(sequence, length) for sequence in others])
            assert plan.fits, f"capacity() promises room for {count} requests of {length} tokens: {plan.shortages}"
            engine.run(*(Run(sequence, length) for sequence in others))
            engine.close(holder, *others)
            engine.drained()

        self.each(scenario, pages=16)
