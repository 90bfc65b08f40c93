"""Slabs follow the traffic: groups of different page sizes share one arena without a split."""

from __future__ import annotations

import numpy as np

from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.memory.arena import Arena
from kvist.spec import History, Window
from kvist.testing.values import make_spec


def unequal_layout() -> Layout:
    """Pages of 192 and 64 bytes in slabs of 192 bytes: three small pages or a large one."""
    spec = make_spec(1, *[History()] * 3, Window(4), width=8)
    layout = Layout.build(spec, 61 * 192)
    assert [group.page_bytes for group in layout.groups] == [192, 64]
    assert layout.slab_bytes == 192
    return layout


def test_a_group_takes_slabs_that_another_has_emptied() -> None:
    arena = Arena(unequal_layout())
    assert arena.shortage([60, 0]) == [0, 0]
    assert arena.shortage([61, 0]) == [1, 0]
    assert arena.shortage([0, 181]) == [0, 1]
    assert arena.shortage([30, 91]) == [0, 1]
    arena.gather([0, 180])
    small = arena.take(1, 180)
    assert sorted(small.tolist()) == list(range(3, 183))
    assert arena.shortage([1, 0]) == [1, 0]
    # One page of each slab comes back: no slab is empty.
    arena.give(1, small[small % 3 == 0])
    assert arena.shortage([1, 0]) == [1, 0]
    assert arena.shortage([1, 0], [[], [small[small % 3 == 1], small[small % 3 == 2]]]) == [0, 0]
    arena.give(1, small[small % 3 != 0])
    # What the other group needs itself stays.
    assert arena.shortage([60, 1]) == [1, 0]
    assert arena.shortage([59, 1]) == [0, 0]
    arena.gather([59, 1])
    assert len(set(arena.take(0, 59).tolist())) == 59
    assert arena.check() == []


def test_pages_of_different_groups_never_overlap() -> None:
    layout = unequal_layout()
    manager = PagedCacheManager(layout)
    rng = np.random.default_rng(0)
    live: list = []
    for _ in range(300):
        if live and rng.random() < 0.4:
            manager.close(live.pop(int(rng.integers(len(live)))))
        sequence = manager.open(rng.integers(0, 1000, int(rng.integers(1, 15))))
        plan = manager.plan([Run(sequence, sequence.prompt_length)])
        if not plan.fits:
            manager.close(sequence)
            if live:
                manager.close(live.pop(0))
            continue
        step = plan.commit()
        used = np.zeros(layout.arena_bytes, np.int8)
        for group in layout.groups:
            # A prefix that two sequences share is one page, named twice.
            for page in {page for other in [*live, sequence] for page in step.tables[group.index][other.slot]} - {-1}:
                assert page > 0
                used[page * group.page_bytes : (page + 1) * group.page_bytes] += 1
        assert used.max() == 1
        # The reserved page 0 of every group.
        assert not used[:192].any()
        manager.complete(step)
        manager.check()
        live.append(sequence)
