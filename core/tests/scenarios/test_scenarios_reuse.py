"""Scenarios of area B: prefix reuse and the life of a page. ``P`` is the number of tokens per block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_requests import manager_of

from kvist.errors import CapacityError, StateError
from kvist.manager import Run
from kvist.restore import RestorePolicy
from kvist.spec import History, Scope, State, Window
from kvist.testing.engine import MIXES, Engine, held_blocks, shared_length
from kvist.testing.values import tokens

BLOCKS = [1, 2, 4, 7]
STATES = {"state", "history+state", "window+state", "history+windows+state"}


# 5. A wholly cached prompt


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mix", MIXES)
def test_a_wholly_cached_prompt_leaves_a_token_to_compute(mix: str, block: int) -> None:
    """5: all of the prompt but its last token is reused, in groups with states all but what follows the last whole
    block before it; the chain of published blocks has no break afterwards."""
    for length in (1, block, block + 1, 3 * block - 1, 3 * block, 3 * block + 1):
        engine = Engine(manager_of(200, *MIXES[mix], block_tokens=block))
        assert engine.turn(range(length)) == 0
        again = engine.open(range(length))
        assert again.reused == ((length - 1) // block * block if mix in STATES else length - 1)
        engine.prefill(again)
        engine.extend(again, range(length, length + block))
        engine.prefill(again)
        engine.close(again)
        assert engine.probe(range(length + block), 50) == length + block
        engine.drained()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mix", MIXES)
def test_recomputing_a_cached_prompt_leaves_its_other_readers_alone(mix: str, block: int) -> None:
    """5: as above while another request reads the same pages; both go on with different tokens and stay clean."""
    engine = Engine(manager_of(200, *MIXES[mix], block_tokens=block))
    prompt = range(2 * block)
    engine.turn(prompt)
    reader = engine.open(prompt, 70)
    engine.prefill(reader)
    again = engine.open(prompt)
    engine.prefill(again)
    for number in range(2 * block + 1):
        engine.extend(reader, 200 + number)
        engine.extend(again, 300 + number)
        engine.run(Run(reader, 1), Run(again, 1))
    engine.close(reader, again)
    assert engine.probe(prompt, 70, range(200, 201 + 2 * block), 0) == 4 * block + 2
    assert engine.probe(prompt, range(300, 301 + 2 * block), 0) == 4 * block + 1
    engine.drained()


# 6. Admission that fails half way


@pytest.mark.parametrize("block", BLOCKS)
def test_an_admission_that_lacks_pages_takes_nothing(block: int) -> None:
    """6 (a), (b): the hit of the request itself does not count as free; a refusal leaves all counts as they were."""
    engine = Engine(manager_of(3, block_tokens=block))
    engine.turn(range(2 * block))
    assert engine.used() == [(2, 0)]
    # Four blocks never fit into three: refused before anything is claimed.
    with pytest.raises(CapacityError, match="never fit"):
        engine.manager.open(tokens(range(4 * block)))
    assert engine.used() == [(2, 0)]
    engine = Engine(manager_of(4, block_tokens=block))
    engine.turn(range(2 * block))
    other = engine.open(900)
    engine.prefill(other)
    request = engine.open(range(2 * block), range(500, 500 + 2 * block))
    assert request.reused == 2 * block
    plan = engine.manager.plan([Run(request, 2 * block)])
    assert [(each.needed, each.available) for each in plan.shortages] == [(2, 1)]
    engine.close(request)
    assert engine.used() == [(2, 1)]
    engine.turn(range(600, 600 + 3 * block))
    assert engine.probe(range(600, 600 + 3 * block), 0) == 3 * block
    engine.close(other)
    engine.drained()


@pytest.mark.parametrize("lacking", range(3))
@pytest.mark.parametrize("retentions", [(History(), Window(6)), (History(), State()), (History(), Window(6), State())])
def test_a_refused_plan_of_several_groups_takes_nothing_of_any(retentions: tuple, lacking: int) -> None:
    """6: whichever group lacks pages, and however many, no group gives any away."""
    groups = len(retentions)
    engine = Engine(manager_of(6 * groups, *retentions))
    engine.turn(range(1, 9))
    holder = engine.open(900)
    engine.run(Run(holder, 1))
    request = engine.open(range(1, 9), range(50, 58))
    assert request.reused == 8
    before = engine.manager.stats()
    # Far more than there is, and amounts that fit one group's share of the arena but not the sum.
    plan = engine.manager.plan([Run(request, 4 * (6 * groups + lacking))])
    assert not plan.fits
    with pytest.raises(CapacityError):
        plan.commit()
    assert engine.manager.stats() == before
    engine.audit()
    engine.prefill(request)
    engine.close(request, holder)
    engine.drained()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mix", ["history", "history+window", "history+state"])
def test_a_request_evicts_others_before_its_own_hit(mix: str, block: int) -> None:
    """6 (c): the hit is the oldest thing in the cache and stays all the same."""
    groups = len(MIXES[mix])
    # Just what the request needs, twice its hit.
    pages = {"history": 4, "history+window": 4 + 2 + -(-6 // block), "history+state": 4 + 3}[mix] + groups
    engine = Engine(manager_of(pages, *MIXES[mix], block_tokens=block))
    engine.turn(range(2 * block))
    while engine.manager.stats().groups[0].evicted == 0 and engine.probe(range(2 * block), 0) == 2 * block:
        # Fill the rest with younger content, without pushing the hit out.
        if sum(cached for cached, _ in engine.used()) + 2 * groups > pages:
            break
        start = 1000 + engine.manager.stats().steps * 50
        engine.turn(range(start, start + block))
    assert engine.probe(range(2 * block), 0) == 2 * block
    request = engine.open(range(2 * block), range(500, 500 + 2 * block))
    assert request.reused == 2 * block
    engine.prefill(request, chunk=block)
    engine.close(request)
    engine.drained()


@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_probe_saw_is_looked_up_again(block: int) -> None:
    """6 (d): an eviction between probe and open shortens the hit."""
    engine = Engine(manager_of(3, block_tokens=block))
    engine.turn(range(2 * block))
    assert engine.probe(range(2 * block), 9) == 2 * block
    engine.turn(range(700, 700 + 2 * block))
    assert engine.turn(range(2 * block), 9) == block


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_cancelled_ten_times_reserves_once(mix: str, ran: bool) -> None:
    """6 (e): the growth of a cancelled step is used by the next one; a state that may be overwritten is given up, and
    its sequence resumed."""
    engine = Engine(manager_of(80, *MIXES[mix]))
    sequence = engine.open(range(1, 9))
    engine.prefill(sequence)
    reserved = set()
    for _ in range(10):
        if sequence.suspended:
            engine.resume(sequence)
            engine.prefill(sequence)
        if sequence.known == sequence.computed:
            engine.learn(sequence)
        if ran:
            step = engine.launch(Run(sequence, 1)).step
        else:
            step = engine.manager.plan([Run(sequence, 1)]).commit()
        engine.manager.cancel(step, ran=ran)
        engine.audit()
        assert sequence.suspended == (ran and mix in STATES)
        reserved.add(tuple(held for _, held in engine.used()))
    assert len(reserved) <= 2
    if sequence.suspended:
        engine.resume(sequence)
    engine.prefill(sequence)
    # With states each attempt but the first begins with computing what the one before was to compute.
    assert sequence.computed == (18 if ran and mix in STATES else 9)
    engine.close(sequence)
    engine.drained()


# 7. Holes


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_eviction_page_by_page_never_leaves_a_hole(mix: str, block: int) -> None:
    """7: the end of a chain goes first. After each evicted block the hit is the rest from the front, clean, and
    positions where a group lacks what it requires are no hits."""
    # Restore points everywhere, so that sparse groups are no excuse for a short hit.
    groups = len(MIXES[mix])
    length, pages = 6 * block, 16 * groups
    engine = Engine(manager_of(pages, *MIXES[mix], block_tokens=block, restore=RestorePolicy(every_blocks=1)))
    engine.turn(range(length), chunk=block)
    before = engine.probe(range(length), 7)
    assert before == length
    for number in range(40):
        # Requests of one block each push the chain out step by step.
        start = 1000 + 10 * block * number
        engine.turn(range(start, start + block))
        now = engine.probe(range(length), 7)
        assert now <= before
        assert now % block == 0
        if now != before:
            # Reading all of it shows that it is clean; the request itself is an eviction and a use.
            reader = engine.open(range(now), 5000 + number)
            assert reader.reused == now
            engine.run(Run(reader, 1))
            engine.close(reader)
            before = engine.probe(range(length), 7)
        if not before:
            break
    engine.drained()


def test_a_group_that_loses_a_page_shortens_the_hit() -> None:
    """7: a page in the middle can go where a group is sparse; the positions that require it are no hits any more."""
    engine = Engine(manager_of(11, History(), Window(4), restore=RestorePolicy(every_blocks=1)))
    live = engine.open(range(1, 21))
    engine.prefill(live, chunk=4)
    assert [engine.probe(range(1, n + 1), 0) for n in (4, 8, 12, 16, 20)] == [4, 8, 12, 16, 20]
    # The history is held. What others need comes out of the windows' cached pages, inside the held run.
    other = engine.open(range(70, 74))
    engine.prefill(other)
    hits = [engine.probe(range(1, n + 1), 0) for n in (4, 8, 12, 16, 20)]
    assert hits[0] < 4
    assert hits == sorted(hits)
    assert all(hit <= n for hit, n in zip(hits, (4, 8, 12, 16, 20)))
    engine.decode(live, 1)
    engine.close(other, live)
    engine.drained()


# 8. Publishing happens when content is computed


@pytest.mark.parametrize("chunk", [3, 4, 9])
@pytest.mark.parametrize("mix", MIXES)
def test_requests_planned_together_do_not_hit_each_other(mix: str, chunk: int) -> None:
    """8: the second finds nothing before the first has computed it, and nothing of it when the first is aborted."""
    engine = Engine(manager_of(80, *MIXES[mix]))
    first, second = engine.open(range(1, 10)), engine.open(range(1, 10))
    assert (first.reused, second.reused) == (0, 0)
    step = engine.manager.plan([Run(first, chunk), Run(second, chunk)]).commit()
    assert engine.probe(range(1, 10)) == 0
    engine.manager.cancel(step, ran=False)
    engine.close(first)
    assert engine.probe(range(1, 10)) == 0
    engine.prefill(second, chunk=chunk)
    engine.close(second)
    assert engine.probe(range(1, 10)) == 8
    assert engine.turn(range(1, 10)) == 8
    engine.drained()


@pytest.mark.parametrize("mix", MIXES)
def test_an_aborted_step_publishes_only_what_it_had_computed_before(mix: str) -> None:
    """8: an abort in the middle of a prefill keeps the chunks that are done and no token of the one in flight."""
    engine = Engine(manager_of(80, *MIXES[mix]))
    sequence = engine.open(range(1, 18))
    engine.run(Run(sequence, 8))
    flight = engine.launch(Run(sequence, 9))
    engine.manager.close(sequence)
    engine.manager.cancel(flight.step, ran=True)
    engine.audit()
    assert sequence.closed
    # A state may have been overwritten; where it was not kept at 8, nothing of it is found.
    assert engine.probe(range(1, 18)) in ({0, 8} if mix in STATES else {8})
    engine.turn(range(1, 18))
    engine.drained()


@pytest.mark.parametrize("mix", MIXES)
def test_equal_requests_side_by_side_keep_one_copy(mix: str) -> None:
    """8, ru-05: both computed the same; whole blocks are kept once, and the two go on with tokens of their own."""
    engine = Engine(manager_of(120, *MIXES[mix]))
    pair = [engine.open(range(1, 11)) for _ in range(3)]
    engine.prefill(*pair)
    for number in range(9):
        for which, sequence in enumerate(pair):
            engine.extend(sequence, 50 * which + number)
        engine.run(*(Run(sequence, 1) for sequence in pair))
    if mix.startswith("history"):
        # Blocks 0 and 1 are shared; from block 2 on they differ.
        assert engine.manager.stats().groups[0].held == 2 + 3 * 3
    engine.close(*pair)
    for which in range(3):
        assert engine.probe(range(1, 11), range(50 * which, 50 * which + 9), 999) == 19
    engine.drained()


# 10. A part of a block


@pytest.mark.parametrize("block", [2, 5])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("retentions", [(History(),), (History(), Window(3)), (Window(5, sinks=1),)])
def test_a_branch_inside_a_block_gets_a_copy(retentions: tuple, live: bool, block: int) -> None:
    """10: for every position at which a prompt can leave a cached one, the cached pages keep their bytes."""
    for parting in range(2 * block + 1):
        engine = Engine(manager_of(120, *retentions, block_tokens=block))
        first = engine.open(range(2 * block))
        engine.prefill(first)
        if not live:
            engine.close(first)
        second = engine.open(range(parting), 900, 901)
        if len(retentions) == 1 and isinstance(retentions[0], History):
            # The open block of a running request is not published; all others are whole.
            assert second.reused == parting
        assert second.reused <= parting
        engine.prefill(second)
        engine.extend(second, range(902, 902 + block))
        engine.prefill(second, chunk=2)
        if live:
            engine.decode(first, block + 1)
            engine.close(first)
        engine.close(second)
        # Reading the first one again shows that nothing of it was written over.
        engine.turn(range(2 * block), 50)
        engine.turn(range(parting), 900, 901, range(902, 902 + block), 51)
        engine.drained()


def test_a_whole_block_is_shared_and_not_copied() -> None:
    """10, last variant."""
    engine = Engine(manager_of(12))
    first = engine.open(range(1, 9))
    engine.prefill(first)
    second = engine.open(1, 2, 3, 4, 9)
    step = engine.run(Run(second, 1))
    assert step.tables[0][second.slot, 0] == step.tables[0][first.slot, 0]
    assert not len(step.copies[0])
    assert held_blocks(second, step, 0) == [0, 1]


@pytest.mark.parametrize("gone", ["closed", "evicted", "cleared"])
def test_the_source_of_a_copy_may_go_once_the_copy_is_ordered(gone: str) -> None:
    """10: the source is given to somebody else while the step runs; steps run in order, so the copy is clean."""
    engine = Engine(manager_of(5))
    engine.turn(range(1, 9))
    branch = engine.open(1, 2, 3, 4, 5, 6, 90, 91)
    assert branch.reused == 6
    first = engine.launch(Run(branch, 2))
    if gone == "cleared":
        engine.manager.clear()
    if gone != "closed":
        other = engine.open(range(60, 72))
        second = engine.launch(Run(other, 12))
        engine.land(first)
        engine.land(second)
        engine.close(other)
    else:
        engine.land(first)
    engine.decode(branch, 2)
    engine.close(branch)
    engine.drained()


# 12. Clearing


@pytest.mark.parametrize("mix", MIXES)
def test_clearing_ends_and_a_second_time_does_nothing(mix: str) -> None:
    """12: namespaces that never had a block, or whose first allocation failed, do not keep it busy."""
    engine = Engine(manager_of(10 * len(MIXES[mix]), *MIXES[mix]))
    for number in range(5):
        # Opened and aborted; planned and cancelled; refused for lack of pages.
        scope = Scope(salt=str(number))
        engine.close(engine.open(range(1, 5), scope=scope))
        sequence = engine.open(range(1, 5), scope=scope)
        engine.manager.cancel(engine.manager.plan([Run(sequence, 4)]).commit())
        if sequence.suspended:
            engine.resume(sequence)
        # A state alone takes one page, however long the run.
        assert engine.manager.plan([Run(sequence, 4 * 100)]).fits == (mix == "state")
        engine.close(sequence)
    engine.turn(range(1, 9))
    cached = tuple(group.cached for group in engine.manager.stats().groups)
    cleared = engine.manager.clear()
    engine.audit()
    assert cleared.freed == cached
    assert set(cleared.held) == {0}
    assert engine.manager.stats().extents == 0
    assert set(engine.manager.clear().freed) == {0}
    engine.drained()


@pytest.mark.parametrize("mix", MIXES)
def test_clearing_around_a_live_request(mix: str) -> None:
    """12, st-09: the cached part goes, what the request holds stays valid, is said to be held, and goes once later.

    This design does not refuse to clear while sequences are open: a change of weights cannot wait.
    """
    engine = Engine(manager_of(40 * len(MIXES[mix]), *MIXES[mix]))
    engine.turn(range(1, 21))
    live = engine.open(range(1, 21), range(30, 33))
    waiting = engine.open(range(1, 21), 40)
    engine.run(Run(live, 2))
    flying = engine.launch(Run(live, 1))
    cleared = engine.manager.clear()
    engine.audit()
    assert cleared.held == tuple(group.held for group in engine.manager.stats().groups)
    assert engine.probe(range(1, 21), 40) == 0
    engine.land(flying)
    engine.decode(live, 9)
    engine.prefill(waiting)
    assert engine.turn(range(1, 21), range(30, 33)) == 0
    engine.close(live, waiting)
    assert all(group.held == 0 for group in engine.manager.stats().groups)
    # Only what the request after clearing computed is found.
    assert engine.probe(range(1, 21), range(30, 33)) >= 20
    engine.drained()


# 13. Releasing twice


def finish_then_abort(engine: Engine, sequence) -> None:
    engine.close(sequence)
    engine.close(sequence)


def abort_then_finish(engine: Engine, sequence) -> None:
    flight = engine.launch(Run(sequence, 1))
    engine.close(sequence, sequence)
    engine.land(flight)
    engine.close(sequence)


def preempt_then_finish(engine: Engine, sequence) -> None:
    engine.suspend(sequence)
    engine.suspend_again = engine.manager.suspend(sequence)
    engine.close(sequence)


def finish_then_preempt(engine: Engine, sequence) -> None:
    engine.close(sequence)
    for call in (engine.manager.suspend, engine.manager.resume, engine.manager.fork):
        with pytest.raises(StateError, match="closed sequence"):
            call(sequence)
    with pytest.raises(StateError, match="closed sequence"):
        engine.manager.truncate(sequence, 1)


@pytest.mark.parametrize("ending", [finish_then_abort, abort_then_finish, preempt_then_finish, finish_then_preempt])
@pytest.mark.parametrize("mix", MIXES)
def test_a_victim_that_has_ended_already(mix: str, ending: Callable[..., None]) -> None:
    """13: the second release does nothing or is a typed error, and no page is handed out twice."""
    engine = Engine(manager_of(12 * len(MIXES[mix]), *MIXES[mix]))
    first, second = engine.open(range(1, 9)), engine.open(range(21, 29))
    engine.prefill(first, second)
    engine.learn(first)
    engine.learn(second)
    ending(engine, first)
    assert first.closed
    engine.run(Run(second, 1))
    new = [engine.open(60), engine.open(70)]
    step = engine.run(*(Run(sequence, 1) for sequence in new))
    for group in range(len(MIXES[mix])):
        pages = [int(step.tables[group][sequence.slot, 0]) for sequence in new]
        assert pages[0] != pages[1]
        assert set(pages).isdisjoint(step.tables[group][second.slot].tolist())
    engine.close(second, *new)
    engine.drained()


def test_a_closed_slot_belongs_to_its_next_owner() -> None:
    """13, im-01, im-02: a closed sequence's table row is reused; nothing done with the old handle reaches it."""
    engine = Engine(manager_of(12))
    old = engine.open(range(1, 9))
    engine.prefill(old)
    engine.close(old)
    new = engine.open(range(51, 59))
    assert new.slot == old.slot
    step = engine.run(Run(new, 8))
    row = step.tables[0][new.slot].tolist()
    engine.close(old)
    with pytest.raises(StateError):
        engine.manager.plan([Run(old, 1)])
    with pytest.raises(StateError):
        old.extend([1])
    assert step.tables[0][new.slot].tolist() == row
    engine.decode(new, 1)
    engine.close(new)
    engine.drained()


# The whole kind at once


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seed", range(2))
def test_reuse_of_a_history_is_the_longest_prefix_ever_computed(block: int, seed: int) -> None:
    """5, 7, 8, 10, ru-01, ru-13: with room for everything, a brute-force search says what is reused, token by token."""
    rng = np.random.default_rng([seed, block])
    engine = Engine(manager_of(1500, block_tokens=block))
    past: list[np.ndarray] = []
    for _ in range(30):
        length = int(rng.integers(1, 24))
        text = rng.integers(0, 2, length)
        if past and rng.random() < 0.7:
            text = np.concatenate([past[rng.integers(len(past))], text])[: int(rng.integers(1, 30))]
        expected = min(len(text) - 1, max((shared_length(text, old) for old in past), default=0))
        assert engine.turn(*text.tolist(), chunk=int(rng.integers(1, 12))) == expected
        past.append(text)
    engine.drained()
