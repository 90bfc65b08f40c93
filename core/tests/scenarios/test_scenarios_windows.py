"""Scenarios of area C: sliding windows, with and without sinks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
from cache_requests import manager_of

from kvist.manager import Run
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window
from kvist.testing.engine import Engine, held_blocks

WINDOWS = [Window(1), Window(2), Window(4), Window(7), Window(8), Window(9), Window(3, sinks=1), Window(6, sinks=5)]


def blocks_read(window: Window, computed: int, block: int) -> set[int]:
    """Blocks with a computed row that the query at ``computed - 1`` or any later one reads, by trying all of them.

    One position further back than the next query: the same prompt sent again resumes at its last token.
    """
    read = set()
    for query in range(max(0, computed - 1), computed + window.tokens + 1):
        for position in range(computed):
            if query - window.tokens < position <= query or position < window.sinks:
                read.add(position // block)
    return read


def reads_of_query(window: Window, query: int) -> set[int]:
    return {p for p in range(query) if p > query - window.tokens or p < window.sinks}


@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_exactly_the_blocks_that_can_be_read_are_held(window: Window, block: int, chunk: int) -> None:
    """14 (a), (b): after every chunk of a prefill, of any size, also where a block is longer than the window."""
    engine = Engine(manager_of(60, window, block_tokens=block))
    sequence = engine.open(range(37))
    while sequence.computed < 37:
        end = min(37, sequence.computed + chunk)
        step = engine.run(Run(sequence, end - sequence.computed))
        assert set(held_blocks(sequence, step, 0)) == blocks_read(window, end, block)
    engine.close(sequence)
    engine.drained()


def test_the_blocks_of_the_scenario_by_hand() -> None:
    """14: (a) the query at 8 reads 1..8, so blocks 0 and 1 stay; (b) the one at 16 reads 13..15 of block 1."""
    engine = Engine(manager_of(20, Window(8)))
    sequence = engine.open(range(17))
    assert held_blocks(sequence, engine.run(Run(sequence, 8)), 0) == [0, 1]
    assert held_blocks(sequence, engine.run(Run(sequence, 8)), 0) == [2, 3]
    engine = Engine(manager_of(20, Window(4), block_tokens=8))
    sequence = engine.open(range(17))
    assert held_blocks(sequence, engine.run(Run(sequence, 16)), 0) == [1]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_decoding_holds_a_bounded_number_of_pages(window: Window, block: int, batched: bool) -> None:
    """14 (c): the window and one block more at either end, and the sinks, however long the text grows."""
    engine = Engine(manager_of(60, window, block_tokens=block))
    sequence = engine.open(0)
    engine.prefill(sequence)
    batch = engine.manager.decode_batch()
    if batched:
        batch.join(sequence)
    bound = -(-(window.tokens - 1) // block) + 2 + -(-window.sinks // block)
    for position in range(1, 50):
        engine.learn(sequence)
        step = engine.run(decode=batch) if batched else engine.run(Run(sequence, 1))
        held = held_blocks(sequence, step, 0)
        assert {p // block for p in reads_of_query(window, position)} <= {*held, position // block}
        assert len(held) <= bound
        assert engine.used()[0][1] == len(held)
    engine.close(sequence)
    engine.drained()


def test_the_bound_of_the_scenario_by_hand() -> None:
    """14 (c): P = 4, W = 8, to position 200: never more than 3 pages."""
    engine = Engine(manager_of(20, Window(8)))
    sequence = engine.open(0)
    engine.prefill(sequence)
    for _ in range(200):
        engine.decode(sequence, 1)
        assert engine.used()[0][1] <= 3
    assert engine.manager.stats().groups[0].held_peak == 3


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("window", [Window(1), Window(4), Window(6, sinks=5)], ids=str)
def test_overlapped_chunks_keep_what_the_older_ones_read(window: Window, depth: int) -> None:
    """14: a block leaves when the step that reads it is completed, not when the next one is planned."""
    engine = Engine(manager_of(60, window, block_tokens=2))
    sequence = engine.open(range(40))
    flights: list = []
    while sequence.scheduled < 40:
        flights.append(engine.launch(Run(sequence, min(3, 40 - sequence.scheduled))))
        if len(flights) == depth:
            engine.land(flights.pop(0))
            held = set(held_blocks(sequence, flights[-1].step, 0))
            assert blocks_read(window, sequence.computed, 2) <= held
    for flight in flights:
        engine.land(flight)
    engine.close(sequence)
    engine.drained()


# 15. What is published at the end


def test_pages_given_back_are_not_published() -> None:
    """15 by hand: W = 4, P = 4; pages 0 and 1 of S are T's when S finishes. Page 2 was kept for 12, the last block
    boundary that the same prompt can resume at, and 3 for the end; whoever reads only these two can resume."""
    engine = Engine(manager_of(6, Window(4)))
    first = engine.open(range(1, 17))
    engine.prefill(first, chunk=4)
    other = engine.open(range(50, 58))
    engine.prefill(other)
    engine.close(first)
    assert [engine.probe(range(1, n + 1), 99) for n in range(1, 17)] == [0] * 10 + list(range(11, 17))
    engine.decode(other, 3)
    again = engine.open(range(1, 17), 17)
    assert again.reused == 16
    engine.prefill(again)
    engine.close(again, other)
    # All of it evicted: every page is there once.
    engine.turn(range(200, 209), chunk=1)
    engine.turn(range(300, 324), chunk=4)
    engine.drained()


@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize(
    "retentions",
    [(Window(4),), (Window(5, sinks=3),), (History(), Window(4)), (Window(2), Window(9)), (Window(4), State())],
    ids=str,
)
@pytest.mark.parametrize("whole", [False, True])
def test_hits_on_windows_are_what_can_be_read(retentions: tuple, block: int, every: int | None, whole: bool) -> None:
    """15: while strangers take what was given back, each restore point that the policy promises is found, whatever
    else is found is clean, and each page is freed once."""
    length = 5 * block + 2
    policy = RestorePolicy(every, whole)
    engine = Engine(manager_of(80 * len(retentions), *retentions, block_tokens=block, restore=policy))
    first = engine.open(range(length))
    stranger = engine.open(range(500, 500 + 3 * length))
    while first.computed < length:
        end = first.next_end(min(length, first.computed + 3))
        engine.run(Run(first, end - first.computed), Run(stranger, 2))
    engine.close(first)
    promised = {(length - 1) // block * block, length // block * block if whole else length}
    promised |= {length - 1} if State() not in retentions and not whole else set()
    promised |= set(range(every * block, length, every * block)) if every else set()
    for asked in range(1, length + 1):
        hit = engine.probe(range(asked), 900 + asked)
        assert max((p for p in promised if p <= asked), default=0) <= hit <= asked
        # Reads all that a query there reads.
        assert engine.turn(range(asked), 900 + asked) == hit
    engine.close(stranger)
    engine.drained()


# 17. Whose pages go first


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("chunk_blocks", [1, 2])
def test_a_long_request_reuses_its_own_dropped_pages(block: int, chunk_blocks: int) -> None:
    """17: one pool for History and a window. The long request's peak fits beside what is idle, so nothing idle goes."""
    idle = 3 * 2
    # At its end the request holds 16 pages of history and what is live of the window when a chunk begins.
    live = 1 + (1 if block == 4 else 4) + chunk_blocks
    engine = Engine(manager_of(idle + 6 + 16 + live, History(), Window(4), block_tokens=block))
    engine.turn(range(3 * block))
    engine.turn(range(100 * block, 116 * block), chunk=chunk_blocks * block)
    assert engine.probe(range(3 * block), 9) == 3 * block
    assert sum(group.evicted for group in engine.manager.stats().groups) == 0
    engine.drained()


def test_the_pool_of_the_scenario_by_hand() -> None:
    """17: 16 pages, 3 + 2 of them idle; the long request needs 8 of the history and at most 3 of the window."""
    engine = Engine(manager_of(16, History(), Window(4)))
    engine.turn(range(1, 13))
    assert engine.used() == [(3, 0), (2, 0)]
    sequence = engine.open(range(100, 132))
    engine.prefill(sequence, chunk=4)
    assert engine.probe(range(1, 13), 13) == 12
    engine.close(sequence)
    assert engine.probe(range(1, 13), 13) == 12


@pytest.mark.parametrize("window", [Window(4), Window(1), Window(8), Window(5, sinks=2)], ids=str)
def test_many_turns_of_decoding_leave_idle_conversations_alone(window: Window) -> None:
    """17: the same while decoding, one token at a time, far past the size of the pool in window pages."""
    engine = Engine(manager_of(40, window))
    idle = [range(1000 * n, 1000 * n + 9) for n in range(3)]
    for conversation in idle:
        engine.turn(conversation)
    sequence = engine.open(0)
    engine.prefill(sequence)
    engine.decode(sequence, 250)
    for conversation in idle:
        assert engine.probe(conversation, 7) == 9
    engine.close(sequence)
    engine.drained()


# The arithmetic of retentions


@pytest.mark.parametrize("block", [1, 2, 4, 7])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_spans_of_a_window_by_trying_every_query(window: Window, block: int) -> None:
    """14, sw-01: live, required and droppable blocks at every length, around all boundaries."""

    def as_set(spans: SequenceOf[tuple[int, int]]) -> set[int]:
        flat = [ordinal for begin, end in spans for ordinal in range(begin, end)]
        assert flat == sorted(set(flat))
        return set(flat)

    for length in range(40):
        below = set(range(-(-length // block)))
        read = {
            p // block
            for query in range(length, length + window.tokens + 1)
            for p in reads_of_query(window, query)
            if p < length
        }
        # The block being filled is live although a window of one token reads nothing of it.
        being_filled = {length // block} if length % block else set()
        assert as_set(window.live(length, block)) == read | being_filled
        required = {p // block for p in reads_of_query(window, length)}
        assert as_set(window.required(length, block)) == required | being_filled
        for rollback in range(5):
            kept = as_set(window.live(max(0, length - rollback), block))
            gone = as_set(window.droppable(length, rollback, block))
            assert gone <= below
            assert gone.isdisjoint(kept)
            # Whatever is neither read nor droppable lies in the tokens that may be taken back, or is a sink block that
            # has not been filled yet.
            for ordinal in below - gone - kept:
                assert (ordinal + 1) * block > length - rollback or ordinal < -(-window.sinks // block)


@pytest.mark.parametrize("seed", range(2))
def test_random_windows_against_the_oracle(seed: int) -> None:
    """14, 15, 17: any two windows over a history, small pool, aborted and repeated prompts."""
    rng = np.random.default_rng(seed)
    for _ in range(6):
        block = int(rng.integers(1, 6))
        windows = [Window(int(rng.integers(1, 12)), sinks=int(rng.integers(0, 4))) for _ in range(2)]
        retentions = [History(), *windows] if rng.random() < 0.5 else windows
        engine = Engine(manager_of(40 * len(set(retentions)), *retentions, block_tokens=block), seed)
        for _ in range(15):
            start = int(rng.integers(0, 3)) * 100
            sequence = engine.open(range(start, start + int(rng.integers(1, 25))))
            engine.run(Run(sequence, int(rng.integers(1, sequence.known - sequence.computed + 1))))
            if rng.random() < 0.8:
                engine.prefill(sequence, chunk=int(rng.integers(1, 9)))
            engine.close(sequence)
        engine.drained()
