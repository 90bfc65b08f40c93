"""Scenarios of area D: hybrid models with recurrent state."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cache_requests import manager_of

from kvist.errors import CapacityError, RequestError, SpecError, StateError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.byte_values import ByteValues
from kvist.testing.engine import Engine, shared_length
from kvist.testing.mixes import Checkpoint
from kvist.testing.values import tokens

HYBRIDS = [(State(),), (History(), State()), (Window(5), State()), (History(), Window(6, sinks=2), State())]


def hybrid(*retentions: object, pages: int = 60, **options: object) -> Engine:
    kept = retentions or (History(), State())
    return Engine(manager_of(pages * len(kept), *kept, **options))  # type: ignore[arg-type]


# 18. A state belongs to one position


def test_the_reuse_of_the_scenario_by_hand() -> None:
    """18: P = 4, a snapshot every 8 tokens. The end of a finished request is a restore point of its own, so (a) is 12
    once A has finished, and 8 as long as it runs; (c) is 0 without a snapshot at or below 7."""
    engine = hybrid(restore=RestorePolicy(every_blocks=2))
    first = engine.open(range(1, 13))
    engine.prefill(first)
    assert engine.probe(range(1, 13), 13) == 8
    assert engine.turn(range(1, 13), 13) == 8
    engine.close(first)
    assert engine.probe(range(1, 13), 14) == 12
    assert engine.turn(range(1, 13), 14) == 12
    assert engine.probe(range(1, 8), 90) == 0
    assert engine.turn(range(1, 8), 90) == 0
    engine.drained()


def test_a_lost_snapshot_is_no_start_state() -> None:
    """18 (b): attention still has everything and the state has nothing, so nothing is skipped, and the cold state is
    zero; the miss names the group."""
    # Blocks of one token, so that pages of both groups have one size and a snapshot can become any page.
    engine = Engine(manager_of(40, History(), State(), block_tokens=1))
    live = engine.open(range(1, 18))
    engine.prefill(live)
    assert engine.probe(range(1, 17), 90) == 16
    # The history is held by the live request; only the snapshot can give way.
    hogs = []
    while engine.probe(range(1, 17), 90):
        hog = engine.open(500 + len(hogs))
        engine.run(Run(hog, 1))
        hogs.append(hog)
    cold = engine.open(range(1, 17), 90)
    assert (cold.reused, cold.matched, cold.limited_by) == (0, 16, engine.manager.layout.groups[1])
    engine.close(*hogs)
    engine.prefill(cold)
    engine.decode(live, 2)
    engine.close(cold, live)
    engine.drained()


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("retentions", HYBRIDS, ids=str)
def test_every_parting_position_reuses_a_state_that_exists(retentions: tuple, block: int, every: int | None) -> None:
    """18, ss-01: for each position at which a prompt leaves a finished one: the deepest snapshot at or before it, one
    number for all groups, and the oracle's state there."""
    length = 4 * block + 2 if block > 1 else 6
    snapshots = {(length - 1) // block * block, length}
    snapshots |= set(range(every * block, length, every * block)) if every else set()
    for parting in range(length + 1):
        engine = hybrid(*retentions, block_tokens=block, restore=RestorePolicy(every_blocks=every))
        engine.turn(range(length))
        expected = max((s for s in snapshots if s <= parting), default=0)
        sequence = engine.open(range(parting), 900, 901)
        if State() in retentions and not any(isinstance(each, Window) for each in retentions):
            assert sequence.reused == expected
        assert sequence.reused in snapshots | {0}
        assert sequence.reused <= expected <= parting
        engine.prefill(sequence, chunk=3)
        engine.decode(sequence, 2)
        engine.close(sequence)
        engine.drained()


def test_the_larger_position_of_two_in_a_block() -> None:
    """ss-02: one block files one snapshot. A tail that a longer one continues is replaced by it, and its snapshot with
    it; prompts that end between the two then start further back."""
    engine = hybrid(block_tokens=32, pages=20)
    hits = [engine.turn(range(length)) for length in (10, 20, 25)]
    assert hits == [0, 10, 20]
    assert engine.probe(range(25), 99) == 25
    # Both 10 and 20 lie in the block that now ends at 25.
    assert engine.probe(range(15), 99) == 0
    engine.drained()


def test_a_shorter_sibling_does_not_take_the_state_of_the_future() -> None:
    """ss-01: fork at 15 with a snapshot at 20 only."""
    engine = hybrid(block_tokens=4)
    sequence = engine.open(range(30))
    engine.run(Run(sequence, 20))
    engine.suspend(sequence)
    assert engine.probe(range(15), 90) == 0
    assert engine.probe(range(20), 90) == 20
    assert engine.turn(range(15), 90) == 0


# 19. Tokens dropped from the end of a match


@pytest.mark.parametrize("backoff", range(10))
@pytest.mark.parametrize("retentions", HYBRIDS, ids=str)
def test_the_drop_for_a_draft_comes_before_the_choice_of_a_state(retentions: tuple, backoff: int) -> None:
    """19: states at every block boundary. The state is chosen below the shortened length and never above it; the
    combined length never grows from group to group."""
    engine = hybrid(*retentions, restore=RestorePolicy(every_blocks=1), backoff_tokens=backoff)
    engine.turn(range(1, 17))
    sequence = engine.open(range(1, 17), 17)
    assert sequence.reused == (16 - backoff) // 4 * 4
    engine.prefill(sequence)
    engine.close(sequence)
    engine.drained()


# 20. Silent misses


@pytest.mark.parametrize("block", [4, 8])
def test_siblings_with_a_shared_beginning_reuse_it(block: int) -> None:
    """20 (a): nobody keeps a state where A and B part before B comes; B keeps it, so C reuses the shared blocks. B's
    miss says which group it was and how much was known."""
    for retentions in HYBRIDS:
        engine = hybrid(*retentions, block_tokens=block)
        assert engine.turn(range(1, 13), range(101, 109)) == 0
        second = engine.open(range(1, 13), range(201, 209))
        assert second.reused == 0
        assert second.matched == (12 if History() in retentions else second.matched)
        assert second.limited_by is not None
        engine.prefill(second)
        engine.close(second)
        assert engine.turn(range(1, 13), range(301, 309)) == 12 // block * block
        engine.drained()


def test_the_unit_of_reuse_can_be_read() -> None:
    """20 (b): streams with a row per 2, 6 and 16 tokens: 48. A prompt of 40 tokens reuses 0, and it is nobody's fault
    but the unit's; one of 100 reuses 96."""
    row = RowFormat((2,), "float32")
    streams = [Stream(f"rows{ratio}", row, History(), tokens_per_row=ratio) for ratio in (2, 6, 16)]
    layout = Layout.build(CacheSpec((Layer(0, streams),), 48, "units"), 1 << 16)
    assert layout.reuse_unit == 48
    engine = Engine(PagedCacheManager(layout), values=ByteValues)
    for length, reused in ((40, 0), (100, 96)):
        assert engine.turn(range(1000, 1000 + length)) == 0
        again = engine.open(range(1000, 1000 + length))
        assert (again.reused, again.limited_by) == (reused, None)
        assert again.matched == length
        engine.prefill(again)
        engine.close(again)
    engine.drained()


# 21. What an earlier owner left in a state


def states_of_two_parts(pages: int, *more: Stream) -> Layout:
    """A convolution tail and a recurrent matrix per layer, of odd sizes, in two layers."""
    conv = Stream("conv", RowFormat((3, 7), "float16"), State())
    matrix = Stream("matrix", RowFormat((2, 5), "float32"), State())
    spec = CacheSpec((Layer(0, (conv, matrix, *more)), Layer(5, (conv, matrix, *more))), 4, "two parts")
    one = Layout.build(spec, 1 << 20)
    return Layout.build(spec, (pages + 1) * max(group.page_bytes for group in one.groups))


@pytest.mark.parametrize("history", [False, True])
def test_both_parts_of_a_state_start_at_zero_or_at_the_snapshot(history: bool) -> None:
    """21: bytes of an earlier owner are never read, in no part of the state: cold, with a hit, after suspending, after
    a failed step, after a clear."""
    more = (Stream("k", RowFormat((3,), "float32"), History()),) if history else ()
    engine = Engine(PagedCacheManager(states_of_two_parts(40 if history else 4, *more)), values=ByteValues)
    for number in range(6):
        sequence = engine.open(range(50 * number, 50 * number + 9))
        engine.prefill(sequence)
        engine.suspend(sequence)
        engine.resume(sequence)
        engine.prefill(sequence)
        engine.learn(sequence)
        engine.manager.cancel(engine.launch(Run(sequence, 1)).step)
        engine.resume(sequence)
        engine.prefill(sequence)
        engine.decode(sequence, 2)
        engine.close(sequence)
        warm = engine.open(range(50 * number, 50 * number + 9), 7)
        assert warm.reused == 8
        engine.prefill(warm)
        if number % 2:
            engine.manager.clear()
        engine.close(warm)
    engine.drained()


# 22. Groups of different sizes


def test_groups_of_any_sizes_share_an_arena() -> None:
    """22 (a): 4096 bytes per 16 tokens, a state of 3000 bytes, a draft's 8192 bytes per 16 tokens: what padding costs
    can be read, and the blocks stay as they are."""
    rows = CacheSpec(
        (
            Layer(0, (Stream("kv", RowFormat((64,), "float32"), History()),)),
            Layer(1, (Stream("state", RowFormat((750,), "float32"), State()),)),
        ),
        16,
        "target",
    )
    draft = CacheSpec((Layer(0, (Stream("kv", RowFormat((128,), "float32"), History()),)),), 16, "draft", "draft")
    layout = Layout.build(rows, 1 << 20, drafts=(draft,))
    assert [group.content_bytes for group in layout.groups] == [4096, 3000, 8192]
    assert all(layout.slab_bytes % group.page_bytes == 0 for group in layout.groups)
    wasted = [1 - group.content_bytes / group.page_bytes for group in layout.groups]
    assert layout.padding_fraction == max(wasted) < 0.1
    engine = Engine(PagedCacheManager(layout, RestorePolicy(every_blocks=4)), values=ByteValues)
    engine.turn(range(100))
    assert [engine.probe(range(n), 999) for n in (63, 64, 95, 96, 100)] == [0, 64, 64, 96, 100]
    assert engine.turn(range(100)) == 96
    engine.drained()


def test_a_state_is_in_column_0_whatever_the_length() -> None:
    """22 (b): resuming at 128 tokens with a snapshot every 64: the table of the state is not indexed by positions."""
    engine = hybrid(block_tokens=16, restore=RestorePolicy(every_blocks=4))
    engine.turn(range(150))
    sequence = engine.open(range(130))
    assert sequence.reused == 128
    step = engine.run(Run(sequence, 2))
    row = step.tables[1][sequence.slot]
    assert row[0] > 0
    assert (row[1:] == -1).all()
    assert len(step.copies[1]) == 1
    compact = step.compact()
    assert compact.tables[1].shape == (1, 1)
    with pytest.raises(IndexError):
        compact.tables[1][0, 1]
    engine.close(sequence)
    engine.drained()


# 23. A snapshot evicts while its own sequence is published


def test_a_snapshot_takes_the_page_of_the_one_before() -> None:
    """23 by hand: a state and one more page. The snapshot at 8 takes the place of the one at 4, on S's own path."""
    engine = Engine(manager_of(2, State(), restore=RestorePolicy(every_blocks=1)))
    sequence = engine.open(range(1, 10))
    engine.run(Run(sequence, 4))
    assert engine.probe(range(1, 6)) == 4
    engine.run(Run(sequence, 4))
    assert engine.probe(range(1, 10)) == 8
    assert engine.probe(range(1, 5), 90) == 0
    engine.run(Run(sequence, 1))
    engine.close(sequence)
    # The state at 9, and the snapshot at 8 that was there before.
    assert [engine.probe(range(1, n + 1), 90) for n in (7, 8, 9)] == [0, 8, 9]
    engine.drained()


@pytest.mark.parametrize("pages", [1, 2, 3, 5])
@pytest.mark.parametrize("retentions", HYBRIDS, ids=str)
def test_snapshots_never_fail_a_step(retentions: tuple, pages: int) -> None:
    """23, ss-05, ss-06: in a pool that is always full, a snapshot takes an older one's page or is left out."""
    engine = hybrid(*retentions, pages=8 + pages, restore=RestorePolicy(every_blocks=1))
    longest = max(n for n in range(1, 200) if engine.manager.layout.fits(n))
    for number in range(4):
        sequence = engine.open(range(1000 * number, 1000 * number + min(60, longest)))
        engine.prefill(sequence)
        engine.close(sequence)
        assert engine.manager.stats().groups[-1].held == 0
    engine.drained()


def test_long_and_deep_chains_need_no_recursion() -> None:
    """23: thousands of blocks in one prompt, and thousands of turns one on top of the other, evicted at once."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(150)
    try:
        manager = manager_of(3000, History(), State(), block_tokens=1, restore=RestorePolicy(every_blocks=500))
        long = manager.open(tokens(range(1500)))
        while long.computed < 1500:
            manager.complete(manager.plan([Run(long, long.next_end(1500) - long.computed)]).commit())
        manager.close(long)
        text = tokens(9000)
        for turn in range(400):
            # Each turn leaves the path of the one before, so each is an extent.
            for branch in (1, 2):
                sequence = manager.open(tokens(*text.tolist(), 10_000 * branch + turn))
                manager.complete(manager.plan([Run(sequence, sequence.known - sequence.computed)]).commit())
                manager.close(sequence)
            text = tokens(*text.tolist(), 20_000 + turn)
        assert manager.stats().extents > 400
        other = manager.open(tokens(7))
        step = manager.plan([Run(other, manager.layout.page_capacity(manager.layout.groups[0]) // 2)]).commit()
        manager.complete(step)
        manager.close(other)
        manager.clear()
    finally:
        sys.setrecursionlimit(limit)
    manager.check()
    assert manager.stats().extents == 0


# 24. Taking tokens back


@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_leave_no_trace_in_any_part_of_a_state(accepted: int) -> None:
    """24 (a): of 1 token and 2 drafts, 0..3 stay; the next step reads fold(1..4 + what stayed) in both parts."""
    engine = Engine(PagedCacheManager(states_of_two_parts(12)), values=ByteValues)
    sequence = engine.open(range(1, 5))
    engine.prefill(sequence)
    engine.learn(sequence)
    engine.run(Run(sequence, 1, 2), accepted={sequence: accepted})
    assert sequence.computed == 4 + accepted
    engine.learn(sequence)
    engine.run(Run(sequence, 1, 2), accepted={sequence: 1})
    engine.learn(sequence)
    engine.run(Run(sequence, 1))
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("drafts", range(1, 9))
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 4])
def test_rejected_drafts_cost_no_window_block(block: int, window: int, drafts: int) -> None:
    """24 (b): blocks leave by what has been accepted, so a rejected draft never pushes one out."""
    engine = Engine(manager_of(60, Window(window), block_tokens=block))
    sequence = engine.open(range(6))
    engine.prefill(sequence)
    for accepted in (0, 1, drafts + 1, 0, max(1, drafts - 1)):
        if sequence.known == sequence.computed:
            engine.learn(sequence)
        engine.run(Run(sequence, 1, drafts), accepted={sequence: accepted})
        engine.learn(sequence, more=0)
    engine.decode(sequence, 3)
    engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("retentions", [*HYBRIDS, (History(),), (Window(4),)], ids=str)
def test_truncating_to_nothing_is_refused_and_leaves_no_stale_token(retentions: tuple) -> None:
    """24 (c): a sequence has at least one token; removing more than there are is an error, never one stale token."""
    engine = hybrid(*retentions)
    sequence = engine.open(range(1, 4))
    engine.prefill(sequence)
    with pytest.raises(RequestError):
        engine.manager.truncate(sequence, 0)
    with pytest.raises(RequestError):
        engine.manager.truncate(sequence, -2)
    assert sequence.computed == 3
    assert engine.truncate(sequence, 1) <= 1
    engine.extend(sequence, 60, 61, 62)
    engine.prefill(sequence)
    assert sequence.computed == 4
    with pytest.raises(RequestError):
        engine.manager.truncate(sequence, 5)
    engine.close(sequence)
    engine.drained()


# What a state costs


@pytest.mark.parametrize("length", [1, 4, 1000])
def test_a_state_takes_one_page_whatever_the_length(length: int) -> None:
    """ss-07: one page per sequence, already for its first token; a pool of one page serves one request at a time."""
    engine = Engine(manager_of(1, State()))
    sequence = engine.open(range(length))
    engine.prefill(sequence)
    other = engine.open(range(5000, 5004))
    assert [(each.needed, each.available) for each in engine.manager.plan([Run(other, 1)]).shortages] == [(1, 0)]
    engine.close(sequence)
    engine.prefill(other)
    engine.close(other)
    engine.drained()


def test_states_without_room_for_one_page_are_refused() -> None:
    """ss-07: when the cache is built."""
    with pytest.raises(CapacityError, match="cannot hold one page of each of the 2 group"):
        manager_of(1, History(), State())
    with pytest.raises(SpecError):
        manager_of(1, State(), block_tokens=0)


@pytest.mark.parametrize("seed", range(4))
def test_hits_on_states_against_a_brute_force_model(seed: int) -> None:
    """18, 19, 20: with room for everything, the deepest snapshot anybody made on the prompt's own path, at block
    boundaries; the ends of finished turns can come on top."""
    rng = np.random.default_rng(seed)
    block, every = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    engine = hybrid(pages=600, block_tokens=block, restore=RestorePolicy(every_blocks=every))
    made: list[tuple[np.ndarray, int]] = []
    ends: list[np.ndarray] = []
    for _ in range(40):
        text = rng.integers(0, 2, int(rng.integers(1, 20)))
        if ends and rng.random() < 0.7:
            text = np.concatenate([ends[rng.integers(len(ends))], text])[: int(rng.integers(1, 40))]
        limit = len(text) - 1
        known = max((shared_length(text, end) for end in ends), default=0)
        at_boundaries = [p for path, p in made if p <= limit and shared_length(path, text) >= p]
        at_ends = [len(end) for end in ends if len(end) <= limit and shared_length(end, text) >= len(end)]
        sequence = engine.open(*text.tolist())
        assert max(at_boundaries, default=0) <= sequence.reused <= max([*at_boundaries, *at_ends], default=0)
        points = set(range(every * block, len(text) + 1, every * block))
        points |= {limit // block * block, min(known, limit) // block * block}
        made += [(text, p) for p in points if p > sequence.reused]
        engine.prefill(sequence, chunk=int(rng.integers(1, 15)))
        engine.close(sequence)
        ends.append(text)
    engine.drained()


def test_a_state_that_takes_drafts_back_itself_keeps_its_one_page() -> None:
    """Nothing is taken for drafts and nothing moves when some are accepted: the next step says how many. Only
    as many as the page remembers can be planned, and rejected."""
    engine = hybrid(History(), Checkpoint(3))
    sequence = engine.open(range(1, 7))
    engine.prefill(sequence)
    pages = []
    for drafts, accepted in ((3, 1), (3, 4), (1, 2), (0, 1), (3, 2)):
        engine.learn(sequence)
        step = engine.run(Run(sequence, 1, drafts), accepted={sequence: accepted})
        pages.append(int(step.tables[1][sequence.slot, 0]))
        assert engine.used()[1][1] == 1
    assert len(set(pages)) == 1 and sequence.computed == 16
    engine.learn(sequence)
    with pytest.raises(RequestError):
        engine.manager.plan([Run(sequence, 1, 4)])
    flight = engine.launch(Run(sequence, 1, 3), accepted={sequence: 1})
    with pytest.raises(StateError) as caught:
        engine.manager.complete(flight.step, [0])
    assert str(caught.value) == ("complete() accepts 0 of 4 tokens, and what the spec keeps can take back 3 at most")
    engine.land(flight)
    engine.learn(sequence, 0)
    # Beside a state with pages for drafts there are as many of both.
    both = hybrid(State(), Checkpoint(3))
    other = both.open(range(1, 7))
    both.prefill(other)
    both.learn(other)
    both.run(Run(other, 1, 2), accepted={other: 3})
    both.learn(other)
    both.run(Run(other, 1, 2), accepted={other: 2})
    assert [held for _, held in both.used()] == [4, 4]
    engine.close(sequence)
    engine.drained()
