"""What a sequence keeps when a step of it fails half way: whatever that step cannot have written to."""

from __future__ import annotations

import pytest

from kvist.manager import PagedCacheManager, Run, Sequence
from kvist.restore import RestorePolicy
from kvist.spec import History, State, Window
from kvist.testing.engine import Engine, Flight
from kvist.testing.values import make_layout, make_spec

#: Of these a step overwrites what the one before has left.
MIXES = {
    "state": (State(),),
    "history+state": (History(), State()),
    "ring": (Window(2, ring=3),),
    "history+ring": (History(), Window(2, ring=3)),
    "history+window+ring+state": (History(), Window(6, sinks=2), Window(2, ring=3), State()),
}
STATES = [mix for mix in MIXES if "state" in mix]


class Job:
    """A prompt of 9 tokens in blocks of 4, and what is generated after it: alone in runs, or in a decode batch."""

    def __init__(self, mix: str, how: str, every_blocks: int | None = None) -> None:
        layout = make_layout(make_spec(4, *MIXES[mix]), 60 * len(MIXES[mix]))
        self.engine = Engine(PagedCacheManager(layout, restore=RestorePolicy(every_blocks)))
        self.sequence: Sequence = self.engine.open(range(1, 10))
        self.engine.prefill(self.sequence)
        self.batch = self.engine.manager.decode_batch() if how == "decode" else None
        if self.batch is not None:
            self.batch.join(self.sequence)

    def launch(self) -> Flight:
        """One more token, whose id the engine need not know yet. The whole step runs."""
        runs = [] if self.batch is not None else [Run(self.sequence, 1)]
        return self.engine.launch(*runs, decode=self.batch)

    def advance(self, count: int) -> None:
        for _ in range(count):
            self.engine.land(self.launch())

    def fail(self, flight: Flight) -> None:
        self.engine.manager.cancel(flight.step, ran=True)
        self.engine.audit()

    def found(self) -> int:
        """What another request with all tokens so far, and others behind them, would reuse."""
        return self.engine.probe(*self.sequence.tokens.tolist(), 77, 78)

    def end(self) -> None:
        """It goes on, and every row that it reads is its own; so does one with the same tokens."""
        self.engine.prefill(self.sequence)
        self.engine.decode(self.sequence, 6)
        text = self.sequence.tokens.tolist()
        self.engine.close(self.sequence)
        self.engine.turn(*text, 77)
        self.engine.drained()


@pytest.mark.parametrize("how", ["runs", "decode"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_that_fails_costs_its_open_block(mix: str, how: str) -> None:
    """The ids of generated tokens come late, so nothing of them is published when it fails at token 17."""
    job = Job(mix, how, every_blocks=1)
    job.advance(8)
    job.engine.learn(job.sequence, 0)
    assert job.found() == 8
    job.fail(job.launch())
    # Four whole blocks; not the open one, in which the step may have written.
    assert job.sequence.suspended and job.found() == 16
    assert job.engine.resume(job.sequence) == 16
    job.end()


@pytest.mark.parametrize("how", ["runs", "decode"])
@pytest.mark.parametrize("mix", MIXES)
def test_without_restore_points_on_the_way_rings_go_on_at_the_last_block(mix: str, how: str) -> None:
    job = Job(mix, how)
    job.advance(8)
    job.engine.learn(job.sequence, 0)
    job.fail(job.launch())
    # Of a state there is no snapshot after the prompt's; a ring is still what it was at the end of a block.
    assert job.engine.resume(job.sequence) == (8 if mix in STATES else 16)
    job.end()


@pytest.mark.parametrize("how", ["runs", "decode"])
@pytest.mark.parametrize("mix", MIXES)
def test_at_the_end_of_a_block_nothing_is_lost(mix: str, how: str) -> None:
    job = Job(mix, how, every_blocks=1)
    job.advance(7)
    job.engine.learn(job.sequence, 0)
    job.fail(job.launch())
    assert job.found() == 16
    job.engine.extend(job.sequence, 50)
    assert job.engine.resume(job.sequence) == 16
    job.end()


@pytest.mark.parametrize("how", ["runs", "decode"])
@pytest.mark.parametrize("mix", MIXES)
def test_what_an_older_step_computes_while_a_newer_one_fails_is_kept(mix: str, how: str) -> None:
    job = Job(mix, how, every_blocks=1)
    job.advance(6)
    older, newer = job.launch(), job.launch()
    job.fail(newer)
    assert not job.sequence.suspended
    job.engine.land(older)
    assert job.sequence.suspended
    # The id of token 16 is told only now: nobody can find the block that it ends.
    job.engine.learn(job.sequence, 17)
    assert job.found() == 8
    assert job.engine.resume(job.sequence) == 8
    job.end()


@pytest.mark.parametrize("mix", MIXES)
def test_what_was_completed_just_before_is_kept(mix: str) -> None:
    job = Job(mix, "decode", every_blocks=1)
    job.advance(6)
    older, newer = job.launch(), job.launch()
    job.engine.learn(job.sequence, 1)
    job.engine.land(older)
    job.fail(newer)
    assert job.engine.resume(job.sequence) == 16
    job.end()


@pytest.mark.parametrize("mix", MIXES)
def test_after_a_clear_a_failed_step_leaves_nothing(mix: str) -> None:
    job = Job(mix, "runs", every_blocks=1)
    job.advance(8)
    job.engine.learn(job.sequence, 0)
    job.engine.manager.clear()
    job.fail(job.launch())
    assert job.found() == job.engine.resume(job.sequence) == 0
    job.end()
