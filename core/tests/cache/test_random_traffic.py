"""Random traffic against a value oracle: what a sequence reads is always its own, and the books always balance."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import CapacityError
from kvist.manager import PagedCacheManager, Run
from kvist.policies import ReuseRate
from kvist.restore import RestorePolicy
from kvist.spec import History, Scope, State, Window
from kvist.testing.values import Values, make_layout, make_spec

MIXES = {
    "history": (History(),),
    "window": (Window(5),),
    "state": (State(),),
    "history+window": (History(), Window(6)),
    "history+state": (History(), State()),
    "wide history+window": (History(), History(), History(), Window(9)),
    "history+sinks+window": (History(), Window(7, sinks=3), Window(4)),
    "history+window+state": (History(), Window(6), State()),
    "history+ring": (History(), Window(2, ring=3)),
}

#: Row widths that make the groups' pages unequal, and pages of the largest group that the arena has: few, so that slabs
#: change hands and pages move all the time.
UNEQUAL = {
    "wide history+window": ((History(), Window(6)), (48, 8)),
    "history+wide window": ((History(), Window(6)), (8, 48)),
    "history+huge state": ((History(), State()), (8, 200)),
    "history+window+state": ((History(), Window(6), State()), (8, 24, 120)),
    "history+sinks+window": ((History(), Window(7, sinks=3), Window(4)), (24, 8, 8)),
}


@pytest.mark.parametrize("mix", UNEQUAL)
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_pages_of_unequal_size_move_and_nobody_notices(mix: str, block: int, seed: int) -> None:
    rng = np.random.default_rng([seed, block, len(mix)])
    retentions, widths = UNEQUAL[mix]
    spec = make_spec(block, *retentions, widths=widths, vocab_size=4)
    layout = make_layout(spec, max(5, int(rng.integers(14, 30)) // block))
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks=1 if seed else None))
    manager.shuffle_free_pages(rng)
    traffic = Traffic(manager, rng)
    for _ in range(250):
        traffic.operate()
        manager.check()
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    manager.check()
    assert all(group.held == 0 for group in manager.stats().groups)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_every_read_is_clean_and_every_page_is_accounted_for(mix: str, block: int, seed: int) -> None:
    rng = np.random.default_rng([seed, block, len(mix)])
    retentions = MIXES[mix]
    if mix == "history+ring" and block < 3:
        retentions = (History(), Window(1, ring=1))
    spec = make_spec(block, *retentions, vocab_size=4)
    policy = RestorePolicy(every_blocks=2) if seed == 1 else RestorePolicy()
    layout = make_layout(spec, int(rng.integers(40, 90)) * len(MIXES[mix]) // block)
    backoff, eviction = (2 if seed == 2 else 0), (ReuseRate(64) if seed == 3 else None)
    manager = PagedCacheManager(layout, policy, backoff_tokens=backoff, eviction=eviction)
    manager.shuffle_free_pages(rng)
    traffic = Traffic(manager, rng)
    for _ in range(250):
        traffic.operate()
        manager.check()
    while traffic.flights:
        traffic.finish_oldest()
    while traffic.pick() is not None:
        traffic.finish()
    manager.check()
    stats = manager.stats()
    assert all(group.held == 0 for group in stats.groups)
    assert stats.open_sequences == 0
    assert 0 <= stats.reused_tokens <= stats.prompt_tokens
    assert mix != "history" or stats.reused_tokens + stats.resumed_tokens + stats.forked_tokens > 0


class Traffic:
    """An engine that does everything at random: chunks, drafts, decode batches, overlapped and cancelled steps, aborts,
    forks, suspended and truncated sequences, cleared caches."""

    KINDS = ("open", "step", "step", "step", "finish", "abort", "probe", "fork", "suspend", "resume", "truncate")
    MOST_OPEN = 6

    def __init__(self, manager: PagedCacheManager, rng: np.random.Generator, values: Values | None = None) -> None:
        self.manager, self.rng = manager, rng
        self.values = values or Values(manager)
        self.batch = manager.decode_batch()
        self.singles: list = []
        self.suspended: list = []
        #: Steps in flight, oldest first: step, its plan, accepted counts of the runs.
        self.flights: list = []
        self.texts: dict = {}
        self.past = [rng.integers(0, 4, 12)]

    def operate(self) -> None:
        kinds = self.KINDS
        kind = str(self.rng.choice([*kinds, "clear"])) if self.rng.random() < 0.1 else str(self.rng.choice(kinds))
        if self.flights and (kind != "step" or len(self.flights) == 2 or self.rng.random() < 0.7):
            self.finish_oldest()
        getattr(self, kind)()

    def prompt(self) -> tuple[np.ndarray, Scope]:
        """Mostly a branch of something seen before, so that hits of every depth occur."""
        text = self.past[self.rng.integers(len(self.past))]
        keep = int(self.rng.integers(0, len(text) + 1))
        fresh = self.rng.integers(0, 4, int(self.rng.integers(1, 9)))
        return np.concatenate([text[:keep], fresh])[:40], Scope(salt=str(self.rng.integers(2)))

    def open(self) -> None:
        if len(self.texts) >= self.MOST_OPEN:
            return
        prompt, scope = self.prompt()
        expected = self.manager.probe(prompt, scope)
        reuse = self.rng.random() < 0.9
        try:
            sequence = self.manager.open(prompt, scope, reuse=reuse)
        except CapacityError:
            return
        assert sequence.reused == (expected if reuse else 0) < len(prompt)
        assert sequence.reused <= sequence.matched
        self.singles.append(sequence)
        self.texts[id(sequence)] = prompt

    def probe(self) -> None:
        self.manager.probe(*self.prompt())

    def can_run(self, sequence) -> bool:
        return True

    def step(self) -> None:
        runs = []
        for sequence in self.singles:
            left = sequence.known - sequence.scheduled
            if sequence.undecided or sequence.batch is not None or left < 1 or not self.can_run(sequence):
                continue
            drafts = 0
            if left == 1 and self.rng.random() < 0.5:
                most = self.manager.layout.most_drafts
                drafts = int(self.rng.integers(0, 4 if most is None else most + 1))
            end = sequence.scheduled + int(self.rng.integers(1, left + 1))
            if self.rng.random() < 0.8:
                end = sequence.next_end(end)
            runs.append(Run(sequence, end - sequence.scheduled, drafts))
        decode = self.batch if len(self.batch) else None
        if not runs and decode is None:
            return
        before = self.manager.stats()
        plan = self.manager.plan(runs, decode)
        if not plan.fits:
            with pytest.raises(CapacityError, match="the plan does not fit"):
                plan.commit()
            assert self.manager.stats() == before
            self.abort()
            return
        sequences = plan.sequences
        for sequence in sequences:
            # What the model would produce next is fixed once and for all, as if sampling were deterministic.
            missing = max(sequence.scheduled, sequence.known) + 8 - len(self.texts[id(sequence)])
            ahead = self.rng.integers(0, 4, max(0, missing))
            self.texts[id(sequence)] = np.concatenate([self.texts[id(sequence)], ahead])
        step = plan.commit()
        self.manager.check()
        if self.rng.random() < 0.1:
            self.manager.cancel(step, ran=False)
            return
        most = self.manager.layout.most_drafts
        accepted = []
        for run in plan.runs:
            least = 0 if most is None else run.query_tokens - most
            accepted.append(int(self.rng.integers(least, run.query_tokens + 1)) if run.drafts else run.new_tokens)
        everyone = [1] * (len(sequences) - len(accepted)) + accepted
        self.values.run(step, sequences, self.texts, everyone)
        if self.rng.random() < 0.05 and not self.flights:
            # It failed on its way: states may be lost, and then their sequences have to be resumed.
            self.manager.cancel(step, ran=True)
            for sequence in sequences:
                if sequence.suspended:
                    if sequence in self.singles:
                        self.singles.remove(sequence)
                    self.suspended.append(sequence)
            return
        self.flights.append((step, plan, accepted))

    def finish_oldest(self) -> None:
        step, plan, accepted = self.flights.pop(0)
        self.manager.complete(step, accepted)
        self.manager.check()
        for sequence in plan.sequences:
            if sequence.closed:
                self.texts.pop(id(sequence), None)
            elif sequence.computed >= sequence.prompt_length and self.rng.random() < 0.8:
                self.learn(sequence)
        for run in plan.runs:
            sequence = run.sequence
            if not sequence.closed and not sequence.in_flight and self.rng.random() < 0.3:
                self.join(sequence)

    def learn(self, sequence) -> None:
        """Tell the sequence the ids of all tokens it has computed, plus the next one."""
        text = self.texts[id(sequence)]
        sequence.extend(text[sequence.known : sequence.computed + 1])

    def join(self, sequence) -> None:
        block = self.manager.layout.block_tokens
        if sequence.computed < sequence.prompt_length or sequence not in self.singles or not self.can_run(sequence):
            return
        if sequence.computed % block and sequence.block_count * block <= sequence.computed:
            return
        self.singles.remove(sequence)
        self.batch.join(sequence)

    def pick(self):
        everyone = self.singles + self.batch.sequences + self.suspended
        return everyone[self.rng.integers(len(everyone))] if everyone else None

    def idle(self):
        """A sequence that is in no step and no batch."""
        idle = [s for s in self.singles if not s.in_flight and s.batch is None]
        return idle[self.rng.integers(len(idle))] if idle else None

    def fork(self) -> None:
        parent = self.idle()
        if parent is None or len(self.texts) >= self.MOST_OPEN or not parent.shares:
            return
        if parent.known < parent.computed:
            self.learn(parent)
        try:
            child = self.manager.fork(parent)
        except CapacityError:
            return
        if parent.computed and parent.sources is None:
            assert child.computed == parent.computed
        self.texts[id(child)] = self.texts[id(parent)][: child.known].copy()
        self.singles.append(child)

    def suspend(self) -> None:
        sequence = self.idle()
        if sequence is not None:
            self.manager.suspend(sequence)
            assert sequence.computed == 0
            self.singles.remove(sequence)
            self.suspended.append(sequence)

    def resume(self) -> None:
        if self.suspended:
            sequence = self.suspended.pop(int(self.rng.integers(len(self.suspended))))
            most = max(sequence.suspended_at, sequence.known - 1)
            assert self.manager.resume(sequence) == sequence.computed <= most
            self.singles.append(sequence)

    def truncate(self) -> None:
        sequence = self.idle()
        if sequence is None:
            return
        length = int(self.rng.integers(1, sequence.known + 1))
        assert self.manager.truncate(sequence, length) <= length
        text = self.texts[id(sequence)][:length]
        self.texts[id(sequence)] = np.concatenate([text, self.rng.integers(0, 4, 3)])
        sequence.extend(self.texts[id(sequence)][length : length + 1])

    def clear(self) -> None:
        cleared = self.manager.clear()
        stats = self.manager.stats()
        assert cleared.held == tuple(group.held for group in stats.groups)
        assert all(group.cached == 0 for group in stats.groups)
        for text in self.past:
            assert self.manager.probe(np.append(text, 0)) == 0

    def finish(self) -> None:
        sequence = self.pick()
        if sequence is None:
            return
        if sequence.known < sequence.computed:
            self.learn(sequence)
        self.past.append(self.texts[id(sequence)][: max(1, sequence.computed)])
        self.past = self.past[-12:]
        self.close(sequence)

    def abort(self) -> None:
        sequence = self.pick()
        if sequence is not None:
            self.close(sequence)

    def close(self, sequence) -> None:
        for place in (self.singles, self.suspended):
            if sequence in place:
                place.remove(sequence)
        self.manager.close(sequence)
        self.manager.close(sequence)
        if sequence.closed:
            del self.texts[id(sequence)]
