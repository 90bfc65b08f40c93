"""What a manager does with reuse, shortage, windows, batches and misuse, on hand-made sequences.

``P = 4`` tokens per block throughout; ``1..8`` are token ids.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from cache_requests import P, cached, compute, counts, manager_of

from kvist.errors import CapacityError, RequestError, StateError
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import History, Scope, Window
from kvist.step import NO_PAGE
from kvist.testing.values import make_layout, make_spec, tokens

# Reuse


def test_a_wholly_cached_prompt_leaves_one_token_to_compute() -> None:
    manager = manager_of(6)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(range(1, 9)))
    assert sequence.reused == 7
    step = compute(manager, sequence)
    # Seven rows come from the cache, the last block into a page of its own, and the eighth is computed there.
    assert step.query_lengths.tolist() == [1]
    assert len(step.copies[0]) == 1
    sequence.extend(tokens(range(9, 13)))
    compute(manager, sequence)
    manager.close(sequence)
    assert manager.probe(tokens(range(1, 13), 50)) == 12


def test_probe_tells_what_open_claims_and_changes_nothing() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 12))
    for length in range(1, 14):
        prompt = tokens(range(1, 1 + length))
        before = manager.stats()
        probed = manager.probe(prompt)
        assert manager.stats() == before
        sequence = manager.open(prompt)
        assert sequence.reused == probed == min(length - 1, 11)
        manager.close(sequence)
        manager.check()


def test_part_of_a_block_is_reused_in_a_private_copy() -> None:
    manager = manager_of(8)
    first = manager.open(tokens(range(1, 9)))
    page = compute(manager, first).tables[0][first.slot, 0]
    second = manager.open(tokens(1, 2, 3, 9, 10))
    assert second.reused == 3
    step = compute(manager, second)
    source, destination = step.copies[0][0]
    assert source == page != destination == step.tables[0][second.slot, 0]
    # A block that matches in full is shared, not copied.
    third = manager.open(tokens(1, 2, 3, 4, 9))
    step = compute(manager, third)
    assert step.tables[0][third.slot, 0] == page
    assert not len(step.copies[0])


def test_the_best_of_many_branches_is_found_inside_a_block() -> None:
    manager = manager_of(400)
    for branch in range(64):
        cached(manager, 1, 2, 3, 4, 5, branch, branch, branch)
    assert manager.probe(tokens(1, 2, 3, 4, 5, 40, 40, 99)) == 7
    assert manager.probe(tokens(1, 2, 3, 4, 5, 40, 99, 99)) == 6
    assert manager.probe(tokens(1, 2, 3, 4, 5, 99, 99, 99)) == 5
    assert manager.probe(tokens(1, 2, 3, 4, 99, 99, 99, 99)) == 4


def test_scopes_never_meet() -> None:
    manager = manager_of(20)
    scopes = [Scope(), Scope(adapter="w1"), Scope(adapter="w2"), Scope(salt="a"), Scope(media=((2, "d1"),))]
    cached(manager, range(1, 10), scope=scopes[1])
    assert [manager.probe(tokens(range(1, 10)), scope) for scope in scopes] == [0, 8, 0, 0, 0]


def test_equal_prompts_computed_at_once_keep_one_copy() -> None:
    manager = manager_of(12)
    sequences = [manager.open(tokens(range(1, 9))) for _ in range(2)]
    step = manager.plan([Run(sequence, 8) for sequence in sequences]).commit()
    assert counts(manager) == (8, 0, 4)
    manager.complete(step)
    manager.check()
    assert counts(manager) == (10, 0, 2)
    for sequence in sequences:
        manager.close(sequence)
        manager.check()
    assert counts(manager) == (10, 2, 0)


def test_a_half_filled_block_is_never_shared_for_writing() -> None:
    manager = manager_of(12)
    first, second = (manager.open(tokens(range(1, 7))) for _ in range(2))
    step = manager.plan([Run(first, 6), Run(second, 6)]).commit()
    manager.complete(step)
    manager.check()
    pages = [manager.plan([Run(s, 1)]).commit().tables[0][s.slot, :2].tolist() for s in (first, second)]
    assert pages[0][0] == pages[1][0]
    assert pages[0][1] != pages[1][1]


def test_a_longer_tail_replaces_the_shorter_one_it_continues() -> None:
    manager = manager_of(12)
    cached(manager, range(1, 7))
    cached(manager, range(1, 8))
    # Blocks 1..4 and 5..7: the tail 5..6 was replaced.
    assert counts(manager) == (10, 2, 0)
    assert manager.probe(tokens(range(1, 20))) == 7
    cached(manager, range(1, 6))
    assert counts(manager) == (10, 2, 0)


def test_nothing_is_found_before_it_is_computed() -> None:
    manager = manager_of(8)
    first = manager.open(tokens(range(1, 10)))
    step = manager.plan([Run(first, 9)]).commit()
    assert manager.probe(tokens(range(1, 10))) == 0
    manager.cancel(step)
    manager.close(first)
    manager.check()
    assert manager.probe(tokens(range(1, 10))) == 0
    assert counts(manager) == (8, 0, 0)


def test_unknown_output_tokens_are_not_published() -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(1, 2, 3))
    compute(manager, sequence)
    for _ in range(9):
        manager.complete(manager.plan([Run(sequence, 1)]).commit())
    assert (sequence.committed, sequence.computed) == (3, 12)
    sequence.extend([4, 5, 6])
    manager.close(sequence)
    assert manager.probe(tokens(range(1, 20))) == 6


# Shortage and eviction


def test_a_refused_plan_names_the_shortage_and_changes_nothing() -> None:
    manager = manager_of(4)
    other = manager.open(tokens(range(90, 94)))
    compute(manager, other)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(range(1, 17)))
    assert sequence.reused == 8
    before = manager.stats()
    plan = manager.plan([Run(sequence, 8)])
    assert not plan.fits
    assert [(s.group, s.needed, s.available) for s in plan.shortages] == [("target/History()", 2, 1)]
    with pytest.raises(CapacityError) as caught:
        plan.commit()
    assert str(caught.value) == (
        "the plan does not fit: target/History() needs 2 pages and can get 1\n"
        "hint: plan fewer tokens, or close a sequence first"
    )
    assert manager.stats() == before
    manager.close(sequence)
    manager.check()
    assert counts(manager) == (1, 2, 1)
    cached(manager, range(30, 42))
    assert manager.probe(tokens(range(30, 43))) == 12


def test_a_request_never_evicts_its_own_hit() -> None:
    manager = manager_of(4)
    cached(manager, range(1, 9))
    cached(manager, range(50, 58))
    sequence = manager.open(tokens(range(1, 17)))
    assert sequence.reused == 8
    compute(manager, sequence)
    assert manager.probe(tokens(range(50, 58))) == 0
    assert manager.probe(tokens(range(1, 18))) == 16


def test_the_end_of_a_chain_goes_first() -> None:
    manager = manager_of(3)
    cached(manager, range(1, 13))
    cached(manager, range(60, 64))
    assert manager.probe(tokens(range(1, 14))) == 8


def test_the_least_recently_used_goes_first_and_using_means_opening() -> None:
    manager = manager_of(4)
    cached(manager, range(1, 9))
    cached(manager, range(11, 19))
    manager.close(manager.open(tokens(range(1, 9), 99)))
    cached(manager, range(21, 29))
    assert manager.probe(tokens(range(1, 9), 99)) == 8
    assert manager.probe(tokens(range(11, 19), 99)) == 0


def test_a_probe_does_not_keep_anything_alive() -> None:
    manager = manager_of(4)
    cached(manager, range(1, 9))
    cached(manager, range(11, 19))
    for _ in range(5):
        manager.probe(tokens(range(1, 9), 99))
    cached(manager, range(21, 29))
    assert manager.probe(tokens(range(1, 9), 99)) == 0


def test_a_hit_seen_by_a_probe_may_be_gone_when_it_is_opened() -> None:
    manager = manager_of(3)
    cached(manager, range(1, 9))
    assert manager.probe(tokens(range(1, 10))) == 8
    cached(manager, range(60, 68))
    assert manager.open(tokens(range(1, 10))).reused == 4


def test_planning_again_after_a_cancelled_step_reserves_no_more() -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(range(1, 9)))
    compute(manager, sequence)
    for _ in range(10):
        manager.cancel(manager.plan([Run(sequence, 1)]).commit())
        manager.check()
    assert (sequence.computed, sequence.reserved) == (8, 12)
    assert counts(manager) == (5, 0, 3)


@pytest.mark.parametrize("ran", [False, True])
def test_a_cancelled_step_repeats_its_copy_unless_it_was_made(ran: bool) -> None:
    manager = manager_of(8)
    cached(manager, range(1, 9))
    sequence = manager.open(tokens(1, 2, 3, 9, 10))
    first = manager.plan([Run(sequence, 2)]).commit()
    assert first.copies[0].tolist() != []
    manager.cancel(first, ran=ran)
    manager.check()
    second = manager.plan([Run(sequence, 2)]).commit()
    # Once the step has begun, the copy's source may be overwritten.
    assert second.copies[0].tolist() == ([] if ran else first.copies[0].tolist())
    manager.complete(second)
    manager.close(sequence)
    manager.check()


def test_a_pages_last_reader_decides_when_it_may_go() -> None:
    manager = manager_of(4)
    cached(manager, range(1, 9))
    readers = [manager.open(tokens(range(1, 9), 90 + number)) for number in range(3)]
    other = manager.open(tokens(range(60, 76)))
    for reader in readers:
        assert not manager.plan([Run(other, 16)]).fits
        manager.close(reader)
        manager.check()
    compute(manager, other)


def test_a_prompt_that_only_just_fits_goes_without_a_part_of_a_block() -> None:
    manager = manager_of(5)
    cached(manager, range(1, 19))
    for length, reused in ((16, 6), (20, 4)):
        prompt = tokens(range(1, 7), range(50, 44 + length))
        assert manager.probe(prompt) == reused
    sequence = manager.open(prompt)
    compute(manager, sequence)
    manager.close(sequence)


# Windows


def test_pages_inside_the_window_outlive_a_chunk() -> None:
    manager = manager_of(8, Window(8))
    sequence = manager.open(tokens(range(16)))
    step = compute(manager, sequence, 8)
    assert (step.tables[0][sequence.slot, :4] == NO_PAGE).tolist() == [False, False, True, True]
    step = compute(manager, sequence, 8)
    assert (step.tables[0][sequence.slot, :4] == NO_PAGE).tolist() == [True, True, False, False]


def test_a_window_shorter_than_a_block_keeps_the_newest_block() -> None:
    manager = PagedCacheManager(make_layout(make_spec(8, Window(4)), 8))
    sequence = manager.open(tokens(range(16)))
    step = compute(manager, sequence)
    assert (step.tables[0][sequence.slot, :2] == NO_PAGE).tolist() == [True, False]


def test_decoding_holds_a_bounded_number_of_window_pages() -> None:
    manager = manager_of(8, Window(8))
    sequence = manager.open(tokens(1))
    compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(sequence)
    for position in range(1, 200):
        step = manager.plan(decode=batch).commit()
        row = step.tables[0][sequence.slot]
        assert (row[max(0, position - 7) // P : position // P + 1] != NO_PAGE).all()
        manager.complete(step)
        assert 1 <= counts(manager)[2] <= 3
    manager.check()


def test_pages_outside_the_window_are_not_published_at_the_end() -> None:
    manager = manager_of(6, Window(4))
    sequence = manager.open(tokens(range(16)))
    for _ in range(4):
        compute(manager, sequence, 4)
    other = manager.open(tokens(range(50, 58)))
    compute(manager, other)
    manager.close(sequence)
    manager.check()
    # Only where everything the next query reads was kept: at the very end, one token before it, and at the end of the
    # last block that the same prompt could resume at.
    assert [manager.probe(tokens(range(length), 99)) for length in (4, 8, 12, 15, 16)] == [0, 0, 12, 15, 16]
    manager.close(other)
    manager.check()


def test_every_group_must_be_able_to_resume() -> None:
    manager = manager_of(40, History(), Window(5))
    cached(manager, range(1, 21))
    # History could resume anywhere, the window only at its end; one number for both.
    assert [manager.probe(tokens(range(1, 1 + n), 99)) for n in (8, 12, 19, 20)] == [0, 0, 19, 20]


def test_restore_points_can_be_kept_at_intervals() -> None:
    spec = make_spec(P, History(), Window(5))
    manager = PagedCacheManager(make_layout(spec, 40), RestorePolicy(every_blocks=2))
    cached(manager, range(1, 21))
    assert [manager.probe(tokens(range(1, 1 + n), 99)) for n in (7, 8, 15, 16, 18)] == [0, 8, 8, 16, 18]


def test_a_long_request_recycles_its_own_window_pages_first() -> None:
    # Equal pages for both groups: one pool of 16.
    manager = manager_of(16, History(), Window(4))
    cached(manager, range(1, 13))
    sequence = manager.open(tokens(range(100, 132)))
    for _ in range(8):
        compute(manager, sequence, 4)
    assert manager.probe(tokens(range(1, 14))) == 12


# Steps


def test_rows_of_a_step_decode_first() -> None:
    manager = manager_of(20)
    decoding, single, long = (manager.open(tokens(range(n, n + 6))) for n in (10, 20, 30))
    for sequence in (decoding, single):
        compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(decoding)
    plan = manager.plan([Run(long, 5), Run(single, 1)], decode=batch)
    assert plan.sequences == [decoding, single, long]
    step = plan.commit()
    assert step.decode_rows == 2
    assert step.query_lengths.tolist() == [1, 1, 5]
    assert step.lengths.tolist() == [7, 7, 5]
    assert step.query_starts.tolist() == [0, 1, 2, 7]
    assert step.positions.tolist() == [6, 6, 0, 1, 2, 3, 4]
    assert step.token_count == 7


def test_a_step_travels_with_its_own_rows_only() -> None:
    manager = manager_of(20)
    sequences = [manager.open(tokens(range(n, n + 6))) for n in (10, 20, 30)]
    step = manager.plan([Run(sequences[1], 6)]).commit()
    for copy in (pickle.loads(pickle.dumps(step)), step.compact()):
        assert copy.slots.tolist() == [0]
        assert copy.tables[0].shape == (1, 2)
        assert copy.tables[0][0, :2].tolist() == step.tables[0][sequences[1].slot, :2].tolist()
        assert (copy.id, copy.decode_rows, copy.lengths.tolist()) == (step.id, 0, [6])


def test_tables_given_to_a_step_cannot_be_written() -> None:
    manager = manager_of(20)
    sequence = manager.open(tokens(range(6)))
    step = manager.plan([Run(sequence, 6)]).commit()
    with pytest.raises(ValueError, match="read-only"):
        step.tables[0][0, 0] = 5


def test_rejected_drafts_are_rolled_back() -> None:
    manager = manager_of(20, History(), Window(4))
    sequence = manager.open(tokens(range(1, 7)))
    compute(manager, sequence)
    step = manager.plan([Run(sequence, 1, drafts=4)]).commit()
    assert step.query_lengths.tolist() == [5]
    assert step.lengths.tolist() == [11]
    manager.complete(step, [2])
    manager.check()
    assert (sequence.computed, sequence.reserved) == (8, 12)
    step = manager.plan([Run(sequence, 1)]).commit()
    # The next query at position 8 reads 5..8: both of its blocks are still there.
    assert (step.tables[1][sequence.slot, 1:3] != NO_PAGE).all()


def test_page_zero_is_never_handed_out() -> None:
    manager = manager_of(6)
    sequence = manager.open(tokens(range(24)))
    step = compute(manager, sequence)
    assert sorted(step.tables[0][sequence.slot, :6].tolist()) == [1, 2, 3, 4, 5, 6]


def test_closing_during_a_step_waits_for_its_end() -> None:
    manager = manager_of(8)
    first, second = (manager.open(tokens(range(n, n + 4))) for n in (10, 20))
    step = manager.plan([Run(first, 4), Run(second, 4)]).commit()
    manager.close(first)
    manager.close(first)
    assert not first.closed
    assert counts(manager)[2] == 2
    manager.complete(step)
    manager.check()
    assert first.closed
    assert counts(manager) == (6, 1, 1)


def test_closing_a_decoding_sequence_during_a_step_keeps_the_others_rows() -> None:
    manager = manager_of(20)
    sequences = [manager.open(tokens(range(n, n + 5))) for n in (10, 20, 30)]
    batch = manager.decode_batch()
    for sequence in sequences:
        compute(manager, sequence)
        batch.join(sequence)
    step = manager.plan(decode=batch).commit()
    manager.close(sequences[1])
    manager.complete(step)
    manager.check()
    assert batch.sequences == [sequences[0], sequences[2]]
    assert [sequence.computed for sequence in batch.sequences] == [6, 6]
    assert manager.plan(decode=batch).commit().lengths.tolist() == [7, 7]


def test_numbers_add_up() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 9))
    cached(manager, range(1, 11))
    sequence = manager.open(tokens(range(1, 11)))
    manager.close(sequence)
    stats = manager.stats()
    # The third request never ran, so it does not count.
    assert (stats.requests, stats.prompt_tokens, stats.reused_tokens, stats.computed_tokens) == (2, 18, 8, 10)
    assert stats.hit_rate == pytest.approx(8 / 18)
    assert (stats.steps, stats.open_sequences) == (2, 0)


# Misuse: refused, and nothing has changed


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([], RequestError, "the prompt is empty\nhint: give at least one token"),
        (
            [1, 2, 100],
            RequestError,
            "token id 100 at position 2 is outside 0..99\nhint: tokenize with the tokenizer of this model",
        ),
        (
            np.array([1, -7], np.int32),
            RequestError,
            "token id -7 at position 1 is outside 0..99\nhint: tokenize with the tokenizer of this model",
        ),
        ([0.5], RequestError, "token ids are float64, not integers"),
        ([[1], [2]], RequestError, "token ids have shape (2, 1)\nhint: give one flat list or array of ids"),
        (
            [1] * 65,
            RequestError,
            "the prompt has 65 tokens, the model takes at most 64\nhint: shorten the prompt",
        ),
        (
            [1] * 50,
            CapacityError,
            "50 tokens never fit: they need 832 bytes (13 pages of group target/History()) and the cache has 512\n"
            "hint: shorten the request or give the cache more memory",
        ),
    ],
)
def test_bad_prompts_are_refused(prompt, error, text: str) -> None:
    manager = manager_of(8, width=2, vocab_size=100, max_tokens=64)
    before = manager.stats()
    with pytest.raises(error) as caught:
        manager.open(prompt)
    assert str(caught.value) == text
    assert manager.stats() == before
    manager.check()


def test_a_stale_plan_is_refused() -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(range(8)))
    plan = manager.plan([Run(sequence, 8)])
    manager.open(tokens(range(50, 58)))
    with pytest.raises(StateError) as caught:
        plan.commit()
    assert str(caught.value) == (
        "this plan is stale: the manager changed after it was made\nhint: plan again, then commit at once"
    )
    manager.check()


def test_steps_are_completed_once() -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(range(8)))
    step = manager.plan([Run(sequence, 8)]).commit()
    manager.complete(step)
    for call in (manager.complete, manager.cancel):
        with pytest.raises(StateError) as caught:
            call(step)
        assert str(caught.value) == (
            "step 1 is not in flight\n"
            "hint: complete or cancel each committed step once, with the manager that it came from"
        )


@pytest.mark.parametrize(
    ("accepted", "text"),
    [
        ([], "complete() got 0 accepted counts for 1 runs"),
        ([9], "complete() accepts 9 of 8 tokens"),
        ([-1], "complete() accepts -1 of 8 tokens"),
    ],
)
def test_wrong_accepted_counts_change_nothing(accepted: list[int], text: str) -> None:
    manager = manager_of(8)
    sequence = manager.open(tokens(range(8)))
    step = manager.plan([Run(sequence, 8)]).commit()
    with pytest.raises(StateError) as caught:
        manager.complete(step, accepted)
    assert str(caught.value) == text
    manager.complete(step)
    assert sequence.computed == 8


def test_a_sequence_is_in_one_place_at_a_time() -> None:
    manager = manager_of(20, max_tokens=12)
    sequence = manager.open(tokens(range(8)))
    in_one_place = (
        "plan() of a sequence that has drafts in a step, is in a decode batch, or is named twice in this plan\n"
        "hint: complete its step first, and name each sequence once"
    )
    with pytest.raises(StateError) as caught:
        manager.plan([Run(sequence, 4), Run(sequence, 4)])
    assert str(caught.value) == in_one_place
    step = manager.plan([Run(sequence, 8)]).commit()
    batch = manager.decode_batch()
    with pytest.raises(StateError):
        batch.join(sequence)
    manager.complete(step)
    batch.join(sequence)
    with pytest.raises(StateError) as caught:
        manager.plan([Run(sequence, 1)])
    assert str(caught.value) == in_one_place
    step = manager.plan(decode=batch).commit()
    batch.leave(sequence)
    with pytest.raises(StateError) as caught:
        manager.plan([Run(sequence, 1)])
    assert str(caught.value) == in_one_place
    manager.complete(step)
    with pytest.raises(StateError) as caught:
        batch.leave(sequence)
    assert str(caught.value) == "leave() of a sequence that is not in this batch"
    with pytest.raises(RequestError) as caught:
        manager.plan([Run(sequence, 4)])
    assert (
        str(caught.value) == "a run to 13 tokens goes past the model's 12\nhint: stop generating at the model's length"
    )
    with pytest.raises(RequestError, match=r"Run\(new_tokens=0, drafts=0\) computes nothing"):
        manager.plan([Run(sequence, 0)])
    manager.close(sequence)
    for call in (lambda: manager.plan([Run(sequence, 1)]), lambda: sequence.extend([1]), lambda: batch.join(sequence)):
        with pytest.raises(StateError):
            call()
    manager.check()


def test_joining_before_the_first_step_is_refused_when_a_page_is_missing() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 7))
    sequence = manager.open(tokens(range(1, 7)))
    assert sequence.reused == 5
    with pytest.raises(StateError) as caught:
        manager.decode_batch().join(sequence)
    assert str(caught.value) == (
        "join() of a sequence that has no page for its next token yet\n"
        "hint: compute its first token with a Run, then join"
    )


def test_a_foreign_retention_needs_no_change_to_the_core() -> None:
    class ChunkedLocal:
        """Llama 4 style: a query reads its own chunk of 8 tokens only."""

        exact = False
        ring = 0
        most_drafts = None

        def live(self, length: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
            low, high = length // 8 * 8 // block_tokens, -(-length // block_tokens)
            return ((low, high),) if low < high else ()

        required = live

        def droppable(self, length: int, rollback: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
            high = max(0, length - rollback) // 8 * 8 // block_tokens
            return ((0, high),) if high else ()

    manager = manager_of(40, ChunkedLocal())
    sequence = manager.open(tokens(range(20)))
    step = compute(manager, sequence)
    assert (step.tables[0][sequence.slot, :5] != NO_PAGE).tolist() == [False, False, False, False, True]
    manager.close(sequence)
    manager.check()
    # At a chunk's start nothing is needed to resume.
    assert [manager.probe(tokens(range(n), 99)) for n in (7, 8, 15, 16, 19, 20)] == [0, 8, 8, 16, 19, 20]
