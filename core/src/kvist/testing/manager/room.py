"""Room: who has to leave, what is promised, what moves to another place."""

from __future__ import annotations

import pytest

from kvist.layout import Layout
from kvist.manager import Run, Shortage
from kvist.testing.engine import Engine
from kvist.testing.manager.author import ManagerAuthor
from kvist.testing.manager.steps import land_unchanged, what_is_read


class RoomTests(ManagerAuthor):
    """A cache that is full."""

    @pytest.mark.clause("CM-16")
    def test_what_fits_alone_fits_again(self) -> None:
        def scenario(engine: Engine) -> None:
            layout = engine.manager.layout
            length = longest(layout)
            # Block by block: once more, with another end, and after a part of it.
            for prompt in ((range(length),), (range(length),), (range(length - 1), 777), (range(length - 2), 778, 779)):
                engine.turn(*prompt, chunk=engine.block)
            engine.drained()

        self.each(scenario, pages=5, only=limited, unless="where all groups drop blocks any length fits")

    @pytest.mark.clause("CM-16")
    def test_what_was_passed_over_can_still_go(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            stem = range(2 * block)
            for branch in (100, 200):
                engine.turn(stem, range(branch, branch + block))
            engine.turn(range(1000, 1000 + 3 * block))
            # Both branches go, and then a part of their stem, which was used before the other prompt.
            engine.turn(range(2000, 2000 + 4 * block))
            engine.turn(range(3000, 3000 + longest(engine.manager.layout)), chunk=block)
            engine.drained()

        self.each(scenario, pages=8, only=limited, unless="where all groups drop blocks any length fits")

    @pytest.mark.clause("CM-17")
    def test_what_somebody_holds_is_never_evicted(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            shared = range(2 * block)
            engine.turn(shared, 90)
            holder = engine.open(shared, 91, 92)
            engine.prefill(holder)
            idle = engine.open(shared, range(95, 95 + block))
            # Each leaves a page at least in the group with the largest ones, of which there are so many.
            for number in range(1, 17 * len(manager.layout.groups)):
                engine.turn(range(1000 * number, 1000 * number + 3 * block))
                evicted = sum(group.evicted for group in manager.stats().groups)
                if evicted and number >= 8:
                    break
            assert evicted > 0, "nothing was evicted"
            # It still has to copy what it shares of a block, and states.
            engine.prefill(idle)
            engine.decode(holder, block + 1)
            engine.decode(idle, block + 1)
            engine.close(holder, idle)
            engine.drained()

        self.each(scenario, pages=16)

    @pytest.mark.clause("CM-17")
    def test_a_block_that_is_still_to_be_copied_stays(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            shared = range(block + max(1, block // 2))
            engine.turn(shared)
            idle = engine.open(shared, 77, 78)
            # Somebody else fills the block that it shares a part of, and others take what is free.
            engine.turn(shared, range(300, 300 + block))
            engine.turn(range(700, 700 + 4 * block))
            engine.prefill(idle)
            engine.decode(idle, block)
            engine.close(idle)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-17")
    def test_nobody_takes_what_a_floor_promises(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, layout, block = engine.manager, engine.manager.layout, engine.block
            (group,) = [group for group, pages in zip(layout.groups, layout.floors) if pages]
            # The group takes what it was promised, and gives it back.
            first = [engine.open(range(100 * n, 100 * n + block)) for n in range(6)]
            engine.prefill(*first)
            engine.close(*first)
            manager.clear()
            # Others grow as far as there is room.
            length = longest(layout)
            holders = [engine.open(range(1000 * n, 1000 * n + length)) for n in (1, 2)]
            shortages: tuple[Shortage, ...] = ()
            for sequence in holders:
                while sequence.computed < sequence.known and not shortages:
                    run = Run(sequence, min(block, sequence.known - sequence.computed))
                    shortages = manager.plan([run]).shortages
                    if not shortages:
                        engine.run(run)
            for shortage in shortages:
                held = manager.stats().groups[group.index].held
                assert shortage.group != group.name or held + shortage.needed > 6, (
                    f"{group.name} was promised 6 pages, holds {held}, and lacks some"
                )
            engine.close(*holders)
            engine.drained()

        self.each(
            scenario,
            pages=12,
            only=lambda layout: len(layout.groups) > 1 and limited(layout),
            unless="no mix has several groups, of which one keeps everything",
            change=lambda layout: layout.with_floors({layout.groups[-1].name: 6}),
        )

    @pytest.mark.clause("CM-17")
    def test_no_more_is_evicted_than_is_lacking(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            room = group_capacity(engine)
            # A stem with three branches.
            stem, branches = range((room - 6) * block), [range(1000 * n, 1000 * n + 2 * block) for n in (1, 2, 3)]
            for branch in branches:
                engine.turn(stem, branch)
            assert manager.stats().groups[0].evicted == 0, "evicts although there is room"
            taker = engine.open(range(8000, 8000 + 3 * block))
            engine.prefill(taker)
            evicted = manager.stats().groups[0].evicted
            assert evicted == 3, f"3 pages were lacking, and {evicted} are evicted"
            left = [engine.probe(stem, branch, 1) // block - (room - 6) for branch in branches]
            assert sum(left) == 3 and min(left) >= 0, (
                f"3 of 6 blocks of the branches of a stem were evicted, and of the three branches {left} blocks can "
                "be reused: ends of prefixes go first"
            )
            engine.close(taker)
            engine.drained()

        def one_dense(layout: Layout) -> bool:
            return len(layout.groups) == 1 and not layout.groups[0].sparse

        self.each(scenario, pages=12, only=one_dense, unless="no mix is a single group that keeps everything")

    @pytest.mark.clause("CM-18")
    def test_what_is_in_use_stays_where_it_is(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            shared = range(500, 500 + block + max(1, block // 2))
            engine.turn(shared)
            # Small pages and large ones, with gaps between the small ones.
            everyone = [engine.open(range(1000 * n, 1000 * n + block), reuse=False) for n in range(1, 17)]
            engine.prefill(*everyone)
            kept = everyone[1::4]
            engine.close(*(sequence for sequence in everyone if sequence not in kept))
            idle = engine.open(shared, 77, 78)
            for sequence in kept:
                engine.learn(sequence)
            flight = engine.launch(Run(kept[0], 1))
            seen = what_is_read(engine, flight, kept[0])
            # One request takes all the room that there is, and whatever can move gives it some more.
            taker = engine.open(range(90_000, 90_000 + longest(manager.layout)), reuse=False)
            while taker.computed < taker.known:
                run = Run(taker, min(block, taker.known - taker.computed))
                if not manager.plan([run]).fits:
                    break
                engine.run(run)
            land_unchanged(engine, kept[0], [flight], [seen])
            engine.close(taker)
            engine.prefill(idle, *kept)
            for sequence in (idle, *kept):
                engine.decode(sequence, block)
            engine.close(idle, *kept)
            engine.drained()

        self.each(
            scenario,
            pages=20,
            unequal=True,
            only=lambda layout: len({group.page_bytes for group in layout.groups}) > 1 and limited(layout),
            unless="no mix has pages of several sizes, and a group that keeps everything",
        )


def limited(layout: Layout) -> bool:
    """Is there a group that keeps everything, so that not every prompt fits?"""
    return not layout.fits(1 << 30)


def longest(layout: Layout) -> int:
    """Tokens of the longest prompt that fits."""
    length = 1
    while layout.fits(length + 1):
        length += 1
    return length


def group_capacity(engine: Engine) -> int:
    """Pages of the only group."""
    layout = engine.manager.layout
    return layout.page_capacity(layout.groups[0])
