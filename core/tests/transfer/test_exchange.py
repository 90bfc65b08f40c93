"""What a manager keeps for another process, and what it takes in from one: by value, with junk in every free page."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import CapacityError, RequestError, StateError
from kvist.manager import PagedCacheManager, Run
from kvist.spec import History, Scope, State, Window
from kvist.testing.engine import MIXES, Engine
from kvist.testing.values import make_layout, make_spec, tokens

BLOCK = 4
MIXES = {**MIXES, "ring": (Window(3, ring=4),)}
each_mix = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


def engine(mix, pages=60, seed=0, **options):
    return Engine(PagedCacheManager(make_layout(make_spec(BLOCK, *mix), pages), **options), seed)


def computed(source, length, chunk=5):
    """A sequence with ``length`` computed tokens."""
    sequence = source.open(range(length))
    source.prefill(sequence, chunk=chunk)
    return sequence


def copy(source, target, hold, landing):
    """What a transfer does: every page that is wanted."""
    for group in range(len(hold.pages)):
        for there, here in zip(hold.pages[group].tolist(), landing.pages[group].tolist()):
            if here > 0:
                assert there > 0, "wanted, and not there"
                target.values.whole[group][here] = source.values.whole[group][there]


def land(target, length, more=0, scope=None):
    options = {} if scope is None else {"scope": scope}
    landing = target.manager.land(tokens(range(length + more)), length=length, **options)
    target.texts[id(landing.sequence)] = tokens(range(length + more))
    target.audit()
    return landing


def arrive(source, target, hold, landing):
    copy(source, target, hold, landing)
    sequence = target.manager.landed(landing)
    target.audit()
    return sequence


@each_mix
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13, 16, 17])
def test_a_sequence_goes_on_elsewhere(mix, length):
    source, target = engine(mix), engine(mix, seed=1)
    hold = source.manager.hand_over(computed(source, length))
    source.audit()
    assert source.manager.stats().open_sequences == 0
    sequence = arrive(source, target, hold, land(target, length))
    hold.release()
    hold.release()
    source.audit()
    assert (sequence.computed, sequence.known, sequence.received, sequence.reused) == (length, length, length, 0)
    target.decode(sequence, 9)
    target.close(sequence)
    source.drained()
    stats = target.manager.stats()
    assert (stats.requests, stats.prompt_tokens, stats.received_tokens) == (1, length, length)
    target.drained()


@each_mix
def test_pages_stay_while_somebody_reads_them(mix):
    # The source computes and closes other requests until everything that nobody holds has been reused.
    source, target = engine(mix, pages=24), engine(mix, pages=24, seed=1)
    hold = source.manager.hand_over(computed(source, 14))
    for number in range(8):
        source.turn(range(1000 * (number + 1), 1000 * (number + 1) + 20))
    source.manager.clear()
    source.turn(range(5000, 5020))
    sequence = arrive(source, target, hold, land(target, 14))
    target.decode(sequence, 5)
    hold.release()
    source.audit()
    source.drained()


@each_mix
@pytest.mark.parametrize("cached", [0, 3, 4, 7, 8, 12, 13, 14, 15, 16, 20])
def test_what_is_cached_is_not_asked_for(mix, cached):
    length = 14
    source, target = engine(mix), engine(mix, seed=1)
    if cached:
        target.turn(range(cached), chunk=4)
    hold = source.manager.hand_over(computed(source, length))
    landing = land(target, length, more=1)
    whole = min(cached, length) // BLOCK
    for group, pages in zip(target.manager.layout.groups, landing.pages):
        if not group.exact and not group.sparse:
            assert (pages[:whole] == -1).all()
            assert (pages[whole:] > 0).all() or landing.complete
        # What is read after the prompt, and by the same prompt sent again, which computes its last token.
        live = {
            block
            for end in (length - 1, length)
            for low, high in group.retention.live(end, BLOCK)
            for block in range(low, high)
        }
        assert group.exact or not group.sparse or set(np.flatnonzero(pages > 0).tolist()) <= live
    sequence = arrive(source, target, hold, landing)
    assert sequence.computed == length and sequence.received + sequence.reused == length
    target.decode(sequence, 6)
    target.close(sequence)
    hold.release()
    source.drained()
    target.drained()


def test_all_of_it_is_cached():
    # Both whole blocks and the open one: nothing is asked for, and nothing comes.
    target = engine(MIXES["history"])
    target.turn(range(15))
    landing = land(target, 14, more=1)
    assert landing.complete
    sequence = target.manager.landed(landing)
    assert (sequence.reused, sequence.received) == (14, 0)
    target.decode(sequence, 4)


@each_mix
def test_what_has_arrived_is_found_by_others_and_not_before(mix):
    source, target = engine(mix), engine(mix, seed=1)
    hold = source.manager.hand_over(computed(source, 17))
    landing = land(target, 17)
    assert target.probe(range(17)) == 0
    sequence = arrive(source, target, hold, landing)
    if not any(isinstance(retention, State) for retention in mix):
        assert target.probe(range(17)) == 16
    target.decode(sequence, 1)
    target.close(sequence)
    assert target.turn(range(19)) >= (0 if any(isinstance(retention, State) for retention in mix) else 16)


@pytest.mark.parametrize("window", [Window(4), Window(3, ring=4)], ids=str)
def test_windows_that_arrive_beside_a_known_history_are_found(window):
    """Others have computed more, and kept windows at their own end only."""
    source, target = engine((History(), window)), engine((History(), window), seed=1)
    target.turn(range(30))
    assert target.probe([*range(12), 99]) < 12
    hold = source.manager.hand_over(computed(source, 12))
    landing = land(target, 12, more=1)
    assert [pages.tolist() for pages in landing.pages[:1]] == [[-1, -1, -1]]
    assert landing.pages[1].tolist()[:2] == [-1, -1] and landing.pages[1][2] > 0
    # With what is cached here: all of the history, and of windows what is to come.
    assert (landing.tables[0] > 0).all() and landing.tables[1].tolist() == landing.pages[1].tolist()
    sequence = arrive(source, target, hold, landing)
    assert target.probe([*range(12), 99]) == 12
    target.decode(sequence, 3)
    target.close(sequence)
    assert target.turn([*range(12), *range(90, 99)]) == 12
    hold.release()
    source.drained()
    target.drained()


@each_mix
def test_what_does_not_arrive_leaves_nothing_behind(mix):
    source, target = engine(mix), engine(mix, seed=1)
    target.turn(range(8), chunk=4)
    before = target.used()
    hold = source.manager.hand_over(computed(source, 17))
    landing = land(target, 17)
    # Some of it was written, then the transfer failed.
    target.values.whole[0][landing.pages[0][landing.pages[0] > 0][-1:]] = -77
    kept = target.manager.give_up(landing)
    target.audit()
    assert landing.sequence.closed
    # Nobody may have the pages yet: a write may still come.
    held = [pages[pages > 0] for pages in landing.pages]
    for group, pages in enumerate(held):
        assert not np.isin(pages, target.manager.free_pages(group)).any()
    kept.release()
    target.audit()
    assert [cached + held for cached, held in target.used()] == [cached + held for cached, held in before]
    assert target.probe(range(17)) <= 8
    # The same request computes it here.
    target.turn(range(17))
    hold.release()
    target.drained()


def test_a_landing_without_room():
    target = engine(MIXES["history+window"], pages=20)
    sequence = computed(target, 30)
    before = target.used()
    with pytest.raises(CapacityError) as error:
        land(target, 29, scope=Scope(salt="other"))
    assert str(error.value) == "no room now for 29 tokens from another process\nhint: close a sequence first"
    target.audit()
    assert target.used() == before
    target.close(sequence)
    target.manager.give_up(land(target, 29, scope=Scope(salt="other"))).release()


def test_a_landing_evicts_what_nobody_holds():
    source, target = engine(MIXES["history"], pages=10), engine(MIXES["history"], pages=10, seed=1)
    target.turn(range(500, 536))
    hold = source.manager.hand_over(computed(source, 30))
    target.decode(arrive(source, target, hold, land(target, 30)), 3)


def test_the_same_tokens_arrive_while_they_are_computed():
    # Both end with one copy of each whole block.
    source, target = engine(MIXES["history+window"]), engine(MIXES["history+window"], seed=1)
    hold = source.manager.hand_over(computed(source, 17))
    landing = land(target, 17)
    other = computed(target, 17)
    sequence = arrive(source, target, hold, landing)
    target.decode(sequence, 2)
    target.decode(other, 2)
    assert target.used()[0][1] == 4 + 2 * 1
    target.close(sequence, other)
    target.drained()


def test_clearing_while_it_arrives():
    source, target = engine(MIXES["history+windows+state"]), engine(MIXES["history+windows+state"], seed=1)
    target.turn(range(8))
    hold = source.manager.hand_over(computed(source, 17))
    landing = land(target, 17)
    target.manager.clear()
    target.audit()
    sequence = arrive(source, target, hold, landing)
    target.decode(sequence, 3)
    assert target.probe(range(17)) == 0
    target.close(sequence)
    target.drained()


def test_scopes_stay_apart():
    target = engine(MIXES["history"])
    target.turn(range(16))
    landing = land(target, 16, scope=Scope(salt="other"))
    assert (landing.pages[0] > 0).all()
    target.manager.give_up(landing).release()


def test_pages_of_transfers_stay_where_they_are():
    # Groups of unequal pages: making room for the large states moves the few small pages that lie in the way, but none
    # that another process reads or writes.
    target = Engine(PagedCacheManager(make_layout(make_spec(BLOCK, History(), State(), widths=[4, 256]), 11)), 1)
    manager, memory, rng = target.manager, target.values.whole, np.random.default_rng(0)
    landing = land(target, 9, scope=Scope(salt="landing"))
    hold = manager.hand_over(computed(target, 6))
    for number, (group, pages) in enumerate(enumerate(landing.pages)):
        memory[group][pages] = 10**6 + number
    watched = [(group, pages) for each in (landing, hold) for group, pages in enumerate(each.pages)]
    before = [memory[group][pages].copy() for group, pages in watched]
    running = []
    for number in range(120):
        length = int(rng.integers(1, 40))
        sequence = target.open(range(100 * number + 100, 100 * number + 100 + length))
        if manager.plan([Run(sequence, length)]).fits:
            target.prefill(sequence)
            running.append(sequence)
        else:
            target.close(sequence)
        while running and (len(running) > 4 or rng.random() < 0.4):
            target.close(running.pop(int(rng.integers(len(running)))))
    assert manager.stats().groups[0].moved > 0
    for (group, pages), content in zip(watched, before):
        assert np.array_equal(memory[group][pages], content)
    target.close(*running)
    manager.give_up(landing).release()
    hold.release()
    target.drained()


def test_what_cannot_be_done_with_it_meanwhile():
    target = engine(MIXES["history"])
    landing = land(target, 9)
    sequence = landing.sequence
    manager = target.manager
    for call in (manager.suspend, manager.resume, manager.fork, manager.hand_over, manager.load):
        with pytest.raises(StateError) as error:
            call(sequence)
        assert str(error.value) == (
            f"{call.__name__}() of a sequence whose rows are on their way from another process\n"
            "hint: wait for its transfer to end, then call landed() or give_up()"
        )
    with pytest.raises(StateError):
        manager.truncate(sequence, 3)
    with pytest.raises(StateError) as error:
        manager.plan([Run(sequence, 1)])
    assert str(error.value) == (
        "plan() of a sequence that is arriving\nhint: wait for its transfer, then call landed()"
    )
    with pytest.raises(StateError) as error:
        manager.decode_batch().join(sequence)
    assert str(error.value) == (
        "join() of a sequence that is arriving\nhint: wait for its transfer, then call landed()"
    )
    with pytest.raises(StateError) as error:
        manager.close(sequence)
    assert str(error.value) == (
        "close() of a sequence whose rows are on their way from another process\n"
        "hint: give_up() its landing; the pages stay until nobody writes to them any more"
    )
    manager.give_up(landing).release()
    for call in (manager.landed, manager.give_up):
        with pytest.raises(StateError) as error:
            call(landing)
        assert "of a landing that is over" in str(error.value) or "another manager's" in str(error.value)
    for length in (0, 10):
        with pytest.raises(RequestError) as error:
            manager.land(tokens(range(9)), length=length)
        assert str(error.value) == f"land() of {length} of 9 tokens"


def test_what_cannot_be_handed_over():
    source = engine(MIXES["history"])
    sequence = source.open(range(9))
    with pytest.raises(StateError) as error:
        source.manager.hand_over(sequence)
    assert str(error.value) == (
        "hand_over() of a sequence that has computed nothing, is suspended or loading\n"
        "hint: complete a step of it first"
    )
    source.prefill(sequence)
    child = source.fork(sequence)
    with pytest.raises(StateError) as error:
        source.manager.hand_over(child)
    assert str(error.value) == (
        "hand_over() of a sequence whose pages a step that is still to run copies\nhint: complete that step first"
    )
    source.decode(sequence, 1)
    source.manager.hand_over(child).release()
    source.close(sequence)
    source.drained()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@each_mix
def test_random_traffic_between_two_managers(mix, seed):
    rng = np.random.default_rng(seed)
    source, target = engine(mix, pages=48, seed=seed), engine(mix, pages=40, seed=seed + 1)
    flying, running = [], []
    for _ in range(30):
        start = int(rng.integers(0, 3)) * 1000
        length = int(rng.integers(1, 20))
        sequence = source.open(range(start, start + length))
        source.prefill(sequence, chunk=int(rng.integers(1, 8)))
        hold = source.manager.hand_over(sequence)
        source.audit()
        try:
            landing = target.manager.land(tokens(range(start, start + length)))
        except CapacityError:
            hold.release()
            target.close(*running)
            running = []
        else:
            target.texts[id(landing.sequence)] = tokens(range(start, start + length))
            flying.append((hold, landing))
        while flying and (rng.random() < 0.5 or len(flying) > 3):
            hold, landing = flying.pop(int(rng.integers(len(flying))))
            if rng.random() < 0.3:
                target.manager.give_up(landing).release()
            else:
                running.append(arrive(source, target, hold, landing))
            hold.release()
            target.audit()
            source.audit()
        for sequence in running:
            if rng.random() < 0.5 and target.manager.plan([Run(sequence, 1)]).fits:
                target.decode(sequence, 1)
        if len(running) > 3:
            target.close(running.pop(0))
    for hold, landing in flying:
        target.manager.give_up(landing).release()
        hold.release()
    target.close(*running)
    source.drained()
    target.drained()
