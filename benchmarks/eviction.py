"""What eviction policies hit: LRU, ReuseRate, the clairvoyant optimum, and a cache that never evicts.

The simulator is eviction_simulator.py; the policies are those of `kvist.policies`. Requests come one after the other in
the trace's blocks of 512 (chat) or 64 tokens (agentic). Hits are prompt tokens found in the cache, in per cent of all
prompt tokens, over the last 70 % of the requests of each slice, as kvcache-simulator 0.1.3 counts them. The optimum is
Belady's rule for blocks, which needs to know the future. ReuseRate was tuned on the first half of the chat trace, the
agentic trace merged in nine orders, and synthetic loads; the second half of the chat trace shows what that is worth.

`evict.least_ratio` is the worst ratio to LRU over the loads and capacities listed, of which some are made to be hard.
`evict.cold_*` are caches that start empty, which is where there is little to learn from.
"""

from __future__ import annotations

import argparse
import sys
import time
import timeit
from collections.abc import Sequence

import attrs
import harness
import numpy as np
import synthetic
from eviction_simulator import Cache, Workload, optimum
from records import Figure

from kvist.policies import NO_MARK, Candidates, LeastRecentlyUsed, ReuseRate
from kvist.replay.traces import TraceRequest

FIGURES = (
    "evict.chat_1m",
    "evict.chat_4m",
    "evict.agentic_500k",
    "evict.agentic_500k_gap_closed",
    "evict.least_ratio",
    "evict.score_300",
    "evict.notified",
    "evict.cold_1m",
    "evict.cold_4m",
)
PEER = "LRU"
M = 1_000_000
_SHUFFLES = 8
#: Start of one conversation of the agentic trace after the other, as in the trace.
_APART_S = 7.0


@attrs.frozen
class Row:
    """One load at one capacity. Hits in per cent, after the warm-up; ``whole``: LRU's and ours without any."""

    load: str
    capacity: int
    lru: float
    ours: float
    optimum: float
    ceiling: float
    whole: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.ours / self.lru if self.lru else 1.0

    @property
    def closed(self) -> float:
        """Share of the way from LRU to the optimum."""
        return (self.ours - self.lru) / (self.optimum - self.lru) if self.optimum > self.lru else 0.0


def rows(load: str, requests: Sequence[TraceRequest], capacities: Sequence[float]) -> list[Row]:
    """capacities: in millions of tokens."""
    workload = Workload.of(requests)
    ceiling = Cache(workload, sys.maxsize, LeastRecentlyUsed()).run().rate()
    made = []
    for millions in capacities:
        capacity = int(millions * M)
        lru = Cache(workload, capacity, LeastRecentlyUsed()).run()
        ours = Cache(workload, capacity, ReuseRate()).run()
        best = optimum(workload, capacity).rate()
        row = Row(load, capacity, lru.rate(), ours.rate(), best, ceiling, (lru.rate(0), ours.rate(0)))
        harness.progress(
            f"| {load} | {millions:g}M | {row.lru:.2f} | {row.ours:.2f} | {row.optimum:.2f} | {row.ceiling:.2f} "
            f"| {row.ratio:.3f}x | {row.closed:.2f} | {row.whole[0]:.2f} / {row.whole[1]:.2f} |"
        )
        made.append(row)
    return made


def merged_anew(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The conversations of the agentic trace, which are told apart by their first block, started in another order."""
    conversations: dict[int, list[TraceRequest]] = {}
    for request in requests:
        conversations.setdefault(int(request.block_ids[0]), []).append(request)
    order = np.random.default_rng(seed).permutation(len(conversations)).tolist()
    started = [list(conversations.values())[at] for at in order]
    again = [
        attrs.evolve(request, arrival_s=request.arrival_s - conversation[0].arrival_s + place * _APART_S)
        for place, conversation in enumerate(started)
        for request in conversation
    ]
    again.sort(key=lambda request: (request.arrival_s, request.number))
    return again


def recent(count: int) -> list[TraceRequest]:
    """Conversations of which recent ones go on most often: LRU is right."""
    rng = np.random.default_rng(0)
    histories: list[list[int]] = []
    made = []
    for number in range(count):
        if histories and rng.random() < 0.7:
            history = histories.pop(-1 - min(int(rng.pareto(0.7)), len(histories) - 1))
        else:
            history = []
        first = 100 * number
        blocks = history + list(range(first, first + 1 + int(rng.geometric(1 / 8))))
        made.append(_request(number, blocks))
        # The last block is cut off within, and the next turn does not share it.
        if len(blocks) < 60:
            histories.append(blocks[:-1])
    return made


def scan(count: int) -> list[TraceRequest]:
    """40 documents that are asked about again and again, among requests that never come back."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 40, 40)
    made = []
    for number in range(count):
        which = int(rng.integers(40)) if rng.random() < 0.3 else None
        length = int(rng.integers(10, 40)) if which is None else int(lengths[which])
        first = 100 * (number + 40 if which is None else which)
        made.append(_request(number, [*range(first, first + length), -1 - number]))
    return made


def drift(count: int) -> list[TraceRequest]:
    """Documents that are popular for a while."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        which = number // 10 + int(rng.zipf(1.5)) % 300
        first = 100 * which
        made.append(_request(number, [*range(first, first + 5 + which * 7919 % 30), -1 - number]))
    return made


def _request(number: int, blocks: list[int]) -> TraceRequest:
    # Ids below zero are those of a request alone.
    ids = np.array(blocks, np.int64).astype(np.uint64)
    return TraceRequest(number, float(number), len(blocks) * 512 - 100, 200, ids, 512)


def cold(figure: str, chat: Sequence[TraceRequest], millions: int, count: int) -> Figure:
    """Caches that start empty at many places of the chat trace: their mean, and how the single ones scatter."""
    lru, ours = [], []
    for first in range(0, len(chat) - count + 1, count):
        workload = Workload.of(chat[first : first + count])
        lru.append(Cache(workload, millions * M, LeastRecentlyUsed()).run())
        ours.append(Cache(workload, millions * M, ReuseRate()).run())
    ratios = [mine.rate() / theirs.rate() for mine, theirs in zip(ours, lru)]
    mine, theirs = (float(np.mean([hits.rate() for hits in each])) for each in (ours, lru))
    worse = sum(ratio < 0.99 for ratio in ratios)
    note = (
        f"mean of {len(ratios)} slices of {count} requests; ratios {min(ratios):.2f} to {max(ratios):.2f}, "
        f"{worse} below 0.99"
    )
    return Figure(
        figure=figure,
        value=mine,
        unit="% hits",
        peer=PEER,
        peer_value=theirs,
        ratio=mine / theirs,
        runs=len(ratios),
        target=0.99,
        note=note,
    )


def changing(chat: Sequence[TraceRequest], agentic: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Chat, then agentic traffic in blocks of 512 tokens, then chat: what was learned becomes wrong, twice."""
    coarse = [attrs.evolve(each, block_ids=each.block_ids[7::8] + np.uint64(M), block_tokens=512) for each in agentic]
    together = [*chat[:3000], *coarse, *chat[3000:5000]]
    return [attrs.evolve(request, number=number) for number, request in enumerate(together)]


def cost_us() -> tuple[float, float]:
    """One score of 300 candidates after learning from some requests; the notifications of a request, on average."""
    policy, rng = ReuseRate(), np.random.default_rng(0)
    marks: list[int] = []
    count, spent = 6000, 0
    for number in range(count):
        mark = marks.pop(int(rng.integers(len(marks)))) if len(marks) > 100 and rng.random() < 0.5 else NO_MARK
        begin = time.thread_time_ns()
        if mark != NO_MARK:
            policy.left_behind(mark, 12_000 * number, 500)
        marks.append(policy.used(mark, number, 12_000 * number, 12_000, 6_000, M))
        policy.evicted(marks[0], number)
        spent += time.thread_time_ns() - begin
    now = count * 12_000
    columns = [now - rng.integers(0, 4 * M, 300), np.zeros(300, np.int64), np.full(300, 6000), rng.choice(marks, 300)]
    candidates = Candidates(*columns)
    score = min(timeit.repeat(lambda: policy.score(candidates, now), number=200, repeat=9)) / 200 * 1e6
    return score, spent / count / 1e3


def measure(options: argparse.Namespace) -> list[Figure]:
    quick = options.quick
    harness.progress(
        "| load | tokens | LRU | ReuseRate | optimum | never evicts | ratio | gap closed | LRU / ours, no warm-up |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    every: list[Row] = []
    chat = synthetic.trace_requests(options.traces, "conversation_trace.jsonl")
    agentic = synthetic.trace_requests(options.traces, "agentic_trace.jsonl")
    figures = []
    if chat is not None:
        whole = rows("chat, all", chat, [1, 4] if quick else [0.25, 0.5, 1, 2, 4, 8])
        first = rows("chat, first 500", chat[:500], [1]) + rows("chat, first 1000", chat[:1000], [4])
        every += whole + first
        if not quick:
            half = len(chat) // 2
            every += rows("chat, first half", chat[:half], [1, 4]) + rows("chat, second half", chat[half:], [1, 4])
        for name, millions, cited, target in (
            ("evict.chat_1m", 1, first[0], 1.3),
            ("evict.chat_4m", 4, first[1], 0.99),
        ):
            row = next(each for each in whole if each.capacity == millions * M)
            note = f"{_beside(row)}; {cited.load}: {cited.ours:.1f} %, LRU {cited.lru:.1f} %, {_beside(cited)}"
            figures.append(_figure(name, row, target, note))
        figures += [cold("evict.cold_1m", chat, 1, 500), cold("evict.cold_4m", chat, 4, 1000)]
    if agentic is not None:
        measured = rows("agentic", agentic, [0.5] if quick else [0.25, 0.5, 1, 2])
        row = next(each for each in measured if each.capacity == M // 2)
        every += measured
        ends = optimum(Workload.of(agentic), M // 2, ends_only=True).rate()
        told = (ends - row.lru) / (row.optimum - row.lru)
        note = f"share of the way from LRU to the optimum; LRU told what never comes back would close {told:.2f}"
        if not quick:
            others = [
                each
                for seed in range(1, _SHUFFLES + 1)
                for each in rows(f"agentic, order {seed}", merged_anew(agentic, seed), [0.25, 0.5])
            ]
            every += others
            for capacity in (M // 4, M // 2):
                at = [each for each in others if each.capacity == capacity]
                closed = sum(each.ours - each.lru for each in at) / sum(each.optimum - each.lru for each in at)
                note += f"; {_SHUFFLES} other orders at {capacity // 1000}k tokens: {closed:.2f}"
        figures.append(_figure("evict.agentic_500k", row, 0.99, _beside(row)))
        gap = Figure(figure="evict.agentic_500k_gap_closed", value=row.closed, unit="", target=1 / 3, note=note)
        figures.append(gap)
    if not quick:
        every += rows("recency", recent(6000), [0.25, 1, 4])
        every += rows("scans", scan(6000), [0.25, 1, 4])
        every += rows("drift", drift(6000), [0.25, 1, 4])
        if chat is not None and agentic is not None:
            every += rows("chat, agentic, chat", changing(chat, agentic), [0.25, 0.5, 1, 4])
    measured_ids = {figure.figure for figure in figures}
    why = (
        "conversation_trace.jsonl and agentic_trace.jsonl are not both in the folder given by --traces or KVIST_TRACES"
    )
    missing = [name for name in (*FIGURES[:4], "evict.cold_1m", "evict.cold_4m") if name not in measured_ids]
    figures += [Figure(figure=name, value=None, unit="% hits", peer=PEER, note=why) for name in missing]
    if every:
        worst = min(every, key=lambda each: each.ratio)
        note = f"{worst.load}, {worst.capacity / M:g}M tokens; {len(every)} loads and capacities"
        figures.append(Figure(figure="evict.least_ratio", value=worst.ratio, unit="x", target=0.99, note=note))
    else:
        figures.append(Figure(figure="evict.least_ratio", value=None, unit="x", target=0.99, note=why))
    score, notified = cost_us()
    figures.append(Figure(figure="evict.score_300", value=score, unit="us", at_most=30))
    figures.append(Figure(figure="evict.notified", value=notified, unit="us/request"))
    return figures


def _figure(name: str, row: Row, target: float, note: str) -> Figure:
    return Figure(
        figure=name,
        value=row.ours,
        unit="% hits",
        peer=PEER,
        peer_value=row.lru,
        ratio=row.ratio,
        target=target,
        note=note,
    )


def _beside(row: Row) -> str:
    return f"optimum {row.optimum:.1f} %, never evicting {row.ceiling:.1f} %"


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
