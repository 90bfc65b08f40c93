"""Overlapped steps, forks, suspended and truncated sequences, cleared caches, drafts, restore points, two domains: each
by itself, on every kind of group. Every step runs against the value oracle."""

from __future__ import annotations

import numpy as np
import pytest
from cache_requests import P, manager_of

from kvist.errors import CapacityError, RequestError, SpecError, StateError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.engine import MIXES, Engine
from kvist.testing.values import make_spec, tokens

STATES = {"state", "history+state", "window+state", "history+windows+state"}
ALL = list(MIXES)


def engine_of(mix: str, pages: int = 60, block: int = P, **options: object) -> Engine:
    """``pages`` for each of the mix's groups."""
    retentions = MIXES[mix]
    return Engine(manager_of(pages * len(retentions), *retentions, block_tokens=block, **options))  # type: ignore[arg-type]


# Steps in flight


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_chunks_of_one_prompt_overlap(mix: str, block: int, depth: int) -> None:
    engine = engine_of(mix, block=block)
    for prompt in (range(23), range(23), range(11, 30)):
        sequence = engine.open(prompt)
        flights: list = []
        while sequence.scheduled < sequence.known:
            flights.append(engine.launch(Run(sequence, min(3, sequence.known - sequence.scheduled))))
            if len(flights) == depth:
                engine.land(flights.pop(0))
        assert sequence.computed < sequence.scheduled == sequence.known
        for flight in flights:
            engine.land(flight)
        assert sequence.computed == sequence.known
        engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize(("block", "depth"), [(1, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("mix", ALL)
def test_rows_join_and_leave_while_steps_are_in_flight(mix: str, block: int, depth: int) -> None:
    rng = np.random.default_rng([block, depth])
    engine = engine_of(mix, pages=500, block=block)
    batch = engine.manager.decode_batch()
    everyone = [engine.open(range(20 * n, 20 * n + 2 + n)) for n in range(6)]
    engine.prefill(*everyone)
    started = {sequence: sequence.computed for sequence in everyone}
    ticks = dict.fromkeys(everyone, 0)
    flights: list = []
    for number in range(40):
        outside = [s for s in everyone if s.batch is None and not s.in_flight]
        inside = list(batch.sequences)
        if outside and rng.random() < 0.5:
            joining = outside[rng.integers(len(outside))]
            if joining.computed % block or joining.state_columns or mix not in STATES:
                batch.join(joining)
                inside.append(joining)
        if len(inside) > 1 and rng.random() < 0.3:
            batch.leave(inside[rng.integers(len(inside))])
        if len(batch):
            for sequence in batch.sequences:
                ticks[sequence] += 1
            flights.append(engine.launch(decode=batch))
        while len(flights) >= depth or (flights and number == 39):
            engine.land(flights.pop(0))
    for sequence in everyone:
        assert sequence.computed == started[sequence] + ticks[sequence]
        engine.learn(sequence, more=0)
        engine.close(sequence)
    for n in range(6):
        # Restore points of the prompts; what was generated is there as well.
        assert engine.probe(range(20 * n, 20 * n + 2 + n), 77) >= (1 + n) // block * block
    engine.drained()


def test_steps_are_completed_oldest_first_and_cancelled_newest_first() -> None:
    engine = engine_of("history")
    sequence, decoding = engine.open(range(12)), engine.open(range(50, 55))
    engine.prefill(decoding)
    batch = engine.manager.decode_batch()
    batch.join(decoding)
    steps = [engine.manager.plan([Run(sequence, 3)]).commit() for _ in range(3)]
    ticks = [engine.manager.plan(decode=batch).commit() for _ in range(3)]
    before = engine.manager.stats()
    for step, text in (
        (steps[1], "step 3 is not the oldest of its sequences"),
        (steps[2], "step 4 is not the oldest of its sequences"),
        (ticks[1], "step 6 is not the oldest of its batch"),
    ):
        with pytest.raises(StateError) as caught:
            engine.manager.complete(step)
        assert str(caught.value) == f"{text}\nhint: complete steps in order"
    for step in (steps[0], steps[1], ticks[0], ticks[1]):
        with pytest.raises(StateError) as caught:
            engine.manager.cancel(step)
        assert str(caught.value) == (
            f"step {step.id} is not the newest of its sequences\nhint: cancel steps in reverse order"
        )
    assert engine.manager.stats() == before
    engine.audit()
    # Steps that share no sequence may end in any order.
    engine.manager.complete(ticks[0])
    engine.manager.cancel(steps[2], ran=False)
    engine.manager.complete(steps[0])
    engine.manager.cancel(ticks[2], ran=False)
    engine.manager.complete(ticks[1])
    engine.manager.complete(steps[1])
    assert (sequence.computed, decoding.computed) == (6, 7)
    engine.close(sequence, decoding)
    engine.drained()


def test_a_step_with_drafts_is_waited_for() -> None:
    engine = engine_of("history")
    sequence = engine.open(range(5))
    engine.prefill(sequence)
    engine.learn(sequence)
    flight = engine.launch(Run(sequence, 1, drafts=2), accepted={sequence: 2})
    with pytest.raises(StateError, match="drafts in a step"):
        engine.manager.plan([Run(sequence, 1)])
    engine.land(flight)
    engine.learn(sequence)
    engine.run(Run(sequence, 1))
    assert sequence.computed == 8


def test_a_cancelled_newest_step_leaves_the_older_ones_in_flight() -> None:
    for mix in ALL:
        engine = engine_of(mix)
        sequence = engine.open(range(12))
        first = engine.launch(Run(sequence, 5))
        second = engine.manager.plan([Run(sequence, 4)]).commit()
        engine.manager.cancel(second, ran=False)
        engine.audit()
        third = engine.launch(Run(sequence, 7))
        engine.land(first)
        engine.land(third)
        engine.decode(sequence, 3)
        engine.close(sequence)
        engine.drained()


@pytest.mark.parametrize("how", ["runs", "decode"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("mix", ALL)
def test_a_newer_step_that_fails_spoils_the_state_of_an_older_one(mix: str, closed: bool, how: str) -> None:
    """The older step completes; then the sequence is suspended where a group keeps states, because the failed step may
    have overwritten its state, and goes on as it was where none does."""
    engine = engine_of(mix)
    sequence = engine.open(range(9))
    engine.prefill(sequence)
    batch = engine.manager.decode_batch()
    options: dict = {"decode": batch} if how == "decode" else {}
    if how == "decode":
        batch.join(sequence)
    runs = [] if how == "decode" else [Run(sequence, 1)]
    engine.learn(sequence)
    older = engine.launch(*runs, **options)
    newer = engine.launch(*runs, **options)
    engine.manager.cancel(newer.step, ran=True)
    engine.audit()
    if mix in STATES:
        with pytest.raises(StateError):
            engine.manager.plan([Run(sequence, 1)])
    if closed:
        engine.close(sequence)
    engine.land(older)
    if closed:
        assert sequence.closed
    else:
        assert sequence.suspended == (mix in STATES)
        if sequence.suspended:
            assert sequence.batch is None
            engine.resume(sequence)
        elif how == "decode":
            batch.leave(sequence)
        assert sequence.computed <= 10
        engine.learn(sequence)
        engine.prefill(sequence)
        engine.decode(sequence, 4)
        engine.close(sequence)
    engine.turn(range(9), 100_009, 55)
    engine.turn(range(9), 60)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_rows_that_leave_a_step_that_fails_afterwards(mix: str) -> None:
    """Leaving and closing while the step is in flight does not save a state that the step may have overwritten, and
    joining meanwhile does not cost one."""
    engine = engine_of(mix)
    names = ("stays", "leaves", "closes", "joins")
    rows = {name: engine.open(range(30 * n, 30 * n + 5)) for n, name in enumerate(names)}
    engine.prefill(*rows.values())
    batch = engine.manager.decode_batch()
    for name in names[:3]:
        batch.join(rows[name])
    flight = engine.launch(decode=batch)
    batch.leave(rows["leaves"])
    engine.close(rows["closes"])
    batch.join(rows["joins"])
    engine.manager.cancel(flight.step, ran=True)
    engine.audit()
    assert rows["closes"].closed
    assert not rows["joins"].suspended
    assert [rows[name].suspended for name in ("stays", "leaves")] == [mix in STATES] * 2
    assert rows["joins"] in batch.sequences
    assert rows["leaves"] not in batch.sequences
    for name in ("stays", "leaves"):
        if rows[name].suspended:
            engine.resume(rows[name])
        elif rows[name].batch is not None:
            batch.leave(rows[name])
        engine.prefill(rows[name])
        engine.decode(rows[name], 5)
    for _ in range(5):
        engine.run(decode=batch)
    for name in ("stays", "leaves", "joins"):
        engine.learn(rows[name], more=0)
        engine.close(rows[name])
    for n in range(4):
        engine.turn(range(30 * n, 30 * n + 5), 99)
    engine.drained()


def test_a_row_that_left_a_cancelled_step_joins_again() -> None:
    engine = engine_of("history")
    sequence, other = engine.open(range(5)), engine.open(range(50, 56))
    engine.prefill(sequence, other)
    batch = engine.manager.decode_batch()
    batch.join(sequence)
    batch.join(other)
    for _ in range(3):
        step = engine.manager.plan(decode=batch).commit()
        batch.leave(sequence)
        engine.manager.cancel(step, ran=False)
        batch.join(sequence)
        step = engine.manager.plan(decode=batch).commit()
        engine.manager.cancel(step, ran=False)
        engine.audit()
        assert batch.sequences == [other, sequence]
    for _ in range(9):
        engine.run(decode=batch)
    assert (sequence.computed, other.computed) == (14, 15)


@pytest.mark.parametrize("mix", ALL)
def test_publishing_waits_while_a_step_reads_the_table(mix: str) -> None:
    """While one has steps in flight, another publishes the same blocks. Its table stays as its steps were given it, and
    names the known pages once nothing is in flight."""
    engine = engine_of(mix)
    slow, fast = engine.open(range(1, 14)), engine.open(range(1, 14))
    flights = [engine.launch(Run(slow, 4)) for _ in range(3)]
    engine.run(Run(fast, 8))
    tables = [table[slow.slot].copy() for table in flights[0].step.tables]
    engine.land(flights[0])
    engine.land(flights[1])
    for group, before in zip(engine.manager.layout.groups, tables):
        if not group.sparse:
            now = flights[2].step.tables[group.index]
            assert now[slow.slot].tolist() == before.tolist()
            assert set(now[slow.slot, :2].tolist()).isdisjoint(now[fast.slot, :2].tolist())
    engine.land(flights[2])
    for group in engine.manager.layout.groups:
        if not group.sparse:
            now = flights[2].step.tables[group.index]
            assert now[slow.slot, :2].tolist() == now[fast.slot, :2].tolist()
    engine.prefill(slow, fast)
    engine.extend(slow, range(50, 55))
    engine.extend(fast, range(60, 65))
    engine.prefill(slow, fast, chunk=2)
    engine.close(slow, fast)
    engine.drained()


@pytest.mark.parametrize("mix", sorted(STATES))
def test_nothing_is_planned_on_a_state_that_a_failed_step_may_have_overwritten(mix: str) -> None:
    """Three in flight, the newest fails: until the older two are completed and the sequence is resumed, no plan."""
    engine = engine_of(mix)
    sequence = engine.open(range(12))
    flights = [engine.launch(Run(sequence, 3)) for _ in range(3)]
    engine.manager.cancel(flights.pop().step)
    for flight in flights:
        assert not sequence.suspended
        with pytest.raises(StateError):
            engine.manager.plan([Run(sequence, 3)])
        engine.land(flight)
    assert sequence.suspended
    engine.resume(sequence)
    engine.prefill(sequence)
    engine.decode(sequence, 2)
    engine.close(sequence)
    engine.drained()


# Forks


@pytest.mark.parametrize("computed", [1, 4, 7])
@pytest.mark.parametrize("mix", ALL)
def test_forks_never_see_each_others_tokens(mix: str, computed: int) -> None:
    engine = engine_of(mix, pages=120)
    parent = engine.open(range(computed))
    engine.prefill(parent)
    family = [parent]
    for generation in range(3):
        # Forks of forks, some of them before the copies of the last ones have run.
        family += [engine.fork(member) for member in family]
        if generation == 1:
            for number, member in enumerate(family):
                engine.extend(member, 500 + number)
            engine.prefill(*family)
    assert len(family) == 8
    assert {member.computed for member in family} == {computed + 1}
    for number, member in enumerate(family):
        engine.extend(member, range(1000 + 20 * number, 1009 + 20 * number))
    engine.prefill(*family, chunk=2)
    engine.close(*family)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_a_fork_outlives_its_parent(mix: str) -> None:
    """The parent ends before the copy has run, and its pages go to somebody else in the same step."""
    engine = engine_of(mix, pages=8)
    parent = engine.open(range(6))
    engine.prefill(parent)
    child = engine.fork(parent)
    grandchild = engine.fork(child)
    engine.close(parent)
    engine.close(child)
    # Everything that is free or cached.
    other = engine.open(range(70, 78))
    engine.extend(grandchild, 90)
    engine.run(Run(grandchild, 1), Run(other, 8))
    engine.decode(grandchild, 6)
    engine.decode(other, 4)
    engine.close(grandchild, other)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
@pytest.mark.parametrize("ending", ["close", "suspend", "truncate"])
def test_a_fork_that_ends_before_its_copy_has_run(mix: str, ending: str) -> None:
    engine = engine_of(mix, pages=30)
    parent = engine.open(range(6))
    engine.prefill(parent)
    child = engine.fork(parent)
    if ending == "close":
        engine.close(child)
    elif ending == "suspend":
        engine.suspend(child)
    else:
        engine.truncate(child, 5)
    other = engine.open(range(70, 83))
    engine.run(Run(other, 13))
    engine.decode(parent, 4)
    if ending != "close":
        if ending == "suspend":
            engine.resume(child)
        engine.extend(child, 91)
        engine.prefill(child)
        engine.decode(child, 4)
        engine.close(child)
    # Whatever the child published while its pages were still to be copied is right.
    engine.turn(range(6), 92)
    engine.turn(range(5), 93)
    engine.close(parent, other)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_a_cancelled_step_makes_the_copies_again(mix: str) -> None:
    engine = engine_of(mix)
    parent = engine.open(range(6))
    engine.prefill(parent)
    child = engine.fork(parent)
    engine.extend(child, 80)
    for _ in range(3):
        engine.manager.cancel(engine.manager.plan([Run(child, 1)]).commit(), ran=False)
        engine.audit()
    grandchild = engine.fork(child) if child.computed else child
    engine.decode(parent, 3)
    for member in (child, grandchild):
        engine.prefill(member)
        engine.decode(member, 3)
    engine.close(parent, *{child, grandchild})
    engine.drained()


def test_a_fork_without_room_changes_nothing() -> None:
    for mix in ("history", "history+window", "state", "history+state"):
        engine = engine_of(mix, pages=2)
        parent = engine.open(range(6))
        engine.prefill(parent)
        others = []
        while (other := engine.open(900 + len(others))) and engine.manager.plan([Run(other, 1)]).fits:
            engine.run(Run(other, 1))
            others.append(other)
        engine.close(other)
        before = engine.manager.stats()
        with pytest.raises(CapacityError, match=r"^no room for a fork: target/"):
            engine.manager.fork(parent)
        assert engine.manager.stats() == before
        engine.audit()
        if others:
            engine.close(others.pop())
            child = engine.fork(parent)
            engine.extend(child, 70)
            engine.run(Run(child, 1))
            engine.close(child)
        engine.decode(parent, 1)
        engine.close(parent, *others)
        engine.drained()


def test_what_cannot_be_forked_says_so() -> None:
    engine = engine_of("history")
    private = engine.open(range(5), reuse=False)
    unknown = engine.open(range(20, 25))
    away = engine.open(range(40, 45))
    engine.prefill(private, unknown, away)
    engine.run(Run(unknown, 1))
    engine.suspend(away)
    for sequence in (private, unknown, away):
        with pytest.raises(StateError) as caught:
            engine.manager.fork(sequence)
        assert caught.value.message == (
            "fork() of a sequence that is suspended, opted out of reuse, or has computed tokens of unknown ids"
        )
    flight = engine.launch(Run(unknown, 1))
    with pytest.raises(StateError, match="in a step or in a decode batch"):
        engine.manager.fork(unknown)
    engine.land(flight)


@pytest.mark.parametrize("mix", ALL)
def test_a_fork_of_what_has_computed_nothing_is_the_prompt_again(mix: str) -> None:
    engine = engine_of(mix)
    engine.turn(range(10))
    cold, warm = engine.open(range(50, 60)), engine.open(range(10), 20)
    forks = [engine.fork(cold), engine.fork(warm)]
    assert [fork.computed for fork in forks] == [0, warm.computed]
    engine.prefill(cold, warm, *forks)
    engine.close(cold, warm, *forks)
    engine.drained()


@pytest.mark.parametrize("backoff", [0, 3])
@pytest.mark.parametrize("mix", ALL)
def test_a_fork_of_a_resumed_sequence_is_computed_as_far(mix: str, backoff: int) -> None:
    """What the parent took back may end inside a block, whose copy is still to come; the child needs one too."""
    for length in (6, 8, 9):
        engine = engine_of(mix, backoff_tokens=backoff)
        parent = engine.open(range(length))
        engine.prefill(parent)
        engine.suspend(parent)
        engine.resume(parent)
        before = engine.manager.stats().requests
        child = engine.fork(parent)
        assert child.computed == parent.computed
        engine.extend(parent, 70)
        engine.extend(child, 80)
        engine.prefill(parent, child)
        engine.decode(parent, 3)
        engine.decode(child, 3)
        engine.close(parent, child)
        assert engine.manager.stats().requests == before
        engine.drained()


# Suspending and resuming


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_a_suspended_sequence_comes_back_where_it_was(mix: str, block: int) -> None:
    """st-03: it holds nothing meanwhile. Nobody needed its pages, so all of it is still there: states too, because the
    end of what was computed is a restore point."""
    engine = engine_of(mix, block=block)
    for length in range(1, 2 * block + 2):
        sequence = engine.open(range(100 * length, 101 * length))
        engine.prefill(sequence)
        engine.decode(sequence, 2)
        engine.suspend(sequence)
        assert all(held == 0 for _, held in engine.used())
        with pytest.raises(StateError):
            engine.manager.plan([Run(sequence, 1)])
        with pytest.raises(StateError):
            engine.manager.decode_batch().join(sequence)
        assert engine.resume(sequence) == length + 2
        engine.decode(sequence, block + 1)
        engine.close(sequence)
    assert engine.manager.stats().resumed_tokens == sum(length + 2 for length in range(1, 2 * block + 2))
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_another_request_can_use_all_the_memory_of_a_suspended_one(mix: str) -> None:
    """st-03, and resuming with less: what was evicted meanwhile is computed again."""
    groups = len(MIXES[mix])
    engine = engine_of(mix, pages=10)
    sequence = engine.open(range(13))
    engine.prefill(sequence)
    engine.suspend(sequence)
    total = engine.manager.layout.slab_count - 1
    if MIXES[mix][0] == History():
        # One request as long as fits.
        length = max(n for n in range(1, 4 * total) if engine.manager.layout.fits(n))
        engine.turn(range(500, 500 + length), chunk=4)
    else:
        # Groups that never hold many pages: many requests, until all pages are held.
        others = []
        while True:
            other = engine.open(500 + len(others))
            if not engine.manager.plan([Run(other, 1)]).fits:
                engine.close(other)
                break
            engine.run(Run(other, 1))
            others.append(other)
        assert len(others) >= total // groups
        engine.close(*others)
    left = engine.resume(sequence)
    assert left < 13
    engine.prefill(sequence)
    engine.decode(sequence, 3)
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_suspending_again_and_again_takes_nothing(mix: str) -> None:
    engine = engine_of(mix)
    sequence = engine.open(range(9))
    for _ in range(3):
        engine.manager.suspend(sequence)
        engine.manager.suspend(sequence)
        engine.audit()
        assert engine.resume(sequence) == engine.resume(sequence)
    engine.run(Run(sequence, 3))
    for _ in range(4):
        engine.suspend(sequence)
        computed = engine.resume(sequence)
        # No restore point inside a prompt but where it was suspended.
        assert computed == 3
    engine.prefill(sequence)
    engine.close(sequence)
    engine.drained()


def test_a_sequence_that_opted_out_of_reuse_resumes_at_nothing() -> None:
    engine = engine_of("history+state")
    sequence = engine.open(range(9), reuse=False)
    engine.prefill(sequence)
    engine.suspend(sequence)
    assert engine.used() == [(0, 0), (0, 0)]
    assert engine.resume(sequence) == 0
    engine.prefill(sequence)
    engine.close(sequence)
    engine.drained()


def test_tokens_of_unknown_ids_are_lost_when_suspended() -> None:
    """They cannot be computed again before their ids are known; what is known comes back."""
    engine = engine_of("history")
    sequence = engine.open(range(6))
    engine.prefill(sequence)
    engine.run(Run(sequence, 1))
    engine.run(Run(sequence, 1))
    assert (sequence.known, sequence.computed) == (6, 8)
    engine.suspend(sequence)
    assert engine.resume(sequence) == 6
    engine.decode(sequence, 3)
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_suspended_sequences_share_what_is_equal(mix: str) -> None:
    engine = engine_of(mix)
    pair = [engine.open(range(10)) for _ in range(2)]
    engine.prefill(*pair)
    for sequence in pair:
        engine.suspend(sequence)
    cached = engine.used()
    for sequence in pair:
        assert engine.resume(sequence) == 10
    for number, sequence in enumerate(pair):
        engine.extend(sequence, 70 + number)
    engine.prefill(*pair)
    for sequence in pair:
        engine.suspend(sequence)
    assert all(now[0] >= then[0] for now, then in zip(engine.used(), cached))
    engine.close(*pair)
    engine.drained()


# Truncating


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_truncating_to_every_length(mix: str, block: int) -> None:
    """A history goes back to any length. Windows and states may come back shorter, at a restore point, never wrong."""
    full = 2 * block + 3
    for length in range(1, full + 1):
        engine = engine_of(mix, block=block)
        sequence = engine.open(range(full - 2))
        engine.prefill(sequence)
        engine.decode(sequence, 2)
        computed = engine.truncate(sequence, length)
        if mix == "history" or length == full:
            assert computed == length
        assert (sequence.prompt_length, sequence.known) == (min(length, full - 2), length)
        engine.extend(sequence, range(700, 706))
        engine.prefill(sequence, chunk=3)
        engine.decode(sequence, 2)
        engine.close(sequence)
        # What was cut off is still right for others.
        engine.turn(range(full - 2), 800)
        engine.drained()


def test_truncate_refuses_lengths_that_are_not_there() -> None:
    engine = engine_of("history")
    sequence = engine.open(range(5))
    engine.prefill(sequence)
    for length in (-1, 0, 6):
        with pytest.raises(RequestError) as caught:
            engine.manager.truncate(sequence, length)
        assert str(caught.value) == f"truncate() to {length} of 5 known tokens"
    assert sequence.computed == 5
    engine.audit()


@pytest.mark.parametrize("mix", ALL)
def test_truncating_prompts_and_suspended_sequences(mix: str) -> None:
    engine = engine_of(mix)
    sequence = engine.open(range(11))
    assert engine.truncate(sequence, 9) == 0
    engine.run(Run(sequence, 5))
    assert engine.truncate(sequence, 7) <= 5
    engine.prefill(sequence)
    engine.suspend(sequence)
    assert engine.truncate(sequence, 3) <= 3
    assert not sequence.suspended
    engine.extend(sequence, 60, 61)
    engine.prefill(sequence)
    assert sequence.computed == 5
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_truncating_one_of_two_forks(mix: str) -> None:
    engine = engine_of(mix)
    parent = engine.open(range(10))
    engine.prefill(parent)
    child = engine.fork(parent)
    engine.truncate(child, 6)
    engine.extend(child, range(80, 87))
    engine.decode(parent, 5)
    engine.prefill(child)
    engine.close(parent, child)
    engine.drained()


# Clearing


@pytest.mark.parametrize("mix", ALL)
def test_clear_reports_what_it_freed_and_what_is_held(mix: str) -> None:
    engine = engine_of(mix)
    engine.turn(range(50, 63))
    live = engine.open(range(9))
    engine.prefill(live)
    flight = engine.launch(Run(live, 1))
    cached, held = zip(*engine.used())
    cleared = engine.manager.clear()
    engine.audit()
    # What the live sequence published for its restore points and does not hold itself goes as well.
    assert cleared.freed == cached
    assert cleared.held == held
    engine.land(flight)
    engine.learn(live)
    engine.decode(live, 6)
    late = engine.fork(live) if live.shares else None
    assert late is None
    engine.suspend(live)
    assert engine.resume(live) == 0
    engine.prefill(live)
    engine.close(live)
    assert engine.used() == [(0, 0)] * len(MIXES[mix])
    engine.drained()


def test_clearing_before_a_copy_has_run() -> None:
    for mix in ("history", "history+state", "window+state"):
        engine = engine_of(mix)
        engine.turn(range(9))
        branch = engine.open(range(9), 20)
        engine.manager.clear()
        engine.audit()
        engine.prefill(branch)
        engine.decode(branch, 4)
        engine.close(branch)
        engine.drained()


# Opting out of reuse


@pytest.mark.parametrize("mix", ALL)
def test_open_without_reuse_takes_and_gives_nothing(mix: str) -> None:
    engine = engine_of(mix)
    engine.turn(range(9))
    before = engine.used()
    sequence = engine.open(range(9), reuse=False, restore_at=[4])
    engine.prefill(sequence)
    engine.decode(sequence, 7)
    assert [cached for cached, _ in engine.used()] == [cached for cached, _ in before]
    engine.close(sequence)
    assert engine.used() == before
    assert engine.probe(range(9), 99) == 9
    engine.drained()


# Restore points


@pytest.mark.parametrize(
    ("length", "every", "points"),
    [
        # Vectors of another engine's periodic snapshots, blocks of 32 tokens.
        (7639, 4096, [4096, 7616]),
        (8193, 4096, [4096, 8192]),
        (100, 4096, [96]),
        (31, 4096, []),
        (31, None, []),
        (64, 4096, [32]),
        (7680, 256, [*range(256, 7680, 256), 7648]),
        (7648, None, [7616]),
        (33, None, [32]),
        (32, None, []),
        (1, 32, []),
    ],
)
def test_where_a_prompt_keeps_restore_points(length: int, every: int | None, points: list[int]) -> None:
    policy = RestorePolicy(every_blocks=every // 32 if every else None)
    assert policy.prompt_points(length, 0, 0, 32) == sorted(points)


@pytest.mark.parametrize(
    ("reused", "known", "named", "points"),
    [
        (0, 45, (), [32, 96]),
        (32, 45, (), [96]),
        (0, 31, (), [96]),
        (0, 100, (), [96]),
        (96, 100, (), []),
        (0, 0, (33, 70, 5), [32, 64, 96]),
        (32, 64, (33, 70), [64, 96]),
        (0, 0, (100, 500), [96]),
    ],
)
def test_points_that_a_branch_or_the_caller_adds(reused: int, known: int, named: tuple, points: list[int]) -> None:
    assert RestorePolicy().prompt_points(100, reused, known, 32, named) == points


@pytest.mark.parametrize(
    ("length", "ends", "whole"),
    [(1, [1], []), (31, [30, 31], []), (32, [31, 32], [32]), (33, [32, 33], [32]), (100, [99, 100], [96])],
)
def test_where_an_end_keeps_restore_points(length: int, ends: list[int], whole: list[int]) -> None:
    assert RestorePolicy().end_points(length, 32) == ends
    assert RestorePolicy(whole_blocks=True).end_points(length, 32) == whole


@pytest.mark.parametrize(
    ("whole", "first", "second"), [(False, (2, [20, 21, 22]), (3, [24, 25, 26])), (True, (1, [20] * 3), (2, [24] * 3))]
)
def test_ends_of_whole_blocks_cost_one_page_of_a_window(whole: bool, first: tuple, second: tuple) -> None:
    """By hand: turns of 22 and 26 tokens in blocks of 4, with a window of 4, which before position 20 is block 4. An
    end inside a block takes the block that is open there on top; the second turn fills the first one's."""
    engine = Engine(manager_of(60, History(), Window(4), restore=RestorePolicy(whole_blocks=whole)))
    for length, (kept, found) in ((22, first), (26, second)):
        engine.turn(range(length))
        assert engine.used() == [(-(-length // 4), 0), (kept, 0)]
        assert [engine.probe(range(end), 900) for end in range(length - 2, length + 1)] == found
    engine.drained()


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        RestorePolicy(every_blocks=0)
    assert str(caught.value) == "RestorePolicy(every_blocks=0) must be at least 1, or None for never"


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_later_prompts_resume_where_the_caller_asked(mix: str, block: int) -> None:
    engine = engine_of(mix, block=block)
    engine.turn(range(5 * block + 1), restore_at=[2 * block, 3 * block + 1, 10_000])
    for named in (2 * block, 3 * block + (1 if block == 1 else 0)):
        assert engine.turn(range(named), 900 + named) == named
    engine.drained()


def test_chunks_end_where_states_are_kept() -> None:
    engine = engine_of("history+state", restore=RestorePolicy(every_blocks=2))
    sequence = engine.open(range(27), restore_at=[4])
    ends = []
    while sequence.computed < 27:
        end = sequence.next_end(min(27, sequence.computed + 11))
        ends.append(end)
        engine.run(Run(sequence, end - sequence.computed))
    assert ends == [4, 8, 16, 24, 27]
    assert sequence.next_end(40) == 40
    engine.close(sequence)
    hits = [engine.probe(range(n), 77) for n in (3, 4, 7, 8, 15, 16, 23, 24, 26, 27)]
    assert hits == [0, 4, 4, 8, 8, 16, 16, 24, 24, 27]
    # A chunk that passes such a position costs restore points and nothing else.
    rude = engine.open(range(500, 527), restore_at=[4])
    engine.run(Run(rude, 10))
    engine.run(Run(rude, 6))
    engine.run(Run(rude, 11))
    engine.close(rude)
    assert [engine.probe(range(500, 500 + n), 77) for n in (4, 8, 16, 24, 27)] == [0, 0, 16, 16, 27]
    engine.drained()


def test_next_end_counts_what_is_in_flight() -> None:
    engine = engine_of("state")
    sequence = engine.open(range(20), restore_at=[8])
    assert sequence.next_end(20) == 8
    flights = [engine.launch(Run(sequence, 8))]
    assert sequence.next_end(20) == 16
    flights.append(engine.launch(Run(sequence, 8)))
    assert sequence.next_end(20) == 20
    for flight in flights:
        engine.land(flight)
    engine.close(sequence)
    # The state itself is kept at the end, snapshots at the two positions.
    assert [engine.probe(range(n), 77) for n in (7, 8, 15, 16)] == [0, 8, 8, 16]


def test_a_third_sibling_resumes_where_the_second_left_the_path() -> None:
    """ss-04: nobody knew before the second prompt where they part."""
    for mix in ALL:
        engine = engine_of(mix)
        hits = [engine.turn(range(12), range(start, start + 9)) for start in (100, 200, 300)]
        assert hits[2] == 12
        assert hits[0] == 0


# Drafts


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_any_number_of_drafts_is_accepted(mix: str, block: int, drafts: int) -> None:
    """24, also the columns of states: the one before the step in column 0, after each query token in the next ones."""
    engine = engine_of(mix, block=block)
    sequence = engine.open(range(5))
    engine.prefill(sequence)
    for accepted in [*range(drafts + 2), *range(drafts + 1, -1, -1)]:
        if sequence.known == sequence.computed:
            engine.learn(sequence)
        before = sequence.computed
        flight = engine.launch(Run(sequence, 1, drafts), accepted={sequence: accepted})
        for group in engine.manager.layout.groups:
            if group.exact:
                row = flight.step.tables[group.index][sequence.slot, : drafts + 2].tolist()
                assert len(set(row)) == drafts + 2
                assert min(row) > 0
        assert flight.step.drafts.tolist() == [drafts]
        engine.land(flight)
        assert sequence.computed == before + accepted
        engine.learn(sequence, more=0)
    # What is computed next reads the state that was accepted.
    engine.decode(sequence, 3)
    engine.suspend(sequence)
    engine.resume(sequence)
    engine.prefill(sequence)
    engine.learn(sequence)
    engine.run(Run(sequence, 1, drafts), accepted={sequence: drafts})
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("mix", sorted(STATES))
def test_a_run_with_drafts_makes_no_snapshot(mix: str) -> None:
    """Nobody knows where it will end, and the state is not where a snapshot is taken from: whatever is accepted, no
    position gets another one's state."""
    engine = engine_of(mix, restore=RestorePolicy(every_blocks=1))
    for number, (length, accepted) in enumerate([(7, 1), (7, 3), (6, 2), (5, 3), (7, 0), (4, 2)]):
        start = 100 * number
        sequence = engine.open(range(start, start + length), restore_at=[4, 8])
        engine.prefill(sequence)
        engine.learn(sequence)
        step = engine.run(Run(sequence, 1, 2), accepted={sequence: accepted})
        assert not any(map(len, step.saves))
        engine.learn(sequence, more=0)
        text = engine.texts[id(sequence)][:9].tolist()
        engine.close(sequence)
        for parting in range(3, 9):
            engine.turn(*text[:parting], 9000 + parting)
    engine.drained()


def test_rows_with_and_without_drafts_in_one_step() -> None:
    engine = engine_of("history+windows+state")
    rows = [engine.open(range(20 * n, 20 * n + 5)) for n in range(4)]
    engine.prefill(*rows[:3])
    for sequence in rows[:3]:
        engine.learn(sequence)
    batch = engine.manager.decode_batch()
    batch.join(rows[0])
    step = engine.run(
        Run(rows[1], 1, 2),
        Run(rows[2], 1),
        Run(rows[3], 5),
        decode=batch,
        accepted={rows[1]: 3, rows[2]: 1, rows[3]: 5},
    )
    assert step.drafts.tolist() == [0, 0, 2, 0]
    assert [sequence.computed for sequence in rows] == [6, 8, 6, 5]
    engine.close(*rows)
    engine.drained()


def test_a_state_cannot_take_back_what_was_not_a_draft() -> None:
    engine = engine_of("history+state")
    sequence = engine.open(range(8))
    flight = engine.launch(Run(sequence, 8))
    with pytest.raises(StateError) as caught:
        engine.manager.complete(flight.step, [7])
    assert str(caught.value) == (
        "complete() accepts 7 of 8 tokens, but the run had no drafts and its state is overwritten\n"
        "hint: plan the tokens that may be rejected as drafts"
    )
    engine.land(flight)
    assert sequence.computed == 8


def test_draft_pages_are_found_before_the_step_or_it_does_not_fit() -> None:
    engine = Engine(manager_of(4, State()))
    sequence = engine.open(range(5))
    engine.prefill(sequence)
    engine.learn(sequence)
    plan = engine.manager.plan([Run(sequence, 1, drafts=3)])
    assert [(each.needed, each.available) for each in plan.shortages] == [(4, 3)]
    engine.run(Run(sequence, 1, drafts=2), accepted={sequence: 2})
    engine.close(sequence)
    engine.drained()


# Cancelled steps


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("mix", ALL)
def test_a_cancelled_step_leaves_sequences_as_they_were(mix: str, drafts: int, ran: bool) -> None:
    engine = engine_of(mix)
    sequence = engine.open(range(10))
    engine.run(Run(sequence, 9))
    if ran:
        flight = engine.launch(Run(sequence, 1, drafts))
        engine.manager.cancel(flight.step)
    else:
        engine.manager.cancel(engine.manager.plan([Run(sequence, 1, drafts)]).commit(), ran=False)
    engine.audit()
    assert sequence.suspended == (ran and mix in STATES)
    if sequence.suspended:
        assert engine.resume(sequence) <= 9
    else:
        assert sequence.computed == 9
    engine.prefill(sequence)
    engine.decode(sequence, 3)
    engine.close(sequence)
    engine.drained()


def test_a_cancelled_step_makes_no_snapshot() -> None:
    engine = engine_of("history+state")
    sequence = engine.open(range(9))
    flight = engine.launch(Run(sequence, 8))
    assert len(flight.step.saves[1]) == 1
    engine.manager.cancel(flight.step)
    engine.audit()
    assert engine.probe(range(9)) == 0
    assert engine.resume(sequence) == 0
    step = engine.run(Run(sequence, 8))
    assert len(step.saves[1]) == len(step.fresh[1]) == 1
    assert engine.probe(range(9)) == 8


# Tokens to compute again


@pytest.mark.parametrize("backoff", [0, 3, 9])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_backoff_shortens_every_hit_and_touches_nothing_stored(mix: str, block: int, backoff: int) -> None:
    """ru-10: shorter than the backoff is nothing; probe and claim agree; groups choose below the shortened length."""
    engine = engine_of(mix, block=block, backoff_tokens=backoff, restore=RestorePolicy(every_blocks=1))
    length = 5 * block
    engine.turn(range(length), chunk=block)
    for asked in range(1, length + 1):
        limit = max(0, asked - backoff)
        if mix in STATES:
            limit = limit // block * block
        hit = engine.probe(range(asked), 900)
        assert hit == limit if mix in {"history", *STATES} else limit // block * block <= hit <= limit
    assert engine.turn(range(length), 900) == max(0, length - backoff) // block * block or mix not in STATES
    engine.drained()


# Fresh states


@pytest.mark.parametrize("mix", sorted(STATES))
def test_a_cold_state_is_zeroed_and_a_warm_one_is_not(mix: str) -> None:
    engine = engine_of(mix, pages=6)
    exact = next(group.index for group in engine.manager.layout.groups if group.exact)
    for number in range(8):
        # Pages that had other states before.
        cold = engine.open(range(20 * number, 20 * number + 5))
        step = engine.run(Run(cold, 5))
        assert step.fresh[exact].tolist() == [step.tables[exact][cold.slot, 0]]
        assert not len(step.copies[exact])
        assert sum(map(len, step.fresh)) == 1
        engine.decode(cold, 1)
        engine.close(cold)
        # The state was kept at the end.
        warm = engine.open(range(20 * number, 20 * number + 5), 100_005, 9)
        assert warm.reused == 6
        step = engine.run(Run(warm, warm.known - warm.computed))
        assert not len(step.fresh[exact])
        assert step.copies[exact][:, 1].tolist() == [step.tables[exact][warm.slot, 0]]
        engine.close(warm)
    engine.drained()


# Why a prompt reused less than was known


def test_a_miss_names_the_group_that_limited_it() -> None:
    manager = manager_of(120, History(), Window(6), State())
    _, window, state = manager.layout.groups
    engine = Engine(manager)
    engine.turn(range(14))
    whole = engine.open(range(14), 30)
    assert (whole.reused, whole.matched, whole.limited_by) == (14, 14, None)
    # Snapshots are at 12 and at 14 only.
    short = engine.open(range(10), 31)
    assert (short.reused, short.matched) == (0, 10)
    assert short.limited_by in (window, state)
    inside = engine.open(range(13), 32)
    assert (inside.reused, inside.matched, inside.limited_by) == (12, 13, state)
    new = engine.open(900)
    assert (new.reused, new.matched, new.limited_by) == (0, 0, None)
    # The last token is always computed; that is nobody's fault.
    same = engine.open(range(12))
    assert (same.matched, same.reused) == (12, 0)
    windows = Engine(manager_of(60, History(), Window(6)))
    windows.turn(range(14))
    # Block 1 is kept for resuming at 12, so resuming at 8 or 9 works as well; at 7 block 0 would be read.
    assert windows.open(range(9), 33).reused == 9
    short = windows.open(range(7), 33)
    assert (short.reused, short.matched, short.limited_by) == (0, 7, windows.manager.layout.groups[1])
    histories = Engine(manager_of(60))
    histories.turn(range(14))
    short = histories.open(range(14))
    assert (short.reused, short.matched, short.limited_by) == (13, 14, None)


# Two domains


def domains(pages: int, target: tuple = (History(),), draft: tuple = (History(),), width: int = 4) -> Layout:
    spec = make_spec(P, *target)
    layers = tuple(
        Layer(number, (Stream("k", RowFormat((1, width), "float32"), kept),)) for number, kept in enumerate(draft)
    )
    other = CacheSpec(layers, P, "draft weights", "draft")
    one = Layout.build(spec, 1 << 20, drafts=(other,))
    return Layout.build(spec, pages * one.slab_bytes, drafts=(other,))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ((History(),), (History(),)),
        ((History(),), (Window(5),)),
        ((History(), State()), (History(),)),
        ((History(), Window(6)), (Window(6), State())),
    ],
)
def test_target_and_draft_advance_in_one_transaction(target: tuple, draft: tuple) -> None:
    layout = domains(200, target, draft, width=4)
    assert [group.domain for group in layout.groups] == ["target"] * len(target) + ["draft"] * len(draft)
    engine = Engine(PagedCacheManager(layout, backoff_tokens=1))
    for prompt in (range(14), range(14), range(9)):
        sequence = engine.open(*prompt, 77)
        engine.prefill(sequence, chunk=5)
        engine.decode(sequence, 2)
        engine.learn(sequence)
        engine.run(Run(sequence, 1, 3), accepted={sequence: 2})
        child = engine.fork(sequence) if sequence.known >= sequence.computed else None
        assert child is None
        engine.learn(sequence, more=0)
        child = engine.fork(sequence)
        engine.suspend(sequence)
        engine.decode(child, 2)
        engine.resume(sequence)
        engine.prefill(sequence)
        engine.decode(sequence, 1)
        engine.truncate(sequence, 7)
        engine.extend(sequence, 60)
        engine.prefill(sequence)
        engine.close(sequence, child)
    assert engine.manager.stats().reused_tokens > 0
    engine.drained()


def test_a_refused_plan_names_the_group_of_its_domain() -> None:
    layout = domains(8, (History(),), (History(),))
    engine = Engine(PagedCacheManager(layout))
    sequence = engine.open(range(8))
    engine.prefill(sequence)
    before = engine.manager.stats()
    plan = engine.manager.plan([Run(sequence, 200)])
    # All that is there goes to the first group, on paper; the second lacks everything.
    assert {shortage.group for shortage in plan.shortages} <= {"target/History()", "draft/History()"}
    with pytest.raises(CapacityError, match=r"the plan does not fit: .*History\(\) needs 50 pages and can get \d+"):
        plan.commit()
    assert engine.manager.stats() == before
    engine.audit()
    engine.decode(sequence, 2)
    engine.close(sequence)
    engine.drained()


def test_parts_are_found_by_domain() -> None:
    layout = domains(8, (History(), Window(6)), (History(),), width=2)
    group, part = layout.part(0, "k")
    assert (group.domain, part.byte_count) == ("target", 4 * 16)
    assert layout.part(0, "k", domain="target") == (group, part)
    group, part = layout.part(0, "k", domain="draft")
    assert (group.domain, part.byte_count) == ("draft", 4 * 8)
    with pytest.raises(SpecError) as caught:
        layout.part(0, "v", domain="draft")
    assert str(caught.value) == "layer 0 has no stream 'v'\nhint: it has ['k']"
    with pytest.raises(SpecError) as caught:
        layout.part(1, "k", domain="draft")
    assert str(caught.value) == "layer 1 has no stream 'k'\nhint: it has no streams"


def test_domains_that_do_not_go_together_are_refused() -> None:
    spec = make_spec(P, History())
    with pytest.raises(SpecError) as caught:
        Layout.build(spec, 1 << 20, drafts=(spec,))
    assert str(caught.value) == "two specs have one domain: ['target', 'target']\nhint: name the draft model's domain"
    with pytest.raises(SpecError) as caught:
        Layout.build(spec, 1 << 20, drafts=(CacheSpec(spec.layers, 8, "d", "draft"),))
    assert str(caught.value) == "domains differ in block_tokens: [4, 8]"


# Everything mixed, with long overlaps


@pytest.mark.parametrize("mix", ALL)
def test_a_batch_that_grows_and_shrinks_with_drafts_forks_and_failures(mix: str) -> None:
    rng = np.random.default_rng(len(mix))
    engine = engine_of(mix, pages=40, restore=RestorePolicy(every_blocks=3))
    live = [engine.open(range(7))]
    engine.prefill(*live)
    for _ in range(60):
        sequence = live[rng.integers(len(live))]
        choice = rng.random()
        engine.learn(sequence, more=0)
        if choice < 0.15 and len(live) < 5:
            child = engine.fork(sequence)
            engine.extend(child, int(rng.integers(1000)))
            live.append(child)
        elif choice < 0.25 and len(live) > 1:
            live.remove(sequence)
            engine.close(sequence)
        elif choice < 0.35:
            engine.suspend(sequence)
            engine.resume(sequence)
        elif choice < 0.45:
            engine.truncate(sequence, int(rng.integers(1, min(sequence.known, 30) + 1)))
        elif choice < 0.6:
            engine.prefill(sequence)
            engine.learn(sequence)
            drafts = int(rng.integers(0, 4))
            engine.run(Run(sequence, 1, drafts), accepted={sequence: int(rng.integers(1, drafts + 2))})
        else:
            engine.prefill(*live)
            for each in live:
                engine.learn(each)
            engine.run(*(Run(each, 1) for each in live))
        if max(each.known for each in live) > 60:
            for each in list(live):
                engine.learn(each, more=0)
                engine.truncate(each, 5)
    engine.close(*live)
    engine.drained()


def test_tokens_helper_reads_ranges() -> None:
    assert tokens(1, range(3, 5), 9).tolist() == [1, 3, 4, 9]
