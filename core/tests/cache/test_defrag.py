"""Pages move together when a slab is worth it: nobody loses content, and what fits on paper runs."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import CapacityError, StateError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.owed import Owed
from kvist.restore import RestorePolicy
from kvist.spec import History, Retention, State, Window
from kvist.testing.engine import Engine
from kvist.testing.values import make_spec, tokens


def engine_of(slabs: int, widths: tuple[int, ...], *retentions: Retention, **options: object) -> Engine:
    """Blocks of 4 tokens, pages of ``32 * width`` bytes (states ``8 * width``), ``slabs`` slabs beside the reserved
    one, each as large as the largest page."""
    spec = make_spec(4, *retentions, widths=widths)
    largest = max(group.page_bytes for group in Layout.build(spec, 1 << 24).groups)
    layout = Layout.build(spec, (slabs + 1) * largest)
    assert layout.slab_bytes == largest and layout.slab_count == slabs + 1
    return Engine(PagedCacheManager(layout, **options))  # type: ignore[arg-type]


def crowded() -> tuple[Engine, list]:
    """12 slabs: a page of History, or 6 of the window. Three sequences of one block each, whose window pages lie in two
    slabs; the rest is free."""
    engine = engine_of(12, (24, 4), History(), Window(4))
    sequences = [engine.open(range(10 * n, 10 * n + 4), reuse=False) for n in range(8)]
    for sequence in sequences:
        engine.prefill(sequence)
    places = {sequence.slot: window_slab(engine, sequence) for sequence in sequences}
    slabs = sorted(set(places.values()))
    assert len(slabs) == 2
    first = [each for each in sequences if places[each.slot] == slabs[0]]
    second = [each for each in sequences if places[each.slot] == slabs[1]]
    kept = [first[0], first[1], second[0]]
    engine.close(*(each for each in sequences if each not in kept))
    return engine, kept


def window_slab(engine: Engine, sequence) -> int:
    return int(engine.manager._tables.arrays[1][sequence.slot, 0]) // 6


def moved(engine: Engine) -> list[int]:
    return [group.moved for group in engine.manager.stats().groups]


def test_a_request_gets_the_slab_that_others_can_leave() -> None:
    engine, kept = crowded()
    # 3 + 8 pages of History and one slab of window pages: all twelve slabs.
    sequence = engine.open(range(100, 131))
    engine.prefill(sequence, chunk=4)
    assert moved(engine)[0] == 0 < moved(engine)[1]
    assert len({window_slab(engine, each) for each in kept}) == 1
    engine.close(sequence)
    # The oracle reads every row of theirs again.
    for each in kept:
        engine.decode(each, 6)
        engine.close(each)
    engine.drained()


def test_a_plan_moves_nothing_until_it_is_committed() -> None:
    engine, _ = crowded()
    sequence = engine.open(range(100, 131))
    while not any(moved(engine)):
        tables = [table.copy() for table in engine.manager._tables.arrays]
        before = engine.manager.stats()
        run = Run(sequence, min(4, sequence.known - sequence.computed))
        for _ in range(2):
            plan = engine.manager.plan([run])
            assert plan.fits
        assert engine.manager.stats() == before
        for old, new in zip(tables, engine.manager._tables.arrays):
            assert np.array_equal(old, new)
        engine.audit()
        engine.run(run)


def test_pages_of_a_step_in_flight_stay() -> None:
    engine, kept = crowded()
    sequence = engine.open(range(100, 127))
    for _ in range(6):
        engine.run(Run(sequence, 4))
    slabs = {window_slab(engine, each) for each in kept}
    assert len(slabs) == 2
    for each in kept:
        engine.learn(each)
    # A step in flight names pages in both slabs: neither can be emptied, though one slab would do for all pages.
    flight = engine.launch(Run(kept[0], 1))
    tables = [table[kept[0].slot].copy() for table in flight.step.tables]
    runs = [Run(kept[2], 1), Run(kept[1], 1)]
    plan = engine.manager.plan(runs)
    engine.audit()
    if plan.fits:
        plan.commit()
    for old, table in zip(tables, flight.step.tables):
        assert np.array_equal(old, table[kept[0].slot])


def test_what_waits_for_a_step_fits_when_it_is_completed() -> None:
    engine = engine_of(6, (24, 4), History(), Window(4))
    sequences = [engine.open(range(10 * n, 10 * n + 4), reuse=False) for n in range(4)]
    engine.prefill(*sequences)
    big = [each for each in sequences if window_slab(engine, each) == window_slab(engine, sequences[0])]
    assert len(big) == 4
    engine.close(*sequences[1:])
    flight = engine.launch(Run(extended(engine, sequences[0]), 1))
    waiting = engine.open(range(50, 66))
    fits = [engine.manager.plan([Run(waiting, count)]).fits for count in (4, 12)]
    engine.land(flight)
    assert fits == [engine.manager.plan([Run(waiting, count)]).fits for count in (4, 12)] == [True, True]


def extended(engine: Engine, sequence):
    engine.learn(sequence)
    return sequence


def test_content_moves_instead_of_being_evicted() -> None:
    """The same prompts, once with and once without moving: what a slab still holds stays cached."""
    reused = {True: 0, False: 0}
    moves = 0
    for seed in range(6):
        for moving in (True, False):
            engine = engine_of(29, (16, 4, 32), History(), Window(5), State(), restore=RestorePolicy(every_blocks=2))
            manager = engine.manager
            manager._defragmenter.useful = moving
            rng = np.random.default_rng(seed)
            prompts = [tokens(range(1000 * n, 1000 * n + 4 * int(rng.integers(1, 12)) + 1)) for n in range(30)]
            for _ in range(150):
                # Some prompts are asked for far more often than others.
                sequence = manager.open(prompts[min(29, int(rng.exponential(6)))])
                assert compute(manager, sequence, 64)
                reused[moving] += sequence.reused
                manager.close(sequence)
            moves += sum(moved(engine))
            assert moving or not any(moved(engine))
    assert moves
    assert reused[True] > reused[False]


@pytest.mark.parametrize("ran", [False, True])
def test_a_cancelled_step_had_moved_pages(ran: bool) -> None:
    engine, kept = crowded()
    prompt = range(100, 131)
    sequence = engine.open(prompt)
    while True:
        plan = engine.manager.plan([Run(sequence, min(4, sequence.known - sequence.computed))])
        assert plan.fits
        if plan.eviction.moves is not None:
            break
        engine.run(Run(sequence, 4))
    engine.texts[id(sequence)] = tokens(prompt)
    step = plan.commit()
    targets = step.copies[1][:, 1].tolist()
    owners = [each for each in kept if step.tables[1][each.slot, 0] in targets]
    assert owners
    if ran:
        engine.values.run(step, [sequence], engine.texts, [step.token_count])
    engine.manager.cancel(step, ran=ran)
    engine.audit()
    # A step that has begun has made its copies; of one that has not, the next step makes them.
    assert not any(each.suspended for each in kept)
    if sequence.suspended:
        engine.resume(sequence)
    engine.prefill(sequence, chunk=4)
    engine.close(sequence)
    for each in kept:
        engine.decode(each, 6)
        engine.close(each)
    engine.drained()


def test_copies_cannot_be_taken_back_while_later_steps_rely_on_them() -> None:
    engine = engine_of(12, (24, 4), History(), Window(8))
    parent = engine.open(range(6))
    engine.prefill(parent)
    child = engine.fork(parent)
    engine.learn(parent)
    first = engine.launch(Run(parent, 1))
    engine.learn(child)
    second = engine.launch(Run(child, 1))
    with pytest.raises(StateError) as caught:
        engine.manager.cancel(first.step, ran=False)
    assert str(caught.value) == (
        f"step {first.step.id} has copies or zeros that have to come before a later step\n"
        "hint: cancel the later step first, or carry them out and cancel with ran=True"
    )
    engine.manager.cancel(second.step)
    engine.manager.cancel(first.step)
    engine.audit()


def test_a_forked_state_outlives_the_step_that_spoils_its_origin() -> None:
    engine = engine_of(12, (2, 16), History(), State())
    parent = engine.open(range(8))
    engine.prefill(parent)
    child = engine.fork(parent)
    engine.learn(parent)
    flight = engine.launch(Run(parent, 1))
    engine.manager.cancel(flight.step)
    engine.audit()
    # The fork's copy was made before the parent's state was overwritten.
    assert parent.suspended and not child.suspended
    engine.resume(parent)
    engine.prefill(parent)
    for each in (parent, child):
        engine.decode(each, 3)


def test_what_is_owed_to_a_page_that_was_given_up_makes_way() -> None:
    engine = engine_of(6, (24, 4), History(), Window(4))
    owed = Owed(engine.manager.layout)
    # Page 2 of the first group is pages 12 to 17 of the second.
    owed.copy([[(1, 2)], [(7, 18)]])
    owed.copy([[], [(8, 13)]])
    owed.zero([[3], []])
    copies, fresh = owed.take()
    assert [each.tolist() for each in copies] == [[], [[8, 13]]]
    assert [each.tolist() for each in fresh] == [[3], []]


def test_a_large_copy_gives_way_to_eviction_where_that_is_enough() -> None:
    engine = engine_of(12, (24, 4), History(), Window(4))
    defragmenter = engine.manager._defragmenter
    defragmenter._limit_bytes = 0
    for n in range(30):
        engine.turn(*range(100 * n, 100 * n + 4 * (1 + n % 5)))
    assert moved(engine) == [0, 0]
    # When nothing else helps, the limit does not count.
    engine, _ = crowded()
    engine.manager._defragmenter._limit_bytes = 0
    sequence = engine.open(range(100, 131))
    engine.prefill(sequence, chunk=4)
    assert moved(engine)[0] == 0 < moved(engine)[1]


MIXES: list[tuple[Retention, ...]] = [
    (History(), Window(6)),
    (History(), State()),
    (History(), Window(6), State()),
    (Window(5), State()),
    (History(), Window(9, sinks=2), Window(3)),
]


@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_what_fits_on_paper_runs_alone(mix: int) -> None:
    """Traffic leaves pages all over the arena; then one request that fits alone must always get what it needs."""
    moves = 0
    for seed in range(60):
        moves += alone_after_traffic(mix, seed)
    assert moves > 0


def alone_after_traffic(mix: int, seed: int) -> int:
    rng = np.random.default_rng([mix, seed])
    retentions = MIXES[mix]
    spec = make_spec(int(rng.integers(1, 5)), *retentions, widths=(8 * rng.integers(1, 9, len(retentions))).tolist())
    largest = max(group.page_bytes for group in Layout.build(spec, 1 << 26).groups)
    try:
        layout = Layout.build(spec, largest * int(rng.integers(len(retentions) + 2, 24)))
    except CapacityError:
        return 0
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks=int(rng.integers(1, 4)) if seed % 2 else None))
    longest = max((n for n in range(1, 61) if layout.fits(n)), default=0)
    if not longest:
        return 0
    texts = [rng.integers(0, 3, longest)]

    def prompt(fresh: int) -> np.ndarray:
        text = texts[rng.integers(len(texts))]
        return np.concatenate([text[: rng.integers(0, len(text) + 1)], rng.integers(0, 3, fresh)])

    live: list = []
    for _ in range(20):
        if live and rng.random() < 0.35:
            manager.close(live.pop(int(rng.integers(len(live)))))
            continue
        texts.append(prompt(int(rng.integers(1, 6)))[:longest])
        sequence = manager.open(texts[-1])
        (live.append if compute(manager, sequence, int(rng.integers(1, 9))) else manager.close)(sequence)
    for sequence in live:
        manager.close(sequence)
    for length in range(longest, max(0, longest - 3), -1):
        sequence = manager.open(prompt(longest)[:length])
        while sequence.computed < length:
            assert compute(manager, sequence, 4) or compute(manager, sequence, 1, 1), (seed, length, sequence.computed)
        manager.check()
        manager.close(sequence)
    return sum(group.moved for group in manager.stats().groups)


def compute(manager: PagedCacheManager, sequence, chunk: int, count: int = 1 << 30) -> bool:
    """Compute what is known in chunks; ``False`` when one does not fit."""
    while sequence.computed < sequence.known and count:
        end = sequence.next_end(min(sequence.known, sequence.computed + chunk))
        plan = manager.plan([Run(sequence, end - sequence.computed)])
        if not plan.fits:
            return False
        manager.complete(plan.commit())
        count -= 1
    return True
