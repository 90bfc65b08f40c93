"""An engine that does everything the contract allows, in any order, and compares what it sees with plain models.

Operations are methods that take a :data:`~kvist.testing.mixes.Draw`, so that Hypothesis and a seeded generator drive
the same ones. :data:`OPERATIONS` gives their weights; what a later part of the contract brings, e.g. tiers, is a
subclass with more methods and a table with more rows, both of which the drivers take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from kvist.errors import CapacityError, RequestError, StateError
from kvist.manager import Run, Sequence
from kvist.testing.bookkeeping import MOST_LIVE, MOST_PROMPT, SCOPES, refused
from kvist.testing.memory import Flight, Live, fold_on
from kvist.testing.mixes import Draw
from kvist.testing.stepping import Stepping
from kvist.wishes import FOREVER, Wish, Wishes

#: Weight of each operation in random traffic.
OPERATIONS = {
    "open": 10,
    "step": 24,
    "complete": 18,
    "close": 5,
    "join": 8,
    "leave": 4,
    "learn": 4,
    "cancel": 6,
    "fork": 4,
    "suspend": 3,
    "resume": 5,
    "truncate": 4,
    "plan_only": 2,
    "stale": 1,
    "misuse": 1,
    "shuffle": 1,
    "clear": 1,
}


class CacheMachine(Stepping):
    """Sequences come, fork, go to sleep, are cut short, and leave."""

    def prompt(self, draw: Draw) -> bytes:
        """Mostly a branch of something seen before, so that hits of every depth occur; at times the same once more."""
        text = self.past[draw(len(self.past))]
        if not draw(5):
            return text[:MOST_PROMPT]
        keep = draw(len(text) + 1)
        return (text[:keep] + bytes(draw(self.setup.vocab) for _ in range(1 + draw(8))))[:MOST_PROMPT]

    def scope(self, draw: Draw) -> int:
        """One of the two."""
        return draw(2)

    def open(self, draw: Draw) -> None:
        if len(self.lives) >= MOST_LIVE:
            return self.close(draw)
        prompt, scope = self.prompt(draw), self.scope(draw)
        reuse = draw(8) < 7
        named = [draw(len(prompt)) for _ in range(draw(3))]
        wishes = self._wishes(draw, len(prompt))
        ids = np.frombuffer(prompt, np.uint8).astype(np.int32)
        before = self.manager.stats()
        expected = self.manager.probe(ids, SCOPES[scope])
        assert self.manager.stats() == before, "probe() changed something"
        try:
            sequence = self.manager.open(ids, SCOPES[scope], reuse=reuse, restore_at=named, wishes=wishes)
        except CapacityError:
            assert not self.layout.fits(len(prompt)), "open() refused a prompt that fits"
            assert self.manager.stats() == before
            return None
        except RequestError:
            assert self.setup.max_tokens is not None and len(prompt) > self.setup.max_tokens
            return None
        assert self.layout.fits(len(prompt)), "open() took a prompt that never fits"
        assert sequence.reused == sequence.computed == (expected if reuse else 0)
        self._compare_reuse(prompt, scope, expected, sequence.matched if reuse else None)
        values = fold_on(np.empty(0, np.int64), scope, prompt)
        live = Live(sequence, scope, prompt, values, reuse)
        if reuse and self.sparse:
            live.points = self._compare_points(sequence, named)
        self._claimed(live, sequence.reused)
        live.delayed = False
        live.known = live.prompt_length = len(prompt)
        self.lives.append(live)
        return None

    def _wishes(self, draw: Draw, length: int) -> Wishes | None:
        """How long its blocks should stay, in a third of the runs: what is asked of the cache is the same."""
        if self.setup.noise % 3 or not draw(2):
            return None

        def wish() -> Wish:
            return Wish(draw(5) - 2, (9, 90, FOREVER)[draw(3)])

        starts = [draw(length) for _ in range(draw(3))]
        return Wishes(tuple((start, start + 1 + draw(length), wish()) for start in starts), wish())

    def fork(self, draw: Draw) -> None:
        parent = self.pick(draw, [live for live in self.idle() if live.sequence.shares and live.shares])
        if parent is None or len(self.lives) >= MOST_LIVE:
            return
        # Only what it has computed is shared, and all of it has to be known.
        self._extend(parent, parent.computed)
        if parent.known < parent.computed:
            return
        before = self.manager.stats()
        # Before its first step nothing is its own yet, and a fork is simply opened again.
        shares = parent.computed > 0 and not parent.pending
        if shares:
            self.model.publish(parent, ended=False)
        try:
            sequence = self.manager.fork(parent.sequence)
        except CapacityError:
            assert shares or not self.layout.fits(parent.known), "nothing was needed, and there was no room for it"
            if not shares:
                return
            if self.pages is not None:
                need = sum(
                    min(1, parent.columns) if group.exact else min(1, parent.computed % self.block)
                    for group in self.layout.groups
                )
                assert need > self.pages - sum(group.held for group in self.manager.stats().groups)
            return
        self._compare_evictions_of_fork(before)
        assert not shares or sequence.computed == parent.computed, "a fork is computed as far as its parent"
        text = parent.text[: parent.known]
        child = Live(sequence, parent.scope, text, parent.values[: parent.known], True)
        child.known = child.prompt_length = parent.known
        child.origin = "forked"
        child.columns = min(1, parent.columns) if shares else 0
        self._claimed(child, sequence.computed)
        child.pending = child.pending and not shares
        self.lives.append(child)

    def suspend(self, draw: Draw) -> None:
        live = self.pick(draw, self.idle())
        if live is None:
            return
        self.manager.suspend(live.sequence)
        before = self.manager.stats()
        self.manager.suspend(live.sequence)
        assert self.manager.stats() == before, "suspending twice is suspending once"
        self._ended(live)
        live.suspended, live.computed = True, 0
        self._compare_lengths()

    def resume(self, draw: Draw) -> None:
        live = self.pick(draw, self.idle(suspended=True))
        if live is None:
            return
        most = max(live.known - 1, min(live.known, live.sequence.suspended_at))
        back = self.manager.resume(live.sequence)
        self._taken_back(live, back, most, resumed=True)

    def truncate(self, draw: Draw) -> None:
        live = self.pick(draw, self.idle() + self.idle(suspended=True))
        if live is None:
            return
        length = 1 + draw(live.known)
        if not live.suspended:
            most = min(length, live.computed)
            self._ended(live)
        else:
            most = min(length, live.sequence.suspended_at)
        resumed = live.suspended
        back = self.manager.truncate(live.sequence, length)
        assert live.sequence.known == length
        live.text, live.values, live.known = live.text[:length], live.values[:length], length
        live.prompt_length = min(live.prompt_length, length)
        live.may_length = live.must_length = min(live.must_length, length)
        self._taken_back(live, back, most, resumed=resumed)
        assert live.sequence.tokens.tobytes() == np.frombuffer(live.text, np.uint8).astype(np.int32).tobytes()

    def close(self, draw: Draw, lives: list[Live] | None = None) -> None:
        live = self.pick(draw, self.lives if lives is None else lives)
        if live is None:
            return
        if draw(3):
            # Its end is known, as after the last sampled token.
            self._extend(live, live.computed)
        self.past = [*self.past[-11:], live.text[: max(1, live.computed + draw(2))]]
        self.manager.close(live.sequence)
        self.manager.close(live.sequence)
        if live.sequence.closed:
            assert not self.flying(live)
            self._closed(live)
        else:
            assert self.flying(live)
            live.closing = True

    def clear(self, draw: Draw) -> None:
        if draw(4):
            return
        before = self.manager.stats()
        cleared = self.manager.clear()
        stats = self.manager.stats()
        assert cleared.held == tuple(group.held for group in stats.groups)
        assert all(group.cached == 0 for group in stats.groups)
        assert cleared.freed == tuple(group.cached for group in before.groups)
        self.model.clear(self.lives)
        for text in self.past:
            for scope in SCOPES:
                assert self.manager.probe(np.frombuffer(text + b"\0", np.uint8)[:30], scope) == 0

    def learn(self, draw: Draw) -> None:
        live = self.pick(draw, self.lives)
        if live is not None and not live.closing:
            self._extend(live, max(live.computed, live.known) + draw(4))

    def shuffle(self, draw: Draw) -> None:
        self.manager.shuffle_free_pages(np.random.default_rng(draw(1 << 16)))

    def stale(self, draw: Draw) -> None:
        """A plan is good for nothing once anything has changed."""
        plan = self._plan(draw)
        if plan is None or not plan.fits:
            return
        change = draw(3)
        if change == 0 and any(not live.closing for live in self.lives):
            self.close(draw, [live for live in self.lives if not live.closing])
        elif change == 1 and self.flights:
            self.complete(draw)
        else:
            self.shuffle(draw)
        before = self.manager.stats()
        refused(StateError, plan.commit, "this plan is stale")
        assert self.manager.stats() == before

    def misuse(self, draw: Draw) -> None:
        """Calls that the contract refuses leave everything as it is."""
        live = self.pick(draw, self.lives)
        if live is None:
            return
        sequence, manager = live.sequence, self.manager
        before = manager.stats()
        busy = sequence.in_flight or sequence.batch is not None
        if busy:
            calls: tuple[Callable[[Sequence], object], ...] = (manager.suspend, manager.resume, manager.fork)
            for call in calls:
                refused(StateError, partial(call, sequence))
            refused(StateError, lambda: manager.truncate(sequence, 1))
        elif live.suspended:
            refused(StateError, lambda: manager.plan([Run(sequence, 1)]))
        else:
            refused(RequestError, lambda: manager.truncate(sequence, sequence.known + 1))
            refused(StateError, lambda: manager.plan([Run(sequence, 1), Run(sequence, 1)]))
        assert manager.stats() == before

    def finish(self, draw: Draw) -> None:
        """The end of a run: one sequence goes on alone, then nothing is left over."""
        while self.flights:
            self.complete(draw)
        alone = self.lives[0] if self.lives else None
        for live in self.lives[1:]:
            self.manager.close(live.sequence)
            self._closed(live)
        if alone is not None:
            self._alone(alone)
            self.manager.close(alone.sequence)
            self._closed(alone)
        self.quiesce()
        self.check()
        stats = self.manager.stats()
        assert all(group.held == 0 for group in stats.groups), "pages are held by nobody"
        self.clear(lambda _: 0)
        if len(self.layout.groups) == 1:
            (group,) = self.manager.stats().groups
            assert group.free == group.capacity, "pages are lost"
        self.manager.check()

    def quiesce(self) -> None:
        """Let end what goes on beside the operations: nothing, without tiers."""

    def _alone(self, live: Live) -> None:
        """Whoever runs alone can compute, token by token, whatever the arena can hold."""
        manager, sequence = self.manager, live.sequence
        if sequence.batch is not None:
            sequence.batch.leave(sequence)
        if not live.suspended:
            manager.suspend(sequence)
            self._ended(live)
        manager.resume(sequence)
        self._claimed(live, sequence.computed)
        self._resumed(live)
        while live.computed < live.known and self.layout.fits(live.computed + 1):
            self.quiesce()
            before = manager.stats()
            plan = manager.plan([Run(sequence, 1)])
            assert plan.fits, f"alone, and no room for token {live.computed} of {live.known}: {plan.shortages}"
            step = plan.commit()
            self._compare_evictions(before, plan.needed)
            flight = Flight(step, plan, [live], [1], self.memory.free(), [])
            self.memory.execute(flight)
            manager.complete(step)
            self.steps += 1
            self.computed_tokens += 1
            live.computed += 1
            self._began(live)
            manager.check()
