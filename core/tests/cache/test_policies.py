"""Eviction policies: what goes first, by hand-computed expectations; no cache is needed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvist.policies import NO_MARK, Candidates, EvictionPolicy, LeastRecentlyUsed, ReuseRate, promises

#: Tokens of each request in these tests; the clock goes on by so many.
TURN = 1000


def candidates(last_used: list[int], marks: list[int] | None = None) -> Candidates:
    count = len(last_used)
    mark = np.full(count, NO_MARK) if marks is None else np.array(marks)
    return Candidates(np.array(last_used), np.zeros(count, np.int64), np.full(count, TURN), mark.astype(np.int64))


def order(policy: EvictionPolicy, rows: Candidates, now: int) -> list[int]:
    """Rows as they would go."""
    return np.argsort(policy.score(rows, now), kind="stable").tolist()


class Traffic:
    """Conversations that a policy is told about. A cache as large as ``cached`` tokens is said to be full."""

    def __init__(self, policy: ReuseRate, cached: int = 10**9) -> None:
        self.policy, self.cached, self.now = policy, cached, 0

    def turn(self, mark: int = NO_MARK, *, length: int = TURN, reused: int = 0, key: object = None) -> int:
        made = self.policy.used(mark, key, self.now, length, reused, self.cached)
        self.now += length
        return made

    def delayed(self, requests: int, delay: int) -> list[int]:
        """Every conversation goes on exactly once, ``delay`` requests after its first turn. Returns all marks."""
        marks: list[int] = []
        first: list[int] = []
        while len(marks) < requests:
            first.append(self.turn())
            marks.append(first[-1])
            if len(first) * 2 > delay:
                marks.append(self.turn(first[-1 - delay // 2], reused=TURN // 2))
        return marks


def test_lru_takes_what_was_used_longest_ago():
    rows = candidates([70, 10, 50, 90])
    assert order(LeastRecentlyUsed(), rows, 100) == [1, 2, 0, 3]
    assert not LeastRecentlyUsed().learns


def test_lru_needs_no_notifications():
    policy = LeastRecentlyUsed()
    assert policy.used(NO_MARK, "key", 0, 10, 0, 10) == NO_MARK
    assert policy.left_behind(7, 0, 10) == 7
    assert policy.uncovered(7, 9) == 7
    policy.evicted(7, "key")


def test_before_anything_is_known_the_order_is_lrus():
    policy = ReuseRate()
    marks = [Traffic(policy).turn() for _ in range(200)]
    assert order(policy, candidates([70, 10, 50, 90], marks[:4]), 10**6) == [1, 2, 0, 3]


def test_the_promise_of_a_constant_rate_is_that_rate():
    # Without memory every age promises the same: P / E(time) of an exponential waiting time is its rate.
    rate = 1e-6
    assert promises(np.full((1, 22), rate))[0, :15] == pytest.approx(np.full(15, rate), rel=1e-9)


def test_the_promise_of_a_rate_that_comes_later():
    # Nothing in octaves below 2**19, then a certain continuation within one octave: its probability over the time
    # until it, waited for from age 0, and from the age at which the rate begins.
    rates = np.full((1, 22), 1e-15)
    begin, width, rate = 512 * 2.0**10, 512 * 2.0**10, 1e-5
    rates[0, 10] = rate
    chance = 1 - math.exp(-rate * width)
    promise = promises(rates)[0]
    assert promise[0] == pytest.approx(chance / (begin + chance / rate), rel=1e-3)
    assert promise[10] == pytest.approx(rate, rel=1e-3)
    assert promise[11] < 1e-12


def test_a_falling_rate_gives_lrus_order():
    rates = (0.3 / (512 * 2.0 ** np.arange(22)))[None]
    promise = promises(rates)[0, :22]
    assert (np.diff(promise) < 0).all()


def test_the_newest_go_where_continuations_come_late():
    # Turns come 64 requests after the one before: what is half as old is worth more than what is new.
    policy = ReuseRate()
    traffic = Traffic(policy)
    marks = traffic.delayed(2000, 64)
    now = traffic.now
    ages = [1 * TURN, 48 * TURN, 1000 * TURN]
    rows = candidates([now - age for age in ages], [marks[-2]] * 3)
    assert order(policy, rows, now) == [2, 0, 1]
    assert order(LeastRecentlyUsed(), rows, now) == [2, 1, 0]


def test_lrus_order_where_the_rate_falls_with_age():
    # Most turns follow at once, some later, few much later.
    policy = ReuseRate()
    traffic = Traffic(policy)
    rng = np.random.default_rng(0)
    open_marks: list[int] = []
    for _ in range(4000):
        back = int(rng.pareto(0.7)) + 1
        mark = open_marks.pop(-back) if back <= len(open_marks) and rng.random() < 0.7 else NO_MARK
        open_marks.append(traffic.turn(mark, reused=0 if mark == NO_MARK else TURN // 2))
    # Half octaves: there is an order within them too.
    ages = [int(2 ** (k / 2) * TURN) for k in range(2, 22)]
    rows = candidates([traffic.now - age for age in ages], open_marks[-1:] * len(ages))
    assert order(policy, rows, traffic.now) == list(reversed(range(len(ages))))


def test_later_turns_stay_when_they_are_continued_more_often():
    # One conversation of ten has a second turn, and each of those goes on and on.
    policy = ReuseRate()
    traffic = Traffic(policy)
    firsts: list[int] = []
    going: list[int] = []
    for number in range(4000):
        if number % 4 == 3 and len(going) > 40:
            going.append(traffic.turn(going.pop(0), reused=TURN // 2))
        elif number % 10 == 5:
            going.append(traffic.turn(traffic.turn(), reused=TURN // 2))
        else:
            firsts.append(traffic.turn())
    used = traffic.now - 50 * TURN
    assert order(policy, candidates([used] * 2, [going[-1], firsts[-1]]), traffic.now) == [1, 0]
    # Also for lengths that were never seen.
    first, later = traffic.turn(length=40_000), traffic.turn(going[-1], length=40_000, reused=TURN // 2)
    assert order(policy, candidates([used] * 2, [later, first]), traffic.now) == [1, 0]


def test_what_a_request_left_behind_goes_first():
    policy = ReuseRate()
    traffic = Traffic(policy)
    mark = traffic.turn()
    for _ in range(1500):
        rest = policy.left_behind(mark, traffic.now - TURN, TURN // 2)
        mark = traffic.turn(mark, reused=TURN // 2)
    # The rest is newer than the conversation's end, and still goes first.
    rows = candidates([traffic.now - 4 * TURN, traffic.now - 2 * TURN], [mark, rest])
    assert order(policy, rows, traffic.now) == [1, 0]


def test_a_continuation_is_learned_from_though_its_content_was_evicted():
    def rate_of_a_first_turn(evicts: bool) -> float:
        policy = ReuseRate()
        # LRU would have lost them as well, so it does not take over.
        traffic = Traffic(policy, cached=4 * TURN)
        waiting: list[int] = []
        for number in range(1500):
            waiting.append(traffic.turn(key=("new", number)))
            policy.evicted(waiting[-1], ("cut", waiting[-1]))
            if len(waiting) > 30:
                back = waiting.pop(0)
                # The prompt comes back, finds nothing, and adds its blocks anew.
                traffic.turn(key=("cut", back) if evicts else ("other", number))
        return float(policy.score(candidates([traffic.now - 25 * TURN], [waiting[-1]]), traffic.now)[0])

    # Without continuations scores stay LRU's, which are clocks.
    assert rate_of_a_first_turn(False) == (2970 - 25) * TURN
    assert 0 < rate_of_a_first_turn(True) < 1e-3


def test_a_ghost_is_where_a_path_was_cut_last():
    policy = ReuseRate(memory=4)
    mark = policy.used(NO_MARK, "a", 0, TURN, 0, TURN)
    policy.evicted(mark, "end")
    policy.evicted(mark, "middle")
    assert list(policy._ghosts) == ["middle"]
    for _ in range(4):
        policy.used(NO_MARK, "b", 0, TURN, 0, TURN)
    # The record is forgotten, and its ghost with it.
    assert not policy._ghosts


def test_marks_of_uncovered_parents():
    policy = ReuseRate()
    parent = policy.used(NO_MARK, "a", 0, TURN, 0, TURN)
    rest = policy.left_behind(parent, 0, 10)
    child = policy.used(parent, "b", TURN, TURN, 500, TURN)
    assert policy.uncovered(parent, child) == child
    assert policy.uncovered(parent, rest) == parent
    assert policy.uncovered(child, parent) == child


def test_a_shared_beginning_is_no_conversation():
    # Many requests after one: the first makes it a second turn, the others begin at the origin's turn.
    policy = ReuseRate()
    origin = policy.used(NO_MARK, "a", 0, TURN, 0, TURN)
    made = [policy.used(origin, number, TURN * (number + 1), TURN, 500, TURN) for number in range(3)]
    assert [policy._turn[mark] for mark in made] == [1, 0, 0]


def test_lru_takes_over_when_it_would_have_hit_more():
    policy = ReuseRate()
    traffic = Traffic(policy)
    marks = traffic.delayed(1000, 64)
    now = traffic.now
    rows = candidates([now - TURN, now - 48 * TURN], [marks[-2]] * 2)
    assert order(policy, rows, now) == [0, 1]
    # Conversations go on at once, but the cache has lost them: LRU would have had them all.
    mark = traffic.turn()
    for number in range(30):
        policy.evicted(mark, ("lost", number))
        mark = traffic.turn(key=("lost", number))
    assert policy.score(rows, now).tolist() == rows.last_used.tolist()
    # For a while.
    for _ in range(256):
        traffic.turn()
    assert policy.score(rows, now).tolist() != rows.last_used.tolist()


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), ReuseRate(), ReuseRate(memory=64)])
def test_scores_are_finite_and_the_same_one_by_one(policy: EvictionPolicy) -> None:
    rng = np.random.default_rng(0)
    now, marks = 0, [NO_MARK]
    for number in range(700):
        mark = marks[int(rng.integers(len(marks)))]
        if mark != NO_MARK and rng.random() < 0.3:
            marks.append(policy.left_behind(mark, now, 10))
        policy.evicted(mark, number % 50)
        length = int(rng.integers(1, 300_000))
        marks.append(policy.used(mark, number % 70, now, length, length // 2, 10**6))
        now += length
    count = 300
    rows = Candidates(
        np.concatenate([[0, now, now + 5], rng.integers(0, now, count - 3)]),
        rng.integers(0, 10**6, count),
        rng.integers(1, 10**6, count),
        rng.choice([*marks, NO_MARK], count).astype(np.int64),
    )
    # Also far beyond the largest age that is told apart.
    for clock in (now, now + 10**12):
        together = policy.score(rows, clock)
        assert together.dtype == np.float64 and np.isfinite(together).all()
        columns = (rows.last_used, rows.start, rows.length, rows.mark)
        alone = [policy.score(Candidates(*(each[at : at + 1] for each in columns)), clock)[0] for at in range(count)]
        assert alone == together.tolist()
    assert len(policy.score(Candidates(*(each[:0] for each in columns)), now)) == 0


def test_the_same_requests_lead_to_the_same_scores():
    def scores() -> list[float]:
        policy = ReuseRate()
        traffic = Traffic(policy)
        marks = traffic.delayed(600, 32)
        now = traffic.now
        return policy.score(candidates([now - 5000 * k for k in range(9)], marks[-9:]), now).tolist()

    assert scores() == scores()
