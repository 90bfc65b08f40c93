"""Steps in flight, cancelled steps, rows that come and go: what random traffic found, in its shortest form."""

from __future__ import annotations

import pytest
from cache_requests import P, cached, compute, manager_of

from kvist.errors import StateError
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window
from kvist.testing.values import make_layout, make_spec, tokens


def test_drafts_in_flight_stay_undecided_when_an_older_step_is_completed() -> None:
    manager = manager_of(20)
    sequence = manager.open(tokens(range(8)))
    older = manager.plan([Run(sequence, 3)]).commit()
    drafting = manager.plan([Run(sequence, 1, drafts=2)]).commit()
    manager.complete(older)
    with pytest.raises(StateError, match="has drafts in a step"):
        manager.plan([Run(sequence, 1)])
    manager.complete(drafting, [1])
    assert sequence.computed == 4
    compute(manager, sequence)


def test_a_sequence_that_lost_its_state_is_suspended_when_its_older_steps_are_completed() -> None:
    manager = manager_of(20, State())
    sequence = manager.open(tokens(range(8)))
    older = manager.plan([Run(sequence, 4)]).commit()
    newer = manager.plan([Run(sequence, 2)]).commit()
    manager.cancel(newer, ran=True)
    manager.check()
    assert not sequence.suspended
    with pytest.raises(StateError):
        manager.plan([Run(sequence, 1)])
    manager.complete(older)
    manager.check()
    assert sequence.suspended and sequence.computed == 0
    # The older step kept the state at its end, before the newer one could overwrite it.
    assert manager.resume(sequence) == 4
    compute(manager, sequence)


def test_a_row_that_left_during_a_step_loses_its_state_with_it() -> None:
    manager = manager_of(20, State())
    stays, leaves, late = (manager.open(tokens(range(n, n + 4))) for n in (10, 20, 30))
    batch = manager.decode_batch()
    for sequence in (stays, leaves, late):
        compute(manager, sequence)
    batch.join(stays)
    batch.join(leaves)
    step = manager.plan(decode=batch).commit()
    batch.leave(leaves)
    batch.join(late)
    manager.cancel(step, ran=True)
    manager.check()
    assert (stays.suspended, leaves.suspended, late.suspended) == (True, True, False)
    assert batch.sequences == [late]
    manager.complete(manager.plan(decode=batch).commit())
    manager.check()


def test_an_overwritten_state_is_not_kept_for_others_when_its_sequence_is_closed() -> None:
    manager = manager_of(20, State())
    sequence = manager.open(tokens(range(8)))
    compute(manager, sequence, 4)
    compute(manager, sequence, 4)
    sequence.extend([50])
    step = manager.plan([Run(sequence, 1)]).commit()
    manager.close(sequence)
    manager.cancel(step, ran=True)
    manager.check()
    assert sequence.closed
    # The state at 8 was overwritten; the one kept at 4 was not.
    assert manager.probe(tokens(range(8), 60, 61)) == 4


def test_copies_of_a_step_that_began_are_not_made_again() -> None:
    manager = manager_of(20, State())
    parent = manager.open(tokens(range(5)))
    compute(manager, parent)
    manager.fork(parent)
    parent.extend([50])
    step = manager.plan([Run(parent, 1)]).commit()
    assert len(step.copies[0]) == 1
    # The parent's state, which the fork's was copied from, may be overwritten by now.
    manager.cancel(step, ran=True)
    other = manager.open(tokens(range(90, 95)))
    assert not manager.plan([Run(other, 5)]).commit().copies[0].tolist()


def test_copies_do_not_move_behind_a_later_step() -> None:
    manager = manager_of(20)
    cached(manager, range(1, 9))
    sequence, other = manager.open(tokens(1, 2, 3, 9, 10)), manager.open(tokens(range(50, 60)))
    first = manager.plan([Run(sequence, 2)]).commit()
    second = manager.plan([Run(other, 10)]).commit()
    before = manager.stats()
    with pytest.raises(StateError) as caught:
        manager.cancel(first, ran=False)
    assert str(caught.value) == (
        f"step {first.id} has copies or zeros that have to come before a later step\n"
        "hint: cancel the later step first, or carry them out and cancel with ran=True"
    )
    assert manager.stats() == before
    manager.cancel(second, ran=False)
    manager.cancel(first, ran=False)
    assert len(manager.plan([Run(other, 10)]).commit().copies[0]) == 1
    manager.check()


def test_a_row_that_left_and_came_back_stays_when_a_step_is_cancelled() -> None:
    manager = manager_of(20)
    sequence = manager.open(tokens(range(4)))
    compute(manager, sequence)
    batch = manager.decode_batch()
    batch.join(sequence)
    step = manager.plan(decode=batch).commit()
    batch.leave(sequence)
    manager.cancel(step, ran=False)
    batch.join(sequence)
    manager.cancel(manager.plan(decode=batch).commit(), ran=False)
    assert sequence.batch is batch and batch.sequences == [sequence]
    manager.complete(manager.plan(decode=batch).commit())
    assert sequence.computed == 5
    manager.check()


def test_a_plan_made_before_a_close_during_a_step_is_stale() -> None:
    manager = manager_of(20)
    sequence = manager.open(tokens(range(8)))
    step = manager.plan([Run(sequence, 4)]).commit()
    plan = manager.plan([Run(sequence, 4)])
    manager.close(sequence)
    with pytest.raises(StateError, match="this plan is stale"):
        plan.commit()
    manager.complete(step)
    assert sequence.closed
    manager.check()


def test_window_tables_do_not_change_under_a_step() -> None:
    manager = manager_of(40, History(), Window(6), restore=RestorePolicy(every_blocks=3))
    sequence = manager.open(tokens(range(20)))
    compute(manager, sequence, 2 * P)
    # Another prompt leaves what is known at 8, computes it once more and keeps its own pages of the window there.
    cached(manager, range(8), 90)
    older = manager.plan([Run(sequence, P)]).commit()
    newer = manager.plan([Run(sequence, P)]).commit()
    before = [table[sequence.slot, 1:4].tolist() for table in newer.tables]
    manager.complete(older)
    assert [table[sequence.slot, 1:4].tolist() for table in newer.tables] == before
    manager.complete(newer)
    manager.check()


@pytest.mark.parametrize("end", ["suspend", "close"])
def test_the_end_of_a_turn_can_be_resumed_where_its_last_block_was_published_before(end: str) -> None:
    manager = manager_of(40, History(), Window(5))
    sequence = manager.open(tokens(range(20)))
    compute(manager, sequence, 2 * P)
    if end == "suspend":
        manager.suspend(sequence)
        assert manager.resume(sequence) == 2 * P
    else:
        manager.close(sequence)
        assert manager.probe(tokens(range(20))) == 2 * P
    manager.check()


def test_what_a_resumed_sequence_takes_back_is_not_a_request_that_ran() -> None:
    manager = manager_of(20)
    waiting = manager.open(tokens(range(8), 50))
    manager.suspend(waiting)
    cached(manager, range(8))
    assert manager.resume(waiting) == 8
    manager.close(waiting)
    stats = manager.stats()
    assert (stats.requests, stats.prompt_tokens, stats.steps) == (1, 8, 1)


def test_a_row_that_only_decoded_counts_when_it_is_suspended() -> None:
    manager = manager_of(20)
    cached(manager, range(8))
    sequence = manager.open(tokens(range(8), 50))
    batch = manager.decode_batch()
    batch.join(sequence)
    manager.complete(manager.plan(decode=batch).commit())
    batch.leave(sequence)
    manager.suspend(sequence)
    manager.close(sequence)
    stats = manager.stats()
    assert (stats.requests, stats.prompt_tokens, stats.reused_tokens) == (2, 17, 8)


def test_a_truncated_prompt_reused_no_more_than_it_is_long() -> None:
    manager = manager_of(20)
    cached(manager, range(8))
    sequence = manager.open(tokens(range(8), 50))
    assert sequence.reused == 8
    manager.truncate(sequence, 3)
    manager.complete(manager.plan([Run(sequence, 1)]).commit())
    stats = manager.stats()
    assert (stats.prompt_tokens, stats.reused_tokens) == (8 + 3, 3)


def test_nothing_is_reused_of_a_cache_that_was_cleared() -> None:
    manager = manager_of(20)
    cached(manager, range(8))
    sequence = manager.open(tokens(range(8), 50))
    assert sequence.reused == 8
    manager.clear()
    assert manager.truncate(sequence, 6) == sequence.reused == 0
    compute(manager, sequence)
    stats = manager.stats()
    assert (stats.prompt_tokens, stats.reused_tokens) == (8 + 6, 0)


@pytest.mark.parametrize("retention", [Window(5), State()])
def test_the_peak_is_never_below_what_is_held(retention: Window | State) -> None:
    manager = manager_of(20, retention)
    sequence = manager.open(tokens(range(8)))
    compute(manager, sequence, 4)
    (group,) = manager.stats().groups
    assert group.held_peak >= group.held > 0


def test_a_floor_of_the_only_group_is_no_ceiling() -> None:
    layout = make_layout(make_spec(P, Window(5)), 8)
    manager = PagedCacheManager(layout.with_floors({layout.groups[0].name: 2}))
    sequences = [manager.open(tokens(range(n, n + P))) for n in range(0, 80, 10)]
    manager.complete(manager.plan([Run(sequence, P) for sequence in sequences]).commit())
    manager.check()
    assert manager.stats().groups[0].held == 8
