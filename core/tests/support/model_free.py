"""An engine without a model around the real scheduler and the real manager.

Every row that a step reads is compared with the value oracle, and the next token depends on all tokens before it, so an
output says whether its whole past was right.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from kvist.handover import Hold, Landing
from kvist.manager import PagedCacheManager
from kvist.memory.copier import ManualCopier
from kvist.scheduling import Chunk, Job, Scheduler, State, Turn
from kvist.spec import Retention, Scope
from kvist.testing.tier_values import Cache
from kvist.testing.values import Values, fold, make_layout, make_spec
from kvist.testing.values import tokens as as_tokens

P = 4


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def next_token(tokens: np.ndarray) -> int:
    """What the model without a model says after these tokens."""
    return 500 + zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes()) % 400


def alone(prompt: np.ndarray, count: int) -> list[int]:
    """The output of a request that nothing else disturbs: no cache, no scheduler."""
    text = np.array(prompt, np.int32)
    for _ in range(count):
        text = np.append(text, np.int32(next_token(text)))
    return text[len(prompt) :].tolist()


@attrs.define(eq=False, kw_only=True)
class Asked(Job):
    """output: what it has generated. stop_after: it ends with this many tokens, though it might have more."""

    output: list[int] = attrs.field(factory=list)
    stop_after: int = 0


class ModelFree:
    """host_pages: with a host tier of so many pages, whose copies run when :meth:`copy` is called, and at the end of
    each turn with ``copies_run``. A step takes ``step_s`` on the clock."""

    def __init__(
        self,
        pages: int,
        *retentions: Retention,
        host_pages: int = 0,
        copies_run: bool = True,
        block: int = P,
        seed: int | None = 0,
        step_s: float = 1.0,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.copier: ManualCopier | None = None
        self.manager: PagedCacheManager
        if host_pages:
            cache = Cache(*retentions, device_pages=pages, host_pages=host_pages, block=block)
            self.manager, self.values, self.copier = cache.manager, cache.values, cache.copier
        else:
            self.manager = PagedCacheManager(make_layout(make_spec(block, *retentions), pages))
            self.values = Values(self.manager)
        if seed is not None:
            self.manager.shuffle_free_pages(np.random.default_rng(seed))
        self.copies_run = copies_run
        self.step_s = step_s
        self.wire = Wire(self)
        options = {"remote": self.wire, "max_batch_tokens": 8, "max_sequences": 4} | options
        self.scheduler: Scheduler[Asked] = Scheduler(
            self.manager, generated=lambda job: np.array(job.output, np.int32), clock=self.clock, **options
        )
        self.ended: list[Asked] = []
        #: Called when a turn is made and nothing of it has run.
        self.on_turn: Callable[[], None] = lambda: None
        #: What happened, for comparing two runs: (turn, jobs of its rows, tokens of them).
        self.log: list[tuple[object, ...]] = []

    def submit(self, *parts: int | range, new: int = 4, stop_after: int = 0, **options: Any) -> Asked:
        job = Asked(prompt=as_tokens(*parts), max_new_tokens=new, stop_after=stop_after or new, **options)
        self.scheduler.submit(job)
        return job

    def step(self, right: Mapping[Asked, tuple[int, int]] = MappingProxyType({})) -> Turn[Asked] | None:
        """One turn, with everything checked. ``None`` when nothing could be computed.

        right: jobs that get drafts, with how many of them are right, and how many follow that are not.
        """
        turn = self.scheduler.turn({job.number: self.drafts(job, *counts) for job, counts in right.items()})
        self.on_turn()
        for job in self.scheduler.take_refused():
            self.ended.append(job)
        self.clock.now += self.step_s
        if turn is None:
            self.log.append((None,))
            self.copy()
            self.manager.check()
            return None
        rows = list(self.scheduler.decoding)
        assert len(rows) == turn.decode_rows
        self.run(turn)
        drafting = [chunk for chunk in turn.chunks if len(chunk.drafts)]
        accepted = [self.accepted(chunk) for chunk in drafting]
        ready = self.scheduler.complete(turn, accepted)
        self.log.append(
            (
                tuple(job.number for job in rows),
                tuple((each.job.number, each.start, each.count, *each.drafts.tolist()) for each in turn.chunks),
            )
        )
        new = dict.fromkeys([*rows, *ready], 1) | {chunk.job: count for chunk, count in zip(drafting, accepted)}
        for job, count in new.items():
            job.output += alone(self.text(job), count)
            if len(job.output) >= job.stop_after:
                self.finish(job)
        if self.copies_run:
            self.copy()
        self.manager.check()
        return turn

    def run(self, turn: Turn[Asked]) -> None:
        sequences = turn.plan.plans[0].sequences
        jobs = {id(job.sequence): job for job in self.scheduler.jobs() if job.sequence is not None}
        texts = {id(sequence): self.text(jobs[id(sequence)]) for sequence in sequences}
        kept = [1] * turn.decode_rows
        for chunk in turn.chunks:
            kept.append(self.accepted(chunk) if len(chunk.drafts) else chunk.count)
            if len(chunk.drafts):
                text = self.text(chunk.job)
                texts[id(chunk.job.sequence)] = np.append(text, alone(text, len(chunk.drafts))).astype(np.int32)
        self.values.run(turn.step, sequences, texts, kept)

    def drafts(self, job: Asked, right: int, wrong: int) -> np.ndarray:
        """Tokens that will come, and behind them some that will not."""
        return np.array(alone(self.text(job), right) + [1] * wrong, np.int32)

    def accepted(self, chunk: Chunk[Asked]) -> int:
        """The newest token and the drafts that were right, as far as the job goes on."""
        truth = alone(self.text(chunk.job), len(chunk.drafts))
        right = next((n for n, (a, b) in enumerate(zip(chunk.drafts.tolist(), truth)) if a != b), len(truth))
        return min(1 + right, chunk.job.stop_after - len(chunk.job.output))

    def text(self, job: Asked) -> np.ndarray:
        return np.concatenate([job.prompt, np.array(job.output, np.int32)])

    def finish(self, job: Asked) -> None:
        if job.state is not State.DONE:
            self.scheduler.finish(job)
            self.ended.append(job)

    def copy(self) -> None:
        if self.copier is not None:
            self.copier.run()

    def drain(self, most: int = 5000) -> None:
        """Step until every job has ended."""
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {most} turns: " + "; ".join(map(str, self.scheduler.waits())))

    def check_outputs(self, jobs: Iterable[Asked]) -> None:
        """Everybody has what it would have had alone."""
        for job in jobs:
            if job.error is None:
                assert job.output == alone(job.prompt, len(job.output)), f"request {job.number}"

    def drained(self) -> None:
        """No page is held, and no sequence open."""
        if self.copier is not None:
            for _ in range(1000):
                self.manager.poll()
                if not self.copier.queued:
                    break
                self.copier.run()
        stats = self.manager.stats()
        assert stats.open_sequences == 0
        assert [group.held for group in stats.groups] == [0] * len(stats.groups)
        self.manager.check()


class Wire:
    """Plays the other process: rows that a landing lacks come when :meth:`arrive` is called. ``holds``: of what was
    given up, and of what was sent; whoever reads or writes there lets go by ``release``."""

    def __init__(self, engine: ModelFree) -> None:
        self.engine = engine
        self.landings: dict[Asked, Landing] = {}
        self.holds: list[Hold] = []

    @property
    def open(self) -> int:
        return len(self.landings) + len(self.holds)

    def receive(self, job: Asked) -> None:
        self.landings[job] = self.engine.manager.land(job.tokens, job.scope, length=job.remote_tokens)

    def cancel(self, job: Asked) -> None:
        self.holds.append(self.engine.manager.give_up(self.landings.pop(job)))

    def arrive(self, job: Asked) -> None:
        landing = self.landings.pop(job)
        truth, size = fold(job.tokens[: landing.length], job.scope), self.engine.manager.layout.block_tokens
        for group, pages in zip(self.engine.manager.layout.groups, landing.pages):
            assert not group.exact
            for block, page in enumerate(pages.tolist()):
                if page >= 0:
                    rows = truth[block * size :][: self.engine.values.pages[group.index].shape[1]]
                    self.engine.values.pages[group.index][page, : len(rows)] = rows
        self.engine.scheduler.landed(job, self.engine.manager.landed(landing))

    def lose(self, job: Asked) -> None:
        self.cancel(job)
        self.engine.scheduler.lost(job)

    def send(self, job: Asked) -> Hold:
        hold = self.engine.manager.hand_over(self.engine.scheduler.detach(job))
        self.holds.append(hold)
        return hold

    def release(self) -> None:
        while self.holds:
            self.holds.pop().release()


def waiting_times(jobs: Sequence[Asked]) -> list[float]:
    """Seconds from submission to first admission."""
    return [job.admitted_s - job.arrival_s for job in jobs]


SALT = Scope(salt="other")
