"""The conformance checklist of another cache manager, where it applies here and no scenario has it already. Each test
names its ids; ``docs/reference/scenarios.md`` has all of them, and why some do not apply.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_requests import manager_of

from kvist.errors import RequestError, StateError
from kvist.manager import Run
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence
from kvist.spec import History, Scope, State, Window
from kvist.testing.engine import MIXES, Engine, held_blocks
from kvist.testing.values import tokens

ALL = list(MIXES)


def engine_of(mix: str, pages: int = 60, **options: object) -> Engine:
    return Engine(manager_of(pages * len(MIXES[mix]), *MIXES[mix], **options))  # type: ignore[arg-type]


# Lengths and states


def ordered(sequence: Sequence, block: int) -> None:
    assert sequence.committed <= sequence.computed <= sequence.reserved
    assert sequence.block_count <= -(-sequence.reserved // block)
    assert sequence.computed <= sequence.scheduled


@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("mix", ALL)
def test_len_01_lengths_are_ordered_at_all_times(mix: str, block: int) -> None:
    """len-01: committed <= computed <= reserved; a new sequence has its reused tokens everywhere."""
    engine = engine_of(mix, block_tokens=block)
    engine.turn(range(9))
    sequence = engine.open(range(9), 50, 51)
    assert sequence.committed == sequence.computed == sequence.scheduled == sequence.reused == 9
    assert sequence.block_count == 9 // block
    flights = [engine.launch(Run(sequence, 1)), engine.launch(Run(sequence, 1))]
    ordered(sequence, block)
    assert (sequence.committed, sequence.computed, sequence.scheduled) == (9, 9, 11)
    for flight in flights:
        engine.land(flight)
        ordered(sequence, block)
    engine.run(Run(sequence, 1))
    assert (sequence.committed, sequence.computed) == (11, 12)
    assert sequence.reserved == -(-12 // block) * block
    engine.learn(sequence)
    engine.run(Run(sequence, 1, 5), accepted={sequence: 2})
    ordered(sequence, block)
    engine.suspend(sequence)
    assert (sequence.committed, sequence.computed, sequence.reserved) == (0, 0, 0)
    engine.resume(sequence)
    ordered(sequence, block)
    engine.close(sequence)
    engine.drained()


def test_len_02_impossible_lengths_are_refused_and_change_nothing() -> None:
    """len-02: nobody sets lengths directly; runs and truncations that make no sense are typed errors."""
    engine = engine_of("history+windows+state")
    sequence = engine.open(range(9))
    engine.prefill(sequence)
    before = engine.manager.stats()
    for run in (Run(sequence, 0), Run(sequence, -1), Run(sequence, 1, -1)):
        with pytest.raises(RequestError):
            engine.manager.plan([run])
    for length in (0, 10):
        with pytest.raises(RequestError):
            engine.manager.truncate(sequence, length)
    assert (sequence.known, sequence.computed) == (9, 9)
    assert engine.manager.stats() == before


@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("mix", ALL)
def test_len_03_len_04_shrinking_one_token_at_a_time(mix: str, block: int) -> None:
    """len-03, len-04: down to the first token; a table never names a page beyond its blocks (``check`` says so), and
    what is left is computed on from."""
    engine = engine_of(mix, block_tokens=block)
    sequence = engine.open(range(3 * block + 2))
    engine.prefill(sequence)
    for length in range(sequence.known - 1, 0, -1):
        assert engine.truncate(sequence, length) <= length
        # The copy of an open block gets its page with the next step.
        assert sequence.computed <= sequence.reserved <= -(-length // block) * block
        engine.prefill(sequence)
    engine.extend(sequence, range(60, 70))
    engine.prefill(sequence)
    engine.close(sequence)
    engine.drained()


def is_open(engine: Engine, sequence: Sequence) -> None:
    pass


def has_computed(engine: Engine, sequence: Sequence) -> None:
    engine.run(Run(sequence, 3))


def is_suspended(engine: Engine, sequence: Sequence) -> None:
    engine.run(Run(sequence, 3))
    engine.suspend(sequence)


def has_resumed(engine: Engine, sequence: Sequence) -> None:
    is_suspended(engine, sequence)
    engine.resume(sequence)


def is_in_a_batch(engine: Engine, sequence: Sequence) -> None:
    engine.prefill(sequence)
    engine.manager.decode_batch().join(sequence)


def is_forked(engine: Engine, sequence: Sequence) -> None:
    engine.prefill(sequence)
    engine.close(engine.fork(sequence))


def is_cancelled(engine: Engine, sequence: Sequence) -> None:
    engine.manager.cancel(engine.launch(Run(sequence, 3)).step)


STATES_OF_LIFE = [is_open, has_computed, is_suspended, has_resumed, is_in_a_batch, is_forked, is_cancelled]


@pytest.mark.parametrize("state", STATES_OF_LIFE)
@pytest.mark.parametrize("mix", ALL)
def test_st_01_closing_from_every_state(mix: str, state: Callable[[Engine, Sequence], None]) -> None:
    """st-01, ru-07, ru-17: closing is idempotent, and afterwards every page can be had by somebody else. There is no
    stream to set: steps run in the order in which they were committed."""
    engine = engine_of(mix, pages=12)
    for _ in range(3):
        sequence = engine.open(range(10))
        state(engine, sequence)
        engine.close(sequence, sequence)
        assert sequence.closed
        assert all(held == 0 for _, held in engine.used())
    if mix == "history":
        engine.turn(range(100, 148))
        assert engine.used() == [(12, 0)]
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_st_05_st_06_st_07_resuming(mix: str) -> None:
    """st-05: resuming allocates nothing and cannot fail, in a full cache neither. st-06: a suspended sequence's table
    row is empty, and after resuming it names what is there. st-07: resuming what is not suspended does nothing."""
    engine = engine_of(mix, pages=12)
    sequence = engine.open(range(10))
    step = engine.run(Run(sequence, 10))
    engine.suspend(sequence)
    for group in range(len(MIXES[mix])):
        assert held_blocks(sequence, step, group) == []
    hog = engine.open(900)
    blocks = 0
    while engine.manager.plan([Run(hog, 4 * (blocks + 1))]).fits and blocks < 12:
        blocks += 1
    engine.run(Run(hog, 4 * blocks))
    free = [group.free for group in engine.manager.stats().groups]
    engine.resume(sequence)
    assert [group.free for group in engine.manager.stats().groups] == free
    assert engine.resume(sequence) == sequence.computed
    engine.close(hog)
    engine.prefill(sequence)
    engine.decode(sequence, 1)
    assert engine.resume(sequence) == 11
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_st_08_the_open_tail_is_published_once(mix: str) -> None:
    """st-08: there is no commit to call. The open block is published when the sequence ends or is suspended, once."""
    engine = engine_of(mix)
    sequence = engine.open(range(10))
    engine.prefill(sequence)
    assert engine.probe(range(10), 9) <= 8
    engine.suspend(sequence)
    assert engine.probe(range(10), 9) == 10
    used = engine.used()
    engine.suspend(sequence)
    engine.close(sequence, sequence)
    assert engine.used() == used
    engine.drained()


# Reuse


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("backoff", [0, 2])
@pytest.mark.parametrize("mix", ALL)
def test_ru_01_probe_is_claim(mix: str, backoff: int, every: int | None) -> None:
    """ru-01, ss-03: for every length, scope and policy (``open`` of the test engine compares), and never more than is
    known of the prompt, nor than the prompt without its last token."""
    engine = engine_of(mix, pages=120, backoff_tokens=backoff, restore=RestorePolicy(every_blocks=every))
    scopes = [Scope(), Scope(salt="a"), Scope(adapter="a")]
    for scope in scopes[:2]:
        engine.turn(range(13), scope=scope)
        engine.turn(range(7), range(50, 59), scope=scope)
    for length in range(1, 16, 2):
        for scope in scopes:
            for prompt in ((range(length),), (range(min(7, length)), range(50, 50 + length))):
                sequence = engine.open(*prompt, scope=scope)
                assert sequence.reused <= sequence.matched
                assert sequence.reused <= max(0, min(sequence.matched, len(sequence.prompt) - 1) - backoff)
                assert (sequence.matched == 0) == (scope == scopes[2])
                engine.close(sequence)
    engine.drained()


def test_ru_03_part_of_a_block() -> None:
    """ru-03: 12 cached, 10 asked: 9, all but the last token. Where groups keep states, whole blocks: 8."""
    for retentions, reused in (((History(),), 9), ((Window(4), History()), 9), ((History(), State()), 8)):
        engine = Engine(manager_of(60, *retentions, restore=RestorePolicy(every_blocks=1)))
        engine.turn(range(12), chunk=4)
        assert engine.turn(range(10)) == reused


@pytest.mark.parametrize("mix", ALL)
def test_ru_06_an_open_block_is_never_shared_for_writing(mix: str) -> None:
    """ru-05, ru-06: two that computed the same 6 tokens share block 0 and not block 1, which both go on filling."""
    engine = engine_of(mix)
    pair = [engine.open(range(6)) for _ in range(2)]
    engine.prefill(*pair)
    for number, sequence in enumerate(pair):
        engine.extend(sequence, range(70 + 10 * number, 75 + 10 * number))
    engine.run(*(Run(sequence, 1) for sequence in pair))
    engine.close(engine.open(range(6), 99))
    engine.prefill(*pair, chunk=2)
    engine.close(*pair)
    engine.drained()


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint16, ">i4", "strided"])
def test_ru_08_all_kinds_of_arrays_are_the_same_tokens(kind: object) -> None:
    """ru-08: published by one kind, found by another."""
    ids = [5, 1, 4, 1, 5, 9, 2, 6, 5]
    if kind in (list, tuple):
        asked = kind(ids)  # type: ignore[operator]
    elif kind == "strided":
        asked = np.repeat(np.array(ids, np.int32), 2)[::2]
    else:
        asked = np.array(ids, kind)  # type: ignore[call-overload]
    for first, second in ((ids, asked), (asked, ids)):
        manager = manager_of(20)
        sequence = manager.open(first)
        manager.complete(manager.plan([Run(sequence, 9)]).commit())
        manager.close(sequence)
        assert manager.probe(second) == manager.open(second).reused == 8


@pytest.mark.parametrize("mix", ALL)
def test_ru_11_a_longer_tail_replaces_a_shorter_one(mix: str) -> None:
    """ru-11, ru-12: endings 6, 7 and 5 in one block: one physical tail, which covers the longest; histories and windows
    find every length in it, a state the longest one's end only."""
    engine = engine_of(mix)
    for length in (6, 7, 5):
        engine.turn(range(length))
    if mix.startswith("history"):
        assert engine.used()[0] == (2, 0)
    found = [engine.probe(range(length), 99) for length in (5, 6, 7)]
    assert found[2] == 7
    if mix in ("history", "window", "sinks", "history+window"):
        assert found == [5, 6, 7]
    for length in (5, 6, 7):
        engine.turn(range(length), 200 + length)
    engine.drained()


@pytest.mark.parametrize("branches", [31, 32, 33, 100])
def test_ru_13_any_number_of_children_is_searched(branches: int) -> None:
    """ru-13: the closest of many branches inside a block is found, whichever it is."""
    engine = Engine(manager_of(2 * branches + 10))
    for branch in range(branches):
        engine.turn(1, 2, branch * 7, branch, 5)
    for branch in range(branches):
        assert engine.probe(1, 2, branch * 7, branch, 9) == 4
        assert engine.probe(1, 2, branch * 7, 9999) == 3
    assert engine.probe(1, 2, 3, 4) == 2


def test_ru_14_a_window_page_may_go_alone_and_a_history_page_takes_what_follows() -> None:
    """ru-14: cached window pages inside a held run give way, and later restore points of that run survive."""
    engine = Engine(manager_of(14, History(), Window(4), restore=RestorePolicy(every_blocks=1)))
    engine.turn(range(20), chunk=4)
    live = engine.open(range(20), 60)
    assert live.reused == 20
    engine.run(Run(live, 1))
    hog = engine.open(900)
    blocks = 0
    while engine.manager.plan([Run(hog, 4 * (blocks + 1))]).fits:
        blocks += 1
    engine.run(Run(hog, 4 * blocks))
    hits = [engine.probe(range(n), 99) for n in (4, 8, 12, 16, 20)]
    assert hits[-1] == 20
    assert hits[0] < 4
    engine.close(hog)
    engine.decode(live, 1)
    engine.close(live)
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_ru_15_blocks_of_a_live_sequence_stay_findable(mix: str) -> None:
    """ru-15, ss-08, ev-04: under a live sequence, only cached pages of sparse groups can go; what it publishes next
    continues its own path, and it reads nothing but its own."""
    engine = engine_of(mix, pages=9)
    live = engine.open(range(6))
    engine.prefill(live)
    for round_ in range(8):
        hog = engine.open(900 + round_)
        engine.run(Run(hog, 4))
        for blocks in range(2, 10):
            if not engine.manager.plan([Run(hog, 4 * blocks)]).fits:
                break
        engine.run(Run(hog, 4 * (blocks - 2) or 1))
        engine.close(hog)
        engine.decode(live, 1)
    engine.close(live)
    assert engine.probe(range(6), range(100_006, 100_014), 5) == 14
    engine.drained()


@pytest.mark.parametrize("mix", ALL)
def test_ru_17_what_was_opened_and_never_ran_holds_nothing_afterwards(mix: str) -> None:
    """ru-17, sd-05: opened, refused and closed a hundred times over: the cache is as it was."""
    engine = engine_of(mix, pages=8)
    engine.turn(range(9))
    used = engine.used()
    for _ in range(30):
        waiting = [engine.open(range(9), 50 + n) for n in range(3)]
        assert all(sequence.reused == 9 for sequence in waiting)
        assert not engine.manager.plan([Run(s, 400) for s in waiting]).fits or mix == "state"
        engine.close(*waiting)
    assert engine.used() == used
    assert engine.manager.stats().requests == 1
    assert engine.probe(range(9), 1) == 9
    engine.drained()


# Windows


def test_sw_02_sw_03_only_what_resuming_reads_is_kept() -> None:
    """sw-02, sw-03: W = 64, P = 32. Resuming at 127 reads 64..126 of blocks 2 and 3; block 1 is there for 96, the last
    block boundary that the same prompt can resume at, and block 0 for nothing."""
    engine = Engine(manager_of(40, History(), Window(64), block_tokens=32))
    engine.turn(range(127))
    assert engine.used() == [(4, 0), (3, 0)]
    assert [engine.probe(range(n), 999) for n in (64, 94, 95, 96, 127)] == [0, 0, 95, 96, 127]
    assert engine.turn(range(127)) == 126
    engine.drained()


# Index tables


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", ALL)
def test_im_05_steps_read_late_find_their_own_tables(mix: str, block: int) -> None:
    """im-05: two steps are committed before either of them runs, while others open and close and the tables grow; each
    reads and writes what it was given."""
    engine = engine_of(mix, pages=150, block_tokens=block)
    rows = [engine.open(range(20 * n, 20 * n + 5)) for n in range(3)]
    engine.prefill(*rows)
    batch = engine.manager.decode_batch()
    batch.join(rows[0])
    idle = engine.open(range(900, 907))
    engine.prefill(idle)
    for round_ in range(6):
        for sequence in rows[1:]:
            engine.learn(sequence, more=2)
        committed = []
        for number in range(2):
            plan = engine.manager.plan([Run(sequence, 1) for sequence in rows[1:]], decode=batch)
            for sequence in plan.sequences:
                engine._text(sequence, sequence.scheduled + 2)
            committed.append((plan.commit(), plan))
            # Meanwhile.
            late = engine.open(range(2000 + 100 * round_, 2000 + 100 * round_ + 40 * number + 1))
            engine.close(late)
            if number == 0 and round_ == 3:
                engine.close(idle)
        for step, plan in committed:
            engine.values.run(step, plan.sequences, engine.texts)
        for step, _ in committed:
            engine.manager.complete(step)
            engine.audit()
    assert [sequence.computed for sequence in rows] == [17, 17, 17]
    engine.close(*rows)
    engine.drained()


def test_im_03_there_is_always_a_row() -> None:
    """im-03: tables grow with the open sequences; nobody has to wait for a row."""
    engine = Engine(manager_of(10))
    opened = [engine.open(number) for number in range(100)]
    assert len({sequence.slot for sequence in opened}) == 100
    engine.close(*opened)
    engine.drained()


# Statistics


def test_sx_02_sx_05_tokens_are_counted_and_not_blocks() -> None:
    """sx-02, sx-05, sw-04: 8 tokens of a prompt, then one by one; a part of a block counts by its tokens; blocks that a
    window has dropped are in no number of tokens."""
    engine = Engine(manager_of(60, History(), Window(3)))
    sequence = engine.open(range(8))
    engine.prefill(sequence)
    engine.decode(sequence, 1)
    engine.close(sequence)
    stats = engine.manager.stats()
    assert (stats.prompt_tokens, stats.reused_tokens, stats.computed_tokens) == (8, 0, 9)
    assert engine.turn(range(7), 50) == 7
    stats = engine.manager.stats()
    assert (stats.prompt_tokens, stats.reused_tokens, stats.computed_tokens) == (16, 7, 10)


@pytest.mark.parametrize("mix", ALL)
def test_sx_03_sx_04_a_step_counts_when_it_completes(mix: str) -> None:
    """sx-03, sx-04, sx-08: cancelled work counts nowhere, and once when it is done again."""
    engine = engine_of(mix)
    sequence = engine.open(range(9))
    for ran in (False, True):
        if ran:
            engine.manager.cancel(engine.launch(Run(sequence, 9)).step, ran=True)
            engine.resume(sequence)
        else:
            engine.manager.cancel(engine.manager.plan([Run(sequence, 9)]).commit(), ran=False)
        stats = engine.manager.stats()
        assert (stats.requests, stats.computed_tokens, stats.steps) == (0, 0, 0)
    engine.prefill(sequence, polite=False)
    stats = engine.manager.stats()
    assert (stats.requests, stats.computed_tokens, stats.steps) == (1, 9, 1)
    engine.close(sequence)
    engine.drained()


def test_a_closed_sequence_is_refused_everywhere() -> None:
    """st-01, st-08: every operation on it is a typed error."""
    engine = Engine(manager_of(10))
    sequence = engine.open(range(5))
    engine.close(sequence)
    manager = engine.manager
    for call in (
        lambda: manager.plan([Run(sequence, 1)]),
        lambda: manager.suspend(sequence),
        lambda: manager.resume(sequence),
        lambda: manager.truncate(sequence, 1),
        lambda: manager.fork(sequence),
        lambda: sequence.extend([1]),
        lambda: manager.decode_batch().join(sequence),
    ):
        with pytest.raises(StateError):
            call()
    assert manager.probe(tokens(range(5))) == 0
