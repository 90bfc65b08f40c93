"""Random traffic against a value oracle: what a sequence reads is always its own, and the books always balance."""

from __future__ import annotations

import numpy as np
import pytest
from cache_values import Values, make_layout, make_spec

from kvist.errors import CapacityError
from kvist.manager import PagedCacheManager, Run
from kvist.publish import RestorePolicy
from kvist.spec import History, Scope, Window

MIXES = {
    "history": (History(),),
    "window": (Window(5),),
    "history+window": (History(), Window(6)),
    "wide history+window": (History(), History(), History(), Window(9)),
    "history+sinks+window": (History(), Window(7, sinks=3), Window(4)),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_read_is_clean_and_every_page_is_accounted_for(mix: str, block: int, seed: int) -> None:
    rng = np.random.default_rng([seed, block, len(mix)])
    spec = make_spec(block, *MIXES[mix], vocab_size=4)
    policy = RestorePolicy(every_blocks=2) if seed == 1 else RestorePolicy()
    manager = PagedCacheManager(make_layout(spec, int(rng.integers(40, 90)) * len(MIXES[mix]) // block), policy)
    manager.shuffle_free_pages(rng)
    traffic = Traffic(manager, rng)
    for _ in range(250):
        traffic.operate()
        manager.check()
    while traffic.texts:
        traffic.finish()
    manager.check()
    stats = manager.stats()
    assert all(group.held == 0 for group in stats.groups)
    assert stats.open_sequences == 0
    assert (1 if mix == "history" else 0) <= stats.reused_tokens <= stats.prompt_tokens


class Traffic:
    """An engine that does everything at random: chunks, drafts, decode batches, cancelled steps, aborts."""

    def __init__(self, manager: PagedCacheManager, rng: np.random.Generator) -> None:
        self.manager, self.rng = manager, rng
        self.values = Values(manager)
        self.batch = manager.decode_batch()
        self.prefilling: list = []
        self.texts: dict = {}
        self.past = [rng.integers(0, 4, 12)]

    def operate(self) -> None:
        kind = self.rng.choice(["open", "step", "step", "step", "finish", "abort", "probe"])
        getattr(self, kind)()

    def prompt(self) -> tuple[np.ndarray, Scope]:
        """Mostly a branch of something seen before, so that hits of every depth occur."""
        text = self.past[self.rng.integers(len(self.past))]
        keep = int(self.rng.integers(0, len(text) + 1))
        fresh = self.rng.integers(0, 4, int(self.rng.integers(1, 9)))
        return np.concatenate([text[:keep], fresh])[:40], Scope(salt=str(self.rng.integers(2)))

    def open(self) -> None:
        if len(self.texts) >= 6:
            return
        prompt, scope = self.prompt()
        expected = self.manager.probe(prompt, scope)
        try:
            sequence = self.manager.open(prompt, scope)
        except CapacityError:
            return
        assert sequence.reused == expected < len(prompt)
        self.prefilling.append(sequence)
        self.texts[id(sequence)] = prompt

    def probe(self) -> None:
        self.manager.probe(*self.prompt())

    def step(self) -> None:
        runs = []
        for sequence in self.prefilling:
            left = sequence.known - sequence.computed
            drafts = 0
            if left == 1 and self.rng.random() < 0.5:
                drafts = int(self.rng.integers(0, 4))
            runs.append(Run(sequence, int(self.rng.integers(1, left + 1)), drafts))
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
        for sequence in plan.sequences:
            # What the model would produce next is fixed once and for all, as if sampling were deterministic.
            missing = max(sequence.computed, sequence.known) + 6 - len(self.texts[id(sequence)])
            ahead = self.rng.integers(0, 4, max(0, missing))
            self.texts[id(sequence)] = np.concatenate([self.texts[id(sequence)], ahead])
        step = plan.commit()
        self.manager.check()
        if self.rng.random() < 0.1:
            self.manager.cancel(step)
            return
        self.values.run(step, plan.sequences, self.texts)
        accepted = [int(self.rng.integers(run.new_tokens, run.query_tokens + 1)) for run in plan.runs]
        self.manager.complete(step, accepted)
        for run in plan.runs:
            self.after(run.sequence)
        for sequence in self.batch.sequences:
            if self.rng.random() < 0.7:
                self.learn(sequence)

    def learn(self, sequence) -> None:
        """Tell the sequence the ids of all tokens it has computed, plus the next one."""
        text = self.texts[id(sequence)]
        sequence.extend(text[sequence.known : sequence.computed + 1])

    def after(self, sequence) -> None:
        if sequence.computed < sequence.prompt_length:
            return
        self.learn(sequence)
        if self.rng.random() < 0.5:
            self.prefilling.remove(sequence)
            block = self.manager.layout.block_tokens
            if sequence.computed % block and sequence.block_count * block <= sequence.computed:
                return
            self.batch.join(sequence)

    def pick(self):
        everyone = self.prefilling + self.batch.sequences
        return everyone[self.rng.integers(len(everyone))] if everyone else None

    def finish(self) -> None:
        sequence = self.pick()
        if sequence is None:
            return
        if sequence.known < sequence.computed:
            self.learn(sequence)
        self.past.append(self.texts[id(sequence)][: sequence.computed])
        self.past = self.past[-12:]
        self.close(sequence)

    def abort(self) -> None:
        sequence = self.pick()
        if sequence is not None:
            self.close(sequence)

    def close(self, sequence) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self.manager.close(sequence)
        self.manager.close(sequence)
        del self.texts[id(sequence)]
