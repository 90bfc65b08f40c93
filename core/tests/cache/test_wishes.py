"""Wishes: what goes first is what nobody wishes to keep, and what fits never depends on it."""

from __future__ import annotations

import numpy as np
import pytest
from cache_requests import P, cached, compute, manager_of

from kvist.errors import RequestError
from kvist.manager import PagedCacheManager, Run
from kvist.policies import Candidates, LeastRecentlyUsed, ReuseRate
from kvist.prefix.extent import Extent
from kvist.restore import RestorePolicy
from kvist.spec import History, Window
from kvist.testing.values import tokens
from kvist.wishes import FOREVER, NO_WISH, Wish, Wishes, strongest

HIGH, LOW = Wish(5), Wish(-5)


def all_of(wish: Wish) -> Wishes:
    return Wishes(((0, FOREVER, wish),), output=wish)


def reusable(manager: PagedCacheManager, *parts: int | range) -> int:
    """Tokens of a prompt that are there, its last one left out."""
    return manager.probe(np.append(tokens(*parts), 999))


def flood(manager: PagedCacheManager, blocks: int, first: int = 10_000) -> None:
    """Other requests, of two blocks each."""
    for number in range(blocks // 2):
        cached(manager, range(first + 100 * number, first + 100 * number + 2 * P))


@pytest.mark.parametrize("policy", [None, LeastRecentlyUsed, ReuseRate])
def test_what_has_a_higher_priority_survives(policy) -> None:
    manager = manager_of(12, eviction=policy and policy())
    cached(manager, range(1, 9), wishes=all_of(HIGH))
    cached(manager, range(21, 29))
    flood(manager, 40)
    assert reusable(manager, range(1, 9)) == 8
    assert reusable(manager, range(21, 29)) == 0


@pytest.mark.parametrize("policy", [None, LeastRecentlyUsed, ReuseRate])
def test_what_has_a_lower_priority_goes_first(policy) -> None:
    manager = manager_of(6, eviction=policy and policy())
    cached(manager, range(1, 9))
    cached(manager, range(21, 29), wishes=all_of(LOW))
    cached(manager, range(31, 39))
    cached(manager, range(41, 45))
    assert [reusable(manager, range(first, first + 8)) for first in (1, 21, 31)] == [8, 4, 8]


def test_equal_priorities_go_by_their_last_use() -> None:
    manager = manager_of(6)
    for first in (1, 21, 31):
        cached(manager, range(first, first + 8), wishes=all_of(HIGH))
    cached(manager, range(1, 9))
    cached(manager, range(41, 49))
    assert [reusable(manager, range(first, first + 8)) for first in (1, 21, 31)] == [8, 0, 8]


def test_a_priority_ends_with_its_lifetime() -> None:
    """The clock counts the tokens of all requests, here 8 each; a use begins a new lifetime."""
    manager = manager_of(6)
    cached(manager, range(1, 9), wishes=all_of(Wish(5, lifetime_tokens=20)))
    flood(manager, 6)
    assert reusable(manager, range(1, 9)) == 8
    flood(manager, 2, 5000)
    assert reusable(manager, range(1, 9)) == 0
    # With every use it lives on.
    manager = manager_of(6)
    cached(manager, range(1, 9), wishes=all_of(Wish(5, lifetime_tokens=20)))
    for turn in range(5):
        flood(manager, 4, 1000 * (turn + 2))
        assert reusable(manager, range(1, 9)) == 8
        cached(manager, range(1, 10))
    # A low one ends as well: then the oldest goes.
    for lifetime, left in ((6, [0, 8, 8]), (FOREVER, [8, 0, 8])):
        manager = manager_of(6)
        cached(manager, range(1, 9))
        cached(manager, range(21, 29), wishes=all_of(Wish(-5, lifetime)))
        cached(manager, range(31, 39))
        cached(manager, range(41, 49))
        assert [reusable(manager, range(first, first + 8)) for first in (1, 21, 31)] == left


def test_a_range_of_a_prompt_survives_alone() -> None:
    """The first three blocks of six, and of a block that is in both ranges all."""
    manager = manager_of(12)
    cached(manager, range(1, 25), wishes=Wishes(((0, 10, HIGH),)))
    flood(manager, 40)
    assert reusable(manager, range(1, 25)) == 12


def test_what_is_generated_has_a_wish_of_its_own() -> None:
    manager = manager_of(12)
    sequence = manager.open(tokens(range(1, 9)), wishes=Wishes(((0, 8, HIGH),), output=LOW))
    compute(manager, sequence)
    for token in range(9, 21):
        sequence.extend([token])
        compute(manager, sequence)
    manager.close(sequence)
    # One extent of the prompt, one of all that was generated.
    assert manager.stats().extents == 2
    cached(manager, range(31, 39))
    flood(manager, 8)
    assert reusable(manager, range(1, 21)) == 8


def test_a_shared_prefix_has_the_strongest_wish() -> None:
    manager = manager_of(24)
    cached(manager, range(1, 17), wishes=all_of(LOW))
    cached(manager, range(1, 9), range(21, 25), wishes=all_of(HIGH))
    # Weaker wishes and none leave it as it is.
    cached(manager, range(1, 9), range(31, 35), wishes=all_of(Wish(1)))
    cached(manager, range(1, 9), range(41, 45))
    assert priorities(manager, range(1, 17)) == [5, 5, -5, -5]
    assert priorities(manager, range(1, 9), range(21, 25)) == [5, 5, 5]
    assert priorities(manager, range(1, 9), range(31, 35)) == [5, 5, 1]
    # To be of use to a request without wishes is no reason to go first.
    cached(manager, range(1, 17), 50)
    assert priorities(manager, range(1, 17)) == [5, 5, 0, 0]


def test_what_two_requests_compute_at_once_has_the_strongest_wish() -> None:
    manager = manager_of(24)
    first = manager.open(tokens(range(1, 13)), wishes=all_of(HIGH))
    second = manager.open(tokens(range(1, 13)), wishes=Wishes(((0, 12, LOW), (4, 8, Wish(7)))))
    manager.complete(manager.plan([Run(first, 12), Run(second, 12)]).commit())
    manager.check()
    assert priorities(manager, range(1, 13)) == [5, 7, 5]
    manager.close(first)
    manager.close(second)
    manager.check()


def test_an_open_block_that_is_filled_by_another_request() -> None:
    """The block is the filler's too; what lies before it keeps its wish."""
    manager = manager_of(24)
    cached(manager, range(1, 7), wishes=all_of(LOW))
    cached(manager, range(1, 13), wishes=Wishes(((4, 12, HIGH),)))
    assert priorities(manager, range(1, 13)) == [0, 5, 5]
    manager.check()
    # And with nothing before it.
    cached(manager, 61, 62)
    cached(manager, range(61, 69), wishes=all_of(HIGH))
    assert priorities(manager, range(61, 69)) == [5, 5]
    manager.check()


def test_wishes_bind_nobody_who_needs_the_room() -> None:
    """Everything has the highest priority, and a request that needs all of it gets it."""
    manager = manager_of(8)
    for first in (1, 21, 41):
        cached(manager, range(first, first + 8), wishes=all_of(Wish(10)))
    sequence = manager.open(tokens(range(100, 132)), wishes=all_of(LOW))
    assert manager.plan([Run(sequence, 32)]).fits
    assert manager.capacity().tokens == 32
    compute(manager, sequence)
    manager.close(sequence)


def test_pages_of_windows_inside_held_runs_go_by_priority() -> None:
    """Where leaves are not enough, what is cached beside held content goes, of the least wished for first."""

    def lost(first: Wish, second: Wish) -> list[bool]:
        manager = manager_of(16, History(), Window(4), restore=RestorePolicy(every_blocks=1))
        sequences = []
        for begin, wish in ((1, first), (51, second)):
            sequence = manager.open(tokens(range(begin, begin + 12)), wishes=all_of(wish))
            compute(manager, sequence)
            sequence.extend([99])
            compute(manager, sequence)
            sequences.append(sequence)
        before = window_pages(manager)
        third = manager.open(tokens(range(100, 104)))
        compute(manager, third)
        after = window_pages(manager)
        return [after[begin] < before[begin] for begin in (1, 51)]

    assert lost(HIGH, NO_WISH) == [False, True]
    assert lost(NO_WISH, HIGH) == [True, False]


def window_pages(manager: PagedCacheManager) -> dict[int, int]:
    """Published pages of the window, by the first token of the path."""
    found: dict[int, int] = {}
    for extent in manager._tree.extents():
        node = extent
        while node.parent.parent is not None:
            node = node.parent
        first = int(node.tokens[0])
        found[first] = found.get(first, 0) + int(np.count_nonzero(extent.pages[1] >= 0))
    return found


def test_forks_have_the_wishes_of_their_parent() -> None:
    manager = manager_of(24)
    parent = manager.open(tokens(range(1, 9)), wishes=Wishes(output=HIGH))
    early = manager.fork(parent)
    compute(manager, parent)
    late = manager.fork(parent)
    compute(manager, early)
    for child, token in ((early, 50), (late, 60)):
        child.extend(range(token, token + 8))
        compute(manager, child)
        manager.close(child)
        assert priorities(manager, range(1, 9), range(token, token + 8)) == [0, 0, 5, 5]


def test_a_sequence_that_was_suspended_wishes_on() -> None:
    manager = manager_of(12)
    sequence = manager.open(tokens(range(1, 13)), wishes=all_of(HIGH))
    compute(manager, sequence)
    manager.suspend(sequence)
    flood(manager, 40)
    assert manager.resume(sequence) == 12
    sequence.extend(range(13, 17))
    compute(manager, sequence)
    assert manager.truncate(sequence, 14) == 14
    sequence.extend(range(50, 53))
    compute(manager, sequence)
    manager.close(sequence)
    assert priorities(manager, range(1, 13), 13, 14, 50, 51) == [5, 5, 5, 5]


def test_without_wishes_nothing_is_asked() -> None:
    manager = manager_of(12)
    flood(manager, 40)
    assert not manager._tree.wished
    cached(manager, range(1, 9), wishes=Wishes())
    assert not manager._tree.wished


def test_a_score_is_exact_for_every_clock_and_priority() -> None:
    used = np.array([0, 1, 2**47, 2**47 + 1, 0, 2**47 + 1], np.int64)
    priority = np.array([-10, -10, -10, -10, 10, 10], np.int64)
    zeros = np.zeros(6, np.int64)
    scores = LeastRecentlyUsed().score(Candidates(used, zeros, zeros, zeros, priority), 2**47 + 5)
    assert (np.diff(scores) > 0).all()


def test_wrong_wishes_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        Wish(11)
    assert str(caught.value) == (
        "Wish(priority=11) is outside -10..10\nhint: only the order of priorities matters: use fewer of them"
    )
    with pytest.raises(RequestError) as caught:
        Wish(1, lifetime_tokens=0)
    assert str(caught.value) == "Wish(lifetime_tokens=0) must be at least 1\nhint: leave the wish out"
    with pytest.raises(RequestError) as caught:
        Wishes(((5, 5, HIGH),))
    assert str(caught.value) == "Wishes for the tokens 5 to 5 of a prompt: there are none"


def random_wishes(rng: np.random.Generator, length: int) -> Wishes:
    def one() -> Wish:
        return Wish(int(rng.integers(-2, 3)), int(rng.choice([5, 40, FOREVER])))

    ranges = []
    for _ in range(rng.integers(0, 4)):
        first = int(rng.integers(0, length + 4))
        ranges.append((first, first + int(rng.integers(1, length + 4)), one()))
    return Wishes(tuple(ranges), one() if rng.random() < 0.5 else NO_WISH)


def wish_of_block(wishes: Wishes, prompt_length: int, block: int, number: int) -> Wish:
    """Token by token."""
    found = []
    for position in range(number * block, (number + 1) * block):
        if position >= prompt_length:
            found.append(wishes.output)
        else:
            mine = [wish for first, stop, wish in wishes.prompt if first <= position < stop]
            found.append(max(mine, key=lambda wish: (wish.priority, wish.lifetime_tokens)) if mine else NO_WISH)
    return max(found, key=lambda wish: (wish.priority, wish.lifetime_tokens))


@pytest.mark.parametrize("block", [1, 3, 4])
def test_a_block_has_the_strongest_wish_of_its_tokens(block: int) -> None:
    rng = np.random.default_rng(block)
    for _ in range(200):
        length = int(rng.integers(1, 30))
        wishes = random_wishes(rng, length)
        found = wishes.by_block(length, block)
        assert found[0][0] == 0 and [begin for begin, _ in found] == sorted({begin for begin, _ in found})
        for number in range(length // block + 4):
            mine = [wish for begin, wish in found if begin <= number][-1]
            assert mine == wish_of_block(wishes, length, block, number)


def blocks_of(manager: PagedCacheManager) -> dict[tuple[int, ...], Extent]:
    """The extent of every block in the tree, whole or open, by all tokens up to its end."""
    block = manager.layout.block_tokens
    found: dict[tuple[int, ...], Extent] = {}
    for root in manager._tree.roots.values():
        stack: list = [(child, ()) for child in root.children.values()]
        while stack:
            extent, before = stack.pop()
            path = (*before, *extent.tokens.tolist())
            for end in [*range(extent.start + block, extent.end, block), extent.end]:
                found[path[:end]] = extent
            stack.extend((child, path) for child in extent.children.values())
    return found


def priorities(manager: PagedCacheManager, *parts: int | range) -> list[int]:
    text = tuple(tokens(*parts).tolist())
    known = blocks_of(manager)
    return [known[text[: end + P]].wish.priority for end in range(0, len(text) - P + 1, P)]


@pytest.mark.parametrize("seed", range(12))
def test_every_block_has_the_strongest_wish_of_all_its_users(seed: int) -> None:
    """Random requests that share beginnings, many at once, in a tight cache; a dictionary by token prefix says what
    each block should have, and nothing goes before what is wished for less."""
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 3, 4]))
    manager = manager_of(96 // block, block_tokens=block, eviction=LeastRecentlyUsed() if seed % 3 == 1 else None)
    tree = manager._tree
    expected: dict[tuple[int, ...], Wish] = {}
    running: list = []
    past = [tuple(rng.integers(0, 3, 12).tolist())]

    def compare() -> None:
        manager.check()
        known = blocks_of(manager)
        for prefix in [prefix for prefix in expected if prefix not in known]:
            del expected[prefix]
        assert {prefix: extent.wish for prefix, extent in known.items()} == expected

    def uses(text: tuple[int, ...], prompt_length: int, wishes: Wishes, length: int, ended: bool = False) -> None:
        known = blocks_of(manager)
        ends = list(range(block, length + 1, block))
        if ended and length % block and text[:length] not in expected:
            # Somebody else's block may cover it.
            ends += [length] if text[:length] in known else []
        for end in ends:
            prefix = text[:end]
            wish = wish_of_block(wishes, prompt_length, block, (end - 1) // block)
            first = (end - 1) // block * block
            # Its own, and that of an open block which it has taken the place of.
            inside = [text[:other] for other in range(first + 1, end) if text[:other] not in known]
            expected[prefix] = strongest(wish, *(expected[other] for other in (prefix, *inside) if other in expected))

    for _ in range(250):
        action = rng.random()
        if action < 0.3 and len(running) < 5:
            text = past[rng.integers(len(past))]
            text = (*text[: rng.integers(1, len(text) + 1)], *rng.integers(0, 3, rng.integers(1, 9)).tolist())[:40]
            wishes = random_wishes(rng, len(text)) if rng.random() < 0.7 else Wishes()
            sequence = manager.open(text, wishes=wishes)
            uses(text, len(text), wishes, sequence.computed)
            running.append((sequence, wishes))
        elif action < 0.85 and running:
            sequence, wishes = running[rng.integers(len(running))]
            if sequence.known == sequence.computed:
                sequence.extend(rng.integers(0, 3, 3))
            plan = manager.plan([Run(sequence, int(rng.integers(1, sequence.known - sequence.computed + 1)))])
            stats = manager.stats().groups[0]
            assert plan.fits == (sum(plan.needed) <= stats.capacity - stats.held)
            if not plan.fits:
                continue
            before = blocks_of(manager)
            leaves = {id(e): (tree.priority(e), e.last_used) for e in tree.extents() if not e.holds and not e.children}
            orders = {prefix: (tree.priority(each), each.last_used, id(each)) for prefix, each in before.items()}
            step = plan.commit()
            stay = {id(extent) for extent in tree.extents()} & leaves.keys()
            for prefix in before.keys() - blocks_of(manager).keys():
                priority, used, itself = orders[prefix]
                assert all((priority, used) <= leaves[leaf] for leaf in stay - {itself})
            compare()
            manager.complete(step)
            uses(tuple(sequence.tokens.tolist()), sequence.prompt_length, wishes, sequence.computed)
        elif running:
            sequence, wishes = running.pop(rng.integers(len(running)))
            text = tuple(sequence.tokens.tolist())
            past = [*past[-7:], text]
            committed, prompt_length = sequence.committed, sequence.prompt_length
            manager.close(sequence)
            uses(text, prompt_length, wishes, committed, ended=True)
        compare()
    assert manager.stats().groups[0].evicted > 0
