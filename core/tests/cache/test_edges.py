"""Edges of reuse, eviction, steps and numbers that hand-made sequences and random traffic do not reach.

``P = 4`` tokens per block throughout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_requests import P, cached, compute, counts, manager_of

from kvist.errors import CapacityError, RequestError, StateError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.prefix.match import find
from kvist.prefix.tree import PrefixTree
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Layer, Retention, RowFormat, Scope, Stream, Window
from kvist.step import NO_PAGE
from kvist.testing.values import make_layout, make_spec, tokens


def reserve(manager: PagedCacheManager, blocks: int) -> None:
    """Hold ``blocks`` pages per group, whatever must be evicted for them, and publish nothing."""
    sequence = manager.open([9999])
    manager.cancel(manager.plan([Run(sequence, blocks * P)]).commit())
    manager.check()


# Eviction: which pages, how many, in which order


@pytest.mark.parametrize("seed", range(5))
def test_every_cached_page_of_a_history_can_be_had(seed: int) -> None:
    rng = np.random.default_rng(seed)
    manager = manager_of(60)
    for _ in range(40):
        cached(manager, *(int(token) for token in rng.integers(0, 2, int(rng.integers(1, 24)))))
    free, evictable, held = counts(manager)
    assert held == 0
    assert evictable > 30
    sequence = manager.open([7])
    refused = manager.plan([Run(sequence, 61 * P)])
    assert [(s.needed, s.available) for s in refused.shortages] == [(61, free + evictable)] == [(61, 60)]
    manager.complete(manager.plan([Run(sequence, 60 * P)]).commit())
    manager.check()
    assert counts(manager) == (0, 0, 60)


def test_a_parent_whose_children_are_gone_goes_before_what_was_used_later() -> None:
    manager = manager_of(5)
    cached(manager, range(1, 9))
    cached(manager, range(1, 5), range(50, 54))
    cached(manager, range(60, 68))
    # Two children and their parent are older than the last request.
    reserve(manager, 3)
    assert manager.probe(tokens(range(60, 68), 99)) == 8
    assert manager.probe(tokens(range(1, 9), 99)) == 0


def test_closing_counts_as_using() -> None:
    manager = manager_of(4)
    first = manager.open(tokens(range(1, 9)))
    compute(manager, first)
    cached(manager, range(11, 19))
    manager.close(first)
    reserve(manager, 2)
    assert manager.probe(tokens(range(1, 9), 99)) == 8
    assert manager.probe(tokens(range(11, 19), 99)) == 0


def test_what_lies_behind_the_used_part_keeps_its_age() -> None:
    manager = manager_of(6)
    long, short = manager.open(tokens(range(1, 17))), manager.open(tokens(range(1, 9)))
    step = manager.plan([Run(long, 16), Run(short, 8)]).commit()
    manager.complete(step)
    manager.close(long)
    cached(manager, range(50, 58))
    manager.close(short)
    # In order of last use: 9..16, 50..57, 1..8.
    reserve(manager, 2)
    assert manager.probe(tokens(range(1, 17), 99)) == 8
    assert manager.probe(tokens(range(50, 58), 99)) == 8


def test_a_large_arena_evicts_a_little_ahead_and_a_small_one_does_not() -> None:
    # One page in 512 ahead: 2 of 1100, beside the one that is needed.
    for pages, evicted in ((1100, 3), (500, 1)):
        manager = manager_of(pages)
        cached(manager, range(pages * P))
        reserve(manager, 1)
        assert manager.stats().groups[0].evicted == evicted
        assert counts(manager) == (evicted - 1, pages - evicted, 1)


@pytest.mark.parametrize("retentions", [(History(),), (History(), Window(400 * P))])
def test_pages_ahead_are_a_wish_and_refuse_nothing(retentions: tuple[Retention, ...]) -> None:
    manager = manager_of(2098, *retentions)
    blocks = 2098 // len(retentions)
    cached(manager, range(P))
    reserve(manager, blocks - 1)
    assert [counts(manager, group)[1] for group in range(len(retentions))] == [1] * len(retentions)
    sequence = manager.open([7])
    assert not manager.plan([Run(sequence, 2 * P)]).fits
    assert manager.plan([Run(sequence, P)]).fits


def test_groups_of_equal_pages_serve_each_other_and_evict_no_more_than_is_lacking() -> None:
    manager = manager_of(20, History(), Window(100))
    cached(manager, range(8 * P))
    assert [counts(manager, group)[:2] for group in (0, 1)] == [(4, 8), (4, 8)]
    # Four blocks are eight pages, four are free: two blocks of the other request are the other four.
    reserve(manager, 4)
    assert [group.evicted for group in manager.stats().groups] == [2, 2]
    assert manager.probe(tokens(range(8 * P), 99)) == 6 * P


def test_a_page_that_only_the_wider_window_holds_is_not_evicted() -> None:
    manager = manager_of(12, Window(1), Window(8))
    sequence = manager.open(tokens(range(12)))
    step = compute(manager, sequence)
    held = step.tables[1][sequence.slot, :3].tolist()
    assert held[0] == NO_PAGE
    assert NO_PAGE not in held[1:]
    assert (step.tables[0][sequence.slot, :2] == NO_PAGE).all()
    for number in range(20):
        cached(manager, range(100 + 16 * number, 110 + 16 * number))
    assert step.tables[1][sequence.slot, :3].tolist() == held
    manager.close(sequence)
    manager.check()


# Reuse


def test_a_branch_is_found_whatever_the_size_of_its_token_ids() -> None:
    rng = np.random.default_rng(0)
    manager = manager_of(400)
    # Ids on both sides of every byte.
    ids = np.array([0, 1, 255, 256, 257, 511, 512, 65535, 65536, 65537, 1 << 24, (1 << 24) + 1])
    branches = [tokens(7, *(int(token) for token in rng.choice(ids, P - 1))) for _ in range(60)]
    for branch in branches:
        cached(manager, *(int(token) for token in branch))
    for _ in range(200):
        prompt = tokens(7, *(int(token) for token in rng.choice(ids, P - 1)), 5)
        best = max(int((np.append(branch, -1) != prompt).argmax()) for branch in branches)
        assert manager.probe(prompt) == best


def test_a_computed_window_fills_the_gaps_of_known_blocks() -> None:
    manager = manager_of(60, History(), Window(5))
    cached(manager, range(1, 21))
    # A branch after 8 tokens, so that the known blocks lie in two extents.
    cached(manager, range(1, 9), range(50, 62))
    # The second prompt left the first one's path after 8 tokens, and keeps what resuming there takes.
    assert manager.probe(tokens(range(1, 13), 99)) == 8
    again = manager.open(tokens(range(1, 13)))
    compute(manager, again, 4)
    manager.close(again)
    manager.check()
    # Resuming at 12 reads 8..11, resuming at 11 reads 7..10, which lie in both extents.
    assert manager.probe(tokens(range(1, 13), 99)) == 12
    assert manager.probe(tokens(range(1, 13))) == 11


def test_restore_points_at_intervals_do_not_depend_on_chunks() -> None:
    for chunk in (4, 8, 12, 20):
        manager = manager_of(60, History(), Window(5), restore=RestorePolicy(every_blocks=2))
        sequence = manager.open(tokens(range(1, 21)))
        while sequence.computed < 20:
            compute(manager, sequence, min(chunk, 20 - sequence.computed))
        manager.close(sequence)
        assert [manager.probe(tokens(range(1, 1 + n), 99)) for n in (7, 8, 15, 16, 18)] == [0, 8, 8, 16, 18]


def test_what_one_group_lacks_is_asked_again_of_the_others() -> None:
    layout = make_layout(make_spec(P, Window(5), Window(9)), 40)
    tree = PrefixTree(P, 2)
    run = tokens(range(20))
    n = NO_PAGE
    # To resume at 20 they read blocks 4 and 3..4, at 12 blocks 2 and 1..2, at 4 block 0.
    tree.insert(Scope(), run, np.array([[1, n, n, n, 5], [1, 2, 3, n, n]], np.int32))
    assert find(tree, layout, layout.groups, Scope(), tokens(range(21)), 20).length == 4


def test_a_remembered_place_is_forgotten_when_its_tokens_change() -> None:
    # Window(1) holds the block being filled only, so others can evict and replace what a running request published.
    manager = manager_of(8, Window(1))
    running, short = manager.open(tokens(range(40))), manager.open(tokens(range(12)))
    manager.complete(manager.plan([Run(running, 13), Run(short, 12)]).commit())
    # The shorter prompt keeps block 2 for its restore point at 11, and only that page is evicted.
    manager.close(short)
    assert counts(manager) == (6, 1, 1)
    filler = manager.open([9999])
    manager.cancel(manager.plan([Run(filler, 7 * P)]).commit())
    manager.close(filler)
    cached(manager, range(8), range(50, 54))
    compute(manager, running)
    manager.close(running)
    manager.check()
    assert manager.probe(tokens(range(8), range(50, 54), range(12, 40), 99)) == 12
    assert manager.probe(tokens(range(40), 99)) == 40


def test_offering_again_and_again_costs_no_memory() -> None:
    tree = PrefixTree(P, 1)
    tip = tree.insert(Scope(), tokens(range(8)), np.array([[1, 2]], np.int32)).tip
    for _ in range(5000):
        tree.hold(tip)
        tree.release(tip)
    assert len(tree.candidates) <= 1100
    assert list(tree.leaves()) == [tip]


def test_a_prompt_that_can_be_written_to_is_copied() -> None:
    manager = manager_of(8)
    prompt = tokens(range(1, 9))
    sequence = manager.open(prompt)
    prompt[:] = 0
    compute(manager, sequence)
    assert sequence.tokens.tolist() == list(range(1, 9))
    assert manager.probe(tokens(range(1, 9), 99)) == 8


def test_every_kind_of_integer_array_is_checked() -> None:
    manager = manager_of(8, vocab_size=100)
    strided = np.array([1, 0, 100, 0], np.int32)[::2]
    for prompt in (strided, np.array([1, 100]), np.array([1, 100], np.uint8), np.array([1, 100], ">i4")):
        with pytest.raises(RequestError, match=r"token id 100 at position 1 is outside 0\.\.99"):
            manager.open(prompt)
    assert manager.open(np.array([1, 0, 2, 0], np.int32)[::2]).tokens.tolist() == [1, 2]


def test_the_open_block_of_a_running_request_is_not_found() -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(range(1, 7)))
    compute(manager, sequence)
    assert manager.probe(tokens(range(1, 7), 99)) == 4
    manager.close(sequence)
    assert manager.probe(tokens(range(1, 7), 99)) == 6


# Memory


def test_parts_of_a_page_start_where_any_element_may() -> None:
    odd = Stream("scale", RowFormat((3,), "uint8"), History())
    wide = Stream("k", RowFormat((2,), "float64"), History())
    layout = Layout.build(CacheSpec((Layer(0, (odd, wide)),), 1, "f"), 1 << 16)
    assert [(part.offset, part.byte_count) for part in layout.groups[0].parts] == [(0, 3), (16, 16)]


def test_page_ids_of_a_large_arena_are_all_different() -> None:
    manager = manager_of(100_000)
    reserve(manager, 99_999)
    assert counts(manager) == (1, 0, 99_999)


# Steps


def change_complete(manager: PagedCacheManager, sequence, batch, step) -> None:
    manager.complete(step)


def change_cancel(manager: PagedCacheManager, sequence, batch, step) -> None:
    manager.cancel(step)


def change_close(manager: PagedCacheManager, sequence, batch, step) -> None:
    manager.close(sequence)


def change_join(manager: PagedCacheManager, sequence, batch, step) -> None:
    batch.join(sequence)


def change_leave(manager: PagedCacheManager, sequence, batch, step) -> None:
    batch.leave(batch.sequences[0])


@pytest.mark.parametrize("change", [change_complete, change_cancel, change_close, change_join, change_leave])
def test_a_plan_is_stale_after_any_change(change: Callable[..., None]) -> None:
    manager = manager_of(20)
    flying, idle, decoding, planned = (manager.open(tokens(range(n, n + 5))) for n in (10, 20, 30, 40))
    for sequence in (idle, decoding):
        compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(decoding)
    step = manager.plan([Run(flying, 5)]).commit()
    plan = manager.plan([Run(planned, 5)], decode=batch)
    change(manager, idle, batch, step)
    before = manager.stats()
    with pytest.raises(StateError, match="this plan is stale"):
        plan.commit()
    assert manager.stats() == before
    manager.check()


def test_rows_that_leave_do_not_change_a_step_that_somebody_kept() -> None:
    manager = manager_of(20)
    sequences = [manager.open(tokens(range(n, n + 5))) for n in (10, 20, 30)]
    batch = manager.decode_batch()
    for sequence in sequences:
        compute(manager, sequence)
        batch.join(sequence)
    step = manager.plan(decode=batch).commit()
    manager.complete(step)
    kept = step.slots.tolist()
    batch.leave(sequences[0])
    manager.complete(manager.plan(decode=batch).commit())
    assert step.slots.tolist() == kept
    assert (step.lengths.tolist(), step.query_lengths.tolist()) == ([6, 6, 6], [1, 1, 1])


def test_tables_grow_with_sequences_and_blocks_and_steps_see_it() -> None:
    manager = manager_of(400)
    sequences = [manager.open(tokens(range(100 * n, 100 * n + 3))) for n in range(40)]
    early = manager.plan([Run(sequences[0], 3)]).commit()
    long = manager.open(tokens(range(10_000, 10_000 + 80 * P)))
    runs = [Run(sequence, 3) for sequence in sequences[1:]]
    step = manager.plan([Run(long, 80 * P), *runs]).commit()
    pages = [step.tables[0][long.slot, :80]] + [step.tables[0][run.sequence.slot, :1] for run in runs]
    used = np.concatenate([*pages, early.tables[0][sequences[0].slot, :1]]).tolist()
    assert len(set(used) - {NO_PAGE, 0}) == 80 + 40
    manager.complete(step)
    manager.complete(early)
    manager.check()


def test_a_decoding_row_never_opens_a_block_it_has() -> None:
    manager = manager_of(20)
    cancelled, drafted = (manager.open(tokens(range(n, n + 8))) for n in (10, 20))
    batch = manager.decode_batch()
    compute(manager, cancelled)
    batch.join(cancelled)
    for _ in range(5):
        manager.cancel(manager.plan(decode=batch).commit())
    assert cancelled.reserved == 12
    # One of nine is kept: blocks 2 and 3 have a page already.
    compute(manager, drafted, 7)
    manager.complete(manager.plan([Run(drafted, 1, drafts=8)]).commit(), [1])
    assert (drafted.computed, drafted.reserved) == (8, 16)
    other = manager.decode_batch()
    other.join(drafted)
    for _ in range(8):
        manager.complete(manager.plan(decode=batch).commit())
        manager.complete(manager.plan(decode=other).commit())
    assert (cancelled.reserved, drafted.reserved) == (16, 16)
    assert counts(manager)[2] == 8
    manager.check()


def test_closing_during_a_step_that_is_cancelled_happens_then() -> None:
    manager = manager_of(8)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(1, 2, 9, 9, 9))
    step = manager.plan([Run(sequence, 3)]).commit()
    manager.close(sequence)
    with pytest.raises(StateError):
        manager.plan([Run(sequence, 1)])
    manager.cancel(step)
    manager.check()
    assert sequence.closed
    assert counts(manager) == (6, 2, 0)


def test_runs_keep_the_order_in_which_they_were_given() -> None:
    manager = manager_of(20)
    long, middle, one, other = (manager.open(tokens(range(n, n + 6))) for n in (10, 20, 30, 40))
    plan = manager.plan([Run(long, 5), Run(one, 1), Run(middle, 3), Run(other, 1)])
    assert plan.sequences == [one, other, long, middle]
    assert plan.commit().query_lengths.tolist() == [1, 1, 5, 3]


def test_drafts_count_towards_the_models_length() -> None:
    manager = manager_of(20, max_tokens=12)
    sequence = manager.open(tokens(range(8)))
    assert manager.plan([Run(sequence, 8, drafts=4)]).fits
    with pytest.raises(RequestError, match="a run to 13 tokens goes past the model's 12"):
        manager.plan([Run(sequence, 8, drafts=5)])


# Numbers


def test_rejected_drafts_are_not_computed_tokens_and_decoded_ones_are() -> None:
    manager = manager_of(20)
    sequence = manager.open(tokens(range(1, 7)))
    manager.complete(manager.plan([Run(sequence, 6, drafts=3)]).commit())
    assert sequence.computed == 6
    manager.complete(manager.plan([Run(sequence, 1, drafts=3)]).commit(), [2])
    assert (sequence.computed, manager.stats().computed_tokens) == (8, 8)
    batch = manager.decode_batch()
    batch.join(sequence)
    for _ in range(3):
        manager.complete(manager.plan(decode=batch).commit())
    stats = manager.stats()
    assert (stats.computed_tokens, stats.steps) == (11, 5)


def test_a_request_that_only_ever_decoded_counts_once_it_is_closed() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(range(1, 10)))
    assert sequence.reused == 8
    batch = manager.decode_batch()
    batch.join(sequence)
    manager.complete(manager.plan(decode=batch).commit())
    manager.close(sequence)
    stats = manager.stats()
    assert (stats.requests, stats.prompt_tokens, stats.reused_tokens, stats.computed_tokens) == (2, 17, 8, 9)


def test_tokens_reused_inside_a_block_count_too() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 9))
    cached(manager, range(1, 7), 50, 51)
    assert manager.stats().reused_tokens == 6


def test_the_peak_is_the_most_that_was_held_at_once() -> None:
    manager = manager_of(20)
    for start, length in ((100, 12), (200, 4)):
        cached(manager, range(start, start + length))
    sequence = manager.open(tokens(range(300, 312)))
    compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(sequence)
    assert manager.stats().groups[0].held_peak == 3
    manager.complete(manager.plan(decode=batch).commit())
    assert manager.stats().groups[0].held_peak == 4
    manager.close(sequence)
    assert manager.stats().groups[0].held_peak == 4


# Capacity


@pytest.mark.parametrize("retention", [Window(1), Window(6), Window(8), Window(9), Window(6, sinks=3)])
@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_what_is_accepted_alone_can_be_computed_alone(retention: Retention, pages: int) -> None:
    accepted = []
    for length in range(1, 30):
        manager = manager_of(pages, retention)
        try:
            sequence = manager.open(tokens(range(length)))
        except CapacityError:
            accepted.append(False)
            continue
        accepted.append(True)
        while sequence.computed < length:
            compute(manager, sequence, 1)
    # Monotone: a longer request needs no less.
    assert accepted == sorted(accepted, reverse=True)


def test_what_was_opened_before_does_not_change_what_fits() -> None:
    manager = manager_of(2, Window(8))
    manager.close(manager.open(tokens(range(7))))
    with pytest.raises(CapacityError):
        manager.open(tokens(range(30)))


@pytest.mark.parametrize(("every", "pages", "prompt"), [(None, 14, 24), (1, 18, 24)])
def test_cached_window_pages_inside_a_held_run_give_way(every: int | None, pages: int, prompt: int) -> None:
    # One request alone grows until History needs every page but the two of the window.
    manager = manager_of(pages, History(), Window(4), restore=RestorePolicy(every_blocks=every))
    sequence = manager.open(tokens(range(prompt)))
    compute(manager, sequence)
    for token in range(prompt, (pages - 3) * P):
        sequence.extend([token])
        compute(manager, sequence)
    manager.close(sequence)
    manager.check()


def test_slabs_leave_most_of_the_memory_usable() -> None:
    def layout_of(units: tuple[int, int], memory_units: int) -> Layout:
        rows = [RowFormat((unit * 16,), "float32") for unit in units]
        retentions: list[Retention] = [History(), Window(8)]
        layers = tuple(
            Layer(number, (Stream("k", row, retention),))
            for number, (row, retention) in enumerate(zip(rows, retentions, strict=True))
        )
        return Layout.build(CacheSpec(layers, 1, "test"), memory_units * 64)

    # Pages of 31 and 29 units: slabs of 31 units waste two in 31 of the second group's pages.
    for memory in (1000, 4000):
        layout = layout_of((31, 29), memory)
        usable = sum(layout.page_capacity(group) * group.content_bytes for group in layout.groups) / 2
        assert usable / (memory * 64) > 0.85
    assert layout_of((31, 29), 93).slab_count == 3
    with pytest.raises(CapacityError):
        layout_of((31, 29), 92)


# Restore points


def test_the_same_turn_can_be_asked_again() -> None:
    for window in (1, 2, 5, 8):
        for length in (4, 5, 11, 12, 13):
            manager = manager_of(40, History(), Window(window))
            cached(manager, range(length))
            assert manager.probe(tokens(range(length))) == length - 1
            assert manager.probe(tokens(range(length), 99)) == length


def test_continuing_a_turn_keeps_its_restore_point() -> None:
    manager = manager_of(40, History(), Window(5))
    cached(manager, range(6))
    sequence = manager.open(tokens(range(6), 50, 51, 52))
    assert sequence.reused == 6
    compute(manager, sequence)
    manager.close(sequence)
    manager.check()
    assert manager.probe(tokens(range(6), 99)) == 6


def test_decoding_passes_restore_points_too() -> None:
    manager = manager_of(60, History(), Window(5), restore=RestorePolicy(every_blocks=2))
    sequence = manager.open(tokens(range(3)))
    compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(sequence)
    for token in range(3, 24):
        sequence.extend([token])
        manager.complete(manager.plan(decode=batch).commit())
        manager.check()
    manager.close(sequence)
    assert [manager.probe(tokens(range(length), 99)) for length in (8, 9, 15, 16, 24)] == [8, 8, 8, 16, 24]


def test_a_retention_may_keep_more_than_it_requires() -> None:
    class Generous:
        """Would like the last two blocks, and can do without them."""

        exact = False
        ring = 0
        most_drafts = None

        def live(self, length: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
            end = -(-length // block_tokens)
            return ((max(0, end - 2), end),) if end else ()

        def required(self, length: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
            return ()

        def droppable(self, length: int, rollback: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
            end = max(0, -(-(length - rollback) // block_tokens) - 2)
            return ((0, end),) if end > 0 else ()

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Generous)

    manager = manager_of(40, History(), Generous())
    cached(manager, range(21))
    sequence = manager.open(tokens(range(15), 99))
    assert sequence.reused == 15
    compute(manager, sequence)
    manager.close(sequence)
    manager.check()


# Misuse


@pytest.mark.parametrize("run", [(2.5, 0), (2, 0.5), ("2", 0)])
def test_counts_that_are_not_integers_are_refused_when_planned(run: tuple) -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(range(8)))
    with pytest.raises(TypeError):
        manager.plan([Run(sequence, *run)])
    manager.check()
    compute(manager, sequence)


def test_managers_do_not_take_each_others_sequences_and_steps() -> None:
    first, second = manager_of(8), manager_of(8)
    ours, theirs = (manager.open(tokens(range(8))) for manager in (first, second))
    for call, text in (
        (lambda: first.plan([Run(theirs, 4)]), "plan() of another manager's sequence"),
        (lambda: first.close(theirs), "close() of another manager's sequence"),
    ):
        with pytest.raises(StateError) as caught:
            call()
        assert caught.value.message == text
    step = second.plan([Run(theirs, 8)]).commit()
    mine = first.plan([Run(ours, 8)]).commit()
    assert step.id == mine.id
    for call in (first.complete, first.cancel):
        with pytest.raises(StateError, match="with the manager that it came from"):
            call(step)
    first.complete(mine)
    second.complete(step)
    first.check()
    second.check()


def test_a_step_is_read_only() -> None:
    manager = manager_of(20)
    sequences = [manager.open(tokens(range(n, n + 5))) for n in (10, 20)]
    steps = [manager.plan([Run(sequence, 5) for sequence in sequences]).commit()]
    manager.complete(steps[0])
    batch = manager.decode_batch()
    for sequence in sequences:
        batch.join(sequence)
    steps.append(manager.plan(decode=batch).commit())
    for step in steps:
        for array in (step.slots, step.query_lengths, step.lengths, *step.tables, *step.copies):
            assert not array.flags.writeable


def test_decoding_ends_at_the_models_length() -> None:
    manager = manager_of(20, max_tokens=8)
    long, short = manager.open(tokens(range(6))), manager.open(tokens(range(20, 23)))
    batch = manager.decode_batch()
    for sequence in (short, long):
        compute(manager, sequence)
        batch.join(sequence)
    for _ in range(2):
        manager.complete(manager.plan(decode=batch).commit())
    with pytest.raises(RequestError) as caught:
        manager.plan(decode=batch)
    assert str(caught.value) == (
        "a row of the decode batch has the model's 8 tokens\nhint: take it out of the batch with leave(), or close it"
    )
    batch.leave(long)
    for _ in range(3):
        manager.complete(manager.plan(decode=batch).commit())
    with pytest.raises(RequestError):
        manager.plan(decode=batch)


@pytest.mark.parametrize("accepted", [[7], [1.5], ["1"]])
def test_accepted_counts_are_integers_of_the_runs(accepted: list) -> None:
    manager = manager_of(20)
    sequence = manager.open(tokens(range(5)))
    compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(sequence)
    step = manager.plan(decode=batch).commit()
    with pytest.raises((StateError, TypeError)):
        manager.complete(step, accepted)
    manager.complete(step)
    manager.check()


def test_a_ragged_prompt_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        manager_of(8).open([[1, 2], [3]])
    assert str(caught.value) == "token ids are a ragged list\nhint: give one flat list or array of ids"


def test_rings_resume_where_blocks_end_and_take_back_few_drafts() -> None:
    manager = manager_of(40, History(), Window(2, ring=3), restore=RestorePolicy(every_blocks=1))
    cached(manager, range(1, 15))
    # 14 tokens: three whole blocks, and the open one that ended with its ring as it is.
    assert [manager.probe(tokens(range(1, n), 99)) for n in (4, 5, 8, 12, 14, 15)] == [0, 4, 4, 8, 12, 14]
    sequence = manager.open(tokens(range(1, 15), 99))
    assert sequence.reused == 14
    with pytest.raises(RequestError) as caught:
        manager.plan([Run(sequence, 1, drafts=2)])
    assert str(caught.value) == (
        "Run(drafts=2): what the spec keeps can take back 1 at most\n"
        "hint: draft fewer tokens, or give the spec's ring or history more room"
    )
    manager.complete(manager.plan([Run(sequence, 1, drafts=1)]).commit(), [1])
    manager.check()
