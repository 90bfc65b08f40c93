"""Traffic changes, memory follows: how much of one arena holds useful content, beside a static split of the same bytes.

A model with three kinds of layers, whose pages are unequal: full attention (128 KiB per block of 16 tokens), a window
of 512 tokens (40 KiB) and a recurrent state (1.5 MiB per sequence). Three kinds of traffic, one after the other on the
same manager, each with more than the memory holds:

* long: prompts of 8,000 to 24,000 tokens, up to 4 running. Nearly all bytes are full attention's.
* short: 200 to 900 tokens, up to 200 running. Every sequence has a state and most of a window.
* states: agents with 2,000 to 6,000 tokens whose every turn goes on from one before, up to 40 running, with a restore
  point every 512 tokens: snapshots of states take a large part of the memory.

The engine is the same for both: it admits while the next prompt's first chunk fits, and all that everybody will need
until its end, computes it in chunks of 2,048 tokens, generates 64 tokens, and closes. If a running sequence does not
get its next page all the same, the youngest is suspended and waits until the others leave room. A request that does
not even fit when nothing else runs is refused.

The peer is the same manager with a floor for each group, in sum the whole arena: the most that each group held in the
first phase, and the rest in proportion to what it held and cached at its end. That is how a cache with a pool per group
behaves between two restarts.

Utilisation is the part of the usable bytes (all but the reserved slab) in pages that are held or cached, their padding
not counted, at each step of a phase from half of its requests on until the last is admitted. The figure is the mean
over the phases after the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import attrs
import harness
import numpy as np
from records import Figure

from kvist.errors import CapacityError
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.sequence import Sequence
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window

FIGURES = ("arena.utilisation_after_shift",)
LEAST_PERCENT = 95.0

BLOCK_TOKENS = 16
CHUNK_TOKENS = 2048
OUTPUT_TOKENS = 64
WINDOW_TOKENS = 512
MEMORY_BYTES = 1 << 30


def layout() -> Layout:
    """Pages of 128 KiB, 40 KiB and 1.5 MiB less a bit: none of the last two divides a slab of the other."""
    rows = {"history": RowFormat((4096,), "bfloat16"), "window": RowFormat((1280,), "bfloat16")}
    layers = (
        Layer(0, (Stream("kv", rows["history"], History()),)),
        Layer(1, (Stream("kv", rows["window"], Window(WINDOW_TOKENS)),)),
        Layer(2, (Stream("state", RowFormat((780_000,), "bfloat16"), State()),)),
    )
    return Layout.build(CacheSpec(layers, BLOCK_TOKENS, "arena", vocab_size=1 << 20), MEMORY_BYTES)


@attrs.frozen
class Phase:
    """One kind of traffic. prompts: without end. running: sequences at a time, if memory allows. restore_tokens: tokens
    between the restore points that requests ask for, 0 for none."""

    name: str
    prompts: Callable[[np.random.Generator], Iterator[np.ndarray]]
    running: int
    requests: int
    restore_tokens: int = 0


def fresh_prompts(low: int, high: int, shared: float) -> Callable[[np.random.Generator], Iterator[np.ndarray]]:
    """Prompts of ``low`` to ``high`` tokens; a part ``shared`` of them begins like one of the last ones."""

    def prompts(rng: np.random.Generator) -> Iterator[np.ndarray]:
        past: deque[np.ndarray] = deque(maxlen=32)
        while True:
            prompt = rng.integers(0, 1 << 20, int(rng.integers(low, high))).astype(np.int32)
            if past and rng.random() < shared:
                begin = past[int(rng.integers(len(past)))]
                cut = int(rng.integers(1, min(len(begin), len(prompt))))
                prompt[:cut] = begin[:cut]
            past.append(prompt)
            yield prompt

    return prompts


def agents(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Turns of conversations that go on: each is the one before and some more."""
    talks = [rng.integers(0, 1 << 20, int(rng.integers(2000, 4000))).astype(np.int32) for _ in range(40)]
    while True:
        which = int(rng.integers(len(talks)))
        more = rng.integers(0, 1 << 20, int(rng.integers(100, 800))).astype(np.int32)
        talks[which] = np.concatenate([talks[which], more])
        if len(talks[which]) > 6000:
            talks[which] = rng.integers(0, 1 << 20, 2000).astype(np.int32)
        yield talks[which]


PHASES = (
    Phase("long", fresh_prompts(8000, 24000, 0.3), 4, 60),
    Phase("short", fresh_prompts(200, 900, 0.3), 200, 1500),
    Phase("states", agents, 40, 400, restore_tokens=512),
)


@attrs.define
class Counts:
    """What a phase came to."""

    samples: list[float] = attrs.Factory(list)
    admitted: int = 0
    refused: int = 0
    suspended: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0

    @property
    def utilisation(self) -> float:
        return statistics.mean(self.samples) if self.samples else 0.0

    def text(self) -> str:
        steps = max(1, self.steps)
        return (
            f"{self.utilisation:.1%} used, {self.admitted} admitted, {self.refused} refused, "
            f"{self.suspended} suspended, {self.rows / steps:.1f} running in {self.steps} steps, "
            f"{self.reused_tokens / max(1, self.prompt_tokens):.1%} reused, {self.moved_bytes / 2**20:,.0f} MiB moved, "
            f"{1e3 * self.seconds / steps:.2f} ms per step with the engine"
        )


def utilisation(manager: PagedCacheManager) -> float:
    """Part of the usable bytes that holds content."""
    made = manager.layout
    pages = [group.held + group.cached for group in manager.stats().groups]
    content = sum(count * group.content_bytes for count, group in zip(pages, made.groups))
    return content / ((made.slab_count - 1) * made.slab_bytes)


def room_for(made: Layout, sequences: list[Sequence]) -> bool:
    """Can all of them run to their ends, if everything cached goes?"""
    pages = [0, 0, len(sequences)]
    for sequence in sequences:
        blocks = (sequence.prompt_length + OUTPUT_TOKENS) // BLOCK_TOKENS + 2
        pages[0] += blocks
        pages[1] += min(blocks, (WINDOW_TOKENS + next_chunk(sequence)) // BLOCK_TOKENS + 2)
    slabs = [-(-count * group.page_bytes // made.slab_bytes) for count, group in zip(pages, made.groups)]
    # With floors, a group's capacity is what the others leave it.
    return sum(slabs) < made.slab_count and all(
        count <= made.page_capacity(group) for count, group in zip(pages, made.groups)
    )


class Engine:
    """Serves one phase to its end and closes everything."""

    def __init__(self, manager: PagedCacheManager, phase: Phase, rng: np.random.Generator) -> None:
        self.manager, self.phase, self.rng = manager, phase, rng
        self.counts = Counts()
        self.prompts = phase.prompts(rng)
        self.left = phase.requests
        self.waiting: Sequence | None = None
        self.running: list[Sequence] = []
        self.suspended: deque[Sequence] = deque()

    def serve(self) -> Counts:
        moved = [group.moved for group in self.manager.stats().groups]
        begin = time.perf_counter()
        while self.left or self.running or self.suspended or self.waiting is not None:
            self.admit()
            self.step()
        self.counts.seconds = time.perf_counter() - begin
        for group, before in zip(self.manager.stats().groups, moved):
            self.counts.moved_bytes += (group.moved - before) * group.page_bytes
        self.manager.check()
        return self.counts

    def admit(self) -> None:
        while len(self.running) < self.phase.running:
            if self.waiting is None and not self.next():
                return
            assert self.waiting is not None
            together = [*self.running, self.waiting]
            # With all that the others will still need, so that hardly anybody has to be suspended.
            enough = room_for(self.manager.layout, together) or not self.running
            if not enough or not self.manager.plan([Run(each, next_chunk(each)) for each in together]).fits:
                if not self.running:
                    self.manager.close(self.waiting)
                    self.waiting = None
                    self.counts.refused += 1
                return
            self.running.append(self.waiting)
            self.counts.admitted += self.waiting.known == self.waiting.prompt_length
            self.waiting = None

    def next(self) -> bool:
        """Have somebody in front of the door, whoever was suspended first."""
        manager, counts = self.manager, self.counts
        if self.suspended:
            self.waiting = self.suspended.popleft()
            manager.resume(self.waiting)
        while self.waiting is None and self.left:
            self.left -= 1
            prompt = next(self.prompts)
            unit = self.phase.restore_tokens
            try:
                self.waiting = manager.open(prompt, restore_at=range(unit, len(prompt), unit) if unit else ())
            except CapacityError:
                counts.refused += 1
                continue
            counts.prompt_tokens += self.waiting.prompt_length
            counts.reused_tokens += self.waiting.reused
        return self.waiting is not None

    def step(self) -> None:
        manager, counts = self.manager, self.counts
        plan = manager.plan([Run(each, next_chunk(each)) for each in self.running])
        while not plan.fits:
            youngest = self.running.pop()
            manager.suspend(youngest)
            self.suspended.append(youngest)
            counts.suspended += 1
            plan = manager.plan([Run(each, next_chunk(each)) for each in self.running])
        if not self.running:
            return
        manager.complete(plan.commit())
        counts.steps += 1
        counts.rows += len(self.running)
        for sequence in list(self.running):
            if sequence.computed == sequence.known:
                if sequence.known >= sequence.prompt_length + OUTPUT_TOKENS:
                    self.running.remove(sequence)
                    manager.close(sequence)
                else:
                    sequence.extend(self.rng.integers(0, 1 << 20, 1))
        if 0 < self.left <= self.phase.requests // 2:
            counts.samples.append(utilisation(manager))


def next_chunk(sequence: Sequence) -> int:
    return sequence.next_end(min(sequence.known, sequence.computed + CHUNK_TOKENS)) - sequence.computed


def floors(manager: PagedCacheManager) -> dict[str, int]:
    """Floors that give the whole arena away: what each group held at most (twice that for states, for a snapshot each),
    and of the rest as much as of the bytes in use now."""
    made, groups = manager.layout, manager.stats().groups
    per_slab = [made.slab_bytes // group.page_bytes for group in made.groups]
    peaks = [group.held_peak * (2 if each.exact else 1) for group, each in zip(groups, made.groups)]
    slabs = [-(-peak // count) for peak, count in zip(peaks, per_slab)]
    rest = made.slab_count - 1 - sum(slabs)
    used = [(group.held + group.cached) * group.page_bytes for group in groups]
    slabs = [own + rest * size // sum(used) for own, size in zip(slabs, used)]
    slabs[0] += made.slab_count - 1 - sum(slabs)
    return {group.name: own * count for group, own, count in zip(made.groups, slabs, per_slab)}


def one_run(seed: int) -> tuple[list[Counts], list[Counts]]:
    """All phases on one arena, and on a split of the same bytes that suits the first phase."""
    made = layout()
    manager = PagedCacheManager(made)
    ours, split = [], PagedCacheManager(made)
    for number, phase in enumerate(PHASES):
        ours.append(Engine(manager, phase, np.random.default_rng([seed, number])).serve())
        if not number:
            split = PagedCacheManager(made.with_floors(floors(manager)))
    theirs = [
        Engine(split, phase, np.random.default_rng([seed, number])).serve() for number, phase in enumerate(PHASES)
    ]
    return ours, theirs


def measure(options: argparse.Namespace) -> list[Figure]:
    results = [one_run(seed) for seed in range(1 if options.quick else 2)]
    for name, side in (("one arena", results[0][0]), ("static split", results[0][1])):
        for phase, counts in zip(PHASES, side):
            harness.progress(f"{name}, {phase.name}: {counts.text()}")
    after = [[statistics.mean(100 * counts.utilisation for counts in side[1:]) for side in run] for run in results]
    lowest = min(100 * counts.utilisation for ours, _ in results for counts in ours)
    suspended = [sum(counts.suspended for run in results for counts in run[side]) for side in (0, 1)]
    refused = [sum(counts.refused for run in results for counts in run[side]) for side in (0, 1)]
    steps = [sum(counts.steps for run in results for counts in run[side][1:]) for side in (0, 1)]
    reused = [
        sum(counts.reused_tokens for run in results for counts in run[side][1:])
        / sum(counts.prompt_tokens for run in results for counts in run[side][1:])
        for side in (0, 1)
    ]
    moved = statistics.mean(sum(counts.moved_bytes for counts in ours) for ours, _ in results)
    ours, theirs = (statistics.median(run[side] for run in after) for side in (0, 1))
    return [
        Figure(
            figure=FIGURES[0],
            value=ours,
            unit="%",
            peer="static split",
            peer_value=theirs,
            ratio=statistics.median(run[0] / run[1] for run in after),
            runs=len(results),
            note=f"at least {LEAST_PERCENT:g} % are wanted: {'yes' if lowest >= LEAST_PERCENT else 'no'}, lowest phase "
            f"{lowest:.1f} %; suspended {suspended[0]} (the split {suspended[1]}), refused {refused[0]} "
            f"({refused[1]}), steps after the shift {steps[0]:,} ({steps[1]:,}), tokens reused after it "
            f"{reused[0]:.1%} ({reused[1]:.1%}); {moved / 2**20:,.0f} MiB moved per run, in an arena "
            f"of {MEMORY_BYTES >> 20:,} MiB",
        )
    ]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
