"""Pages that a group keeps whatever the others need, and batches that can always run."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import CapacityError, SpecError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.spec import History, State, Window
from kvist.testing.engine import Engine
from kvist.testing.values import make_spec

HISTORY, WINDOW, STATE = "target/History()", "target/Window(tokens=6, sinks=0)", "target/State()"


def layout_of(slabs: int) -> Layout:
    """Pages of 512, 128 and 256 bytes, slabs of 512."""
    layout = Layout.build(make_spec(4, History(), Window(6), State(), widths=(16, 4, 32)), (slabs + 1) * 512)
    assert [group.page_bytes for group in layout.groups] == [512, 128, 256]
    assert (layout.slab_bytes, layout.slab_count) == (512, slabs + 1)
    return layout


def test_floors_are_whole_slabs_and_the_rest_is_everybodys() -> None:
    layout = layout_of(20).with_floors({WINDOW: 9, STATE: 2})
    # 9 pages of the window are three slabs of four, two states are one slab.
    assert layout.floor_slabs == (0, 3, 1)
    assert layout.shared_bytes == 16 * 512
    assert [layout.page_capacity(group) for group in layout.groups] == [16, 19 * 4, 17 * 2]
    # History of 16 blocks fits beside them, and the window's and the state's floors hold what those need.
    assert layout.fits(64) and not layout.fits(65)


def test_the_whole_arena_can_be_promised() -> None:
    layout = layout_of(6).with_floors({HISTORY: 3, WINDOW: 8, STATE: 2})
    assert (layout.floor_slabs, layout.shared_bytes) == ((3, 2, 1), 0)
    manager = PagedCacheManager(layout)
    manager.check()
    assert [group.free for group in manager.stats().groups] == [3, 8, 2]


@pytest.mark.parametrize(
    ("floors", "error", "text"),
    [
        (
            {"target/Window(tokens=7, sinks=0)": 1},
            SpecError,
            "a floor for 'target/Window(tokens=7, sinks=0)', which is no group\n"
            f"hint: the groups are {HISTORY}, {WINDOW}, {STATE}",
        ),
        ({STATE: -1}, SpecError, f"a floor of -1 pages for group {STATE}\nhint: a floor is zero or more pages"),
        (
            {HISTORY: 5, WINDOW: 5, STATE: 0},
            CapacityError,
            f"the floors do not fit: they need 3584 bytes (5 pages of group {HISTORY}, 5 pages of group {WINDOW}) "
            "and the "
            "cache has 3072\nhint: lower the floors or give the cache more memory",
        ),
        (
            {HISTORY: 5},
            CapacityError,
            f"the floors leave 1 of 6 slabs, and no page is sure for {WINDOW}, {STATE}\n"
            "hint: lower the floors, or give the cache more memory",
        ),
    ],
)
def test_floors_that_cannot_be_kept_are_refused(floors: dict, error: type, text: str) -> None:
    with pytest.raises(error) as caught:
        layout_of(6).with_floors(floors)
    assert str(caught.value) == text


def test_a_request_that_no_longer_fits_beside_the_floors_is_refused() -> None:
    manager = PagedCacheManager(layout_of(20).with_floors({STATE: 20}))
    with pytest.raises(CapacityError) as caught:
        manager.open(np.arange(40))
    assert str(caught.value) == (
        f"40 tokens never fit: they need 10752 bytes (10 pages of group {HISTORY}, 3 pages of group {WINDOW}, "
        "1 pages of "
        f"group {STATE}, floors included) and the cache has 10240\n"
        "hint: shorten the request or give the cache more memory"
    )


def test_other_groups_cannot_take_what_is_promised() -> None:
    """Requests that run without end in History fill what they can get; new ones still find pages of other groups."""
    for promised in (0, 24):
        engine = Engine(PagedCacheManager(layout_of(30).with_floors({STATE: promised})))
        engine.prefill(engine.open(range(4)))
        growing = engine.open(range(100, 104))
        while growing.computed < 4 * 40:
            engine.learn(growing)
            plan = engine.manager.plan([Run(growing, 1)])
            if not plan.fits:
                break
            engine.run(Run(growing, 1))
        states = engine.manager.stats().groups[2]
        assert (states.free + states.held >= 24) == bool(promised)


def test_a_guaranteed_batch_can_always_run() -> None:
    """Whatever is cached and however pages lie about, the batch is admitted, one after the other or all at once."""
    batch = [(30, 2), (9, 3)]
    layout = layout_of(60)
    floors = layout.floors_for(batch)
    # 8 and 3 blocks, with one page more for each sequence; three blocks of the window at most.
    assert floors == {HISTORY: 2 * 9 + 3 * 4, WINDOW: 2 * 4 + 3 * 4, STATE: 5 * 2}
    layout = layout.with_floors(floors)
    engine = Engine(PagedCacheManager(layout))
    rng = np.random.default_rng(0)
    for _ in range(10):
        for _ in range(12):
            start = 100 * int(rng.integers(5))
            engine.turn(range(start, start + int(rng.integers(1, 30))))
        sequences = []
        for length, count in batch:
            for number in range(count):
                start = 100 * ((number + int(rng.integers(5))) % 5)
                sequences.append(engine.open(range(start, start + length)))
        engine.prefill(*sequences, chunk=1)
        engine.close(*sequences)
    engine.drained()


def test_floors_of_groups_with_equal_pages() -> None:
    """One slab is one page of each group then, and any page serves any group, but for the floor."""
    layout = Layout.build(make_spec(4, History(), Window(6)), 13 * 128)
    assert layout.slab_bytes == layout.groups[0].page_bytes == layout.groups[1].page_bytes
    manager = PagedCacheManager(layout.with_floors({WINDOW: 5}))
    assert [group.free for group in manager.stats().groups] == [7, 12]
    engine = Engine(manager)
    sequence = engine.open(range(28), reuse=False)
    engine.prefill(sequence, chunk=4)
    engine.learn(sequence)
    assert [str(each) for each in engine.manager.plan([Run(sequence, 1)]).shortages] == [
        f"{HISTORY} needs 1 pages and can get 0"
    ]
    engine.close(sequence)
    for n in range(6):
        engine.turn(range(50 * n, 50 * n + 4 * (n + 1)))
    manager.check()
