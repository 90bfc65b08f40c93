"""Host time of cache management: Kvist and vLLM's KVCacheManager, driven by the same loop over the same requests.

The loop is engine_loop.py, blocks have 16 tokens. vLLM runs in the environment that peers/setup.py makes, as a process
of its own, and takes turns with Kvist; each repetition is one run of both, with new managers. All times are CPU time of
the thread less the cost of reading the clock (about half a microsecond per interval, so treat less than a microsecond
as zero); a decode step of the whole batch is one interval. The prompt path is everything but decode steps: making the
request, block hashes included, finding its prefix, getting pages, publishing, freeing.

* conversation: 500 requests of a chat service's trace, mean 13,400 prompt tokens, in a pool of a million tokens, 16
  running.
* three groups: the same with full attention, a window of 1024 tokens, and a recurrent state, each with memory for a
  million tokens. Prompts are computed in chunks that end at multiples of 2048; window and state are kept there and at
  the end of a prompt. Each side ends further chunks where its own scheduler must.
* agentic: a coding agent's trace, mean 67,000 prompt tokens, most of them seen before; 2.5 million tokens, 16 running.
* short: 300 to 1,100 prompt tokens after 50 shared beginnings; 200,000 tokens, 64 running. Beginnings end anywhere in
  a block, and Kvist reuses the part; in "aligned" they end where a block ends.
* synthetic: long conversations that need no trace file, in a pool of a million tokens, 16 running.

Bytes per block are what the manager holds on to after 200 requests of the conversation, when the last one has left,
per block of the pool: its own structures and what it knows about cached content. Kvist compares token ids instead of
hashes, and the ids count (64 bytes per block).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import bruteforce
import engine_loop
import harness
import managers
import numpy as np
import synthetic
from managers import ONE_GROUP, THREE_GROUPS, Contest, PlanDriver, Workload, layout
from records import Figure, paired, without_peer

from kvist.manager import PagedCacheManager
from kvist.replay.engine import Engine
from kvist.replay.traces import TraceRequest

FIGURES = (
    "host.prompt.conversation_b16",
    "host.append",
    "host.plan_p99_us",
    "host.bytes_per_block",
    "replay.hits_equal_bruteforce",
    "host.prompt.three_groups",
    "host.prompt.agentic",
    "host.prompt.short",
    "host.prompt.short_aligned",
    "host.prompt.synthetic_b16",
    "host.append.synthetic",
)

#: Least ratios, or least values where there is no peer.
TARGETS = {
    "host.prompt.conversation_b16": 40.0,
    "host.append": 20.0,
    "host.prompt.three_groups": 20.0,
    "host.prompt.agentic": 60.0,
    "host.prompt.short": 5.0,
    "replay.hits_equal_bruteforce": 1.0,
}
#: Largest values.
LIMITS = {"host.plan_p99_us": 100.0, "host.bytes_per_block": 100.0}

POOL = "1Mtok"
CONCURRENCY = 16
CONVERSATION = "conversation_trace.jsonl"
AGENTIC = "agentic_trace.jsonl"


def as_slice(requests: Sequence[TraceRequest]) -> engine_loop.Slice:
    """The token ids of all requests."""
    return engine_loop.Slice([each.prompt() for each in requests], [each.output() for each in requests])


def times(contest: Contest, workload: Workload, runs: int, names: dict[str, str], note: str = "") -> list[Figure]:
    """Figures of one workload. names: key of the loop's record -> figure."""
    mine, theirs = contest.runs(workload, runs)
    remarks = "; ".join(filter(None, (note, managers.remarks(mine, theirs))))
    figures = []
    for key, figure in names.items():
        unit = "us/token" if key == "append_us" else "us/request"
        values, target = [record[key] for record in mine], TARGETS.get(figure)
        if theirs:
            others = [record[key] for record in theirs]
            figures.append(paired(figure, unit, values, contest.peer, others, target=target, note=remarks))
        else:
            figures.append(without_peer(figure, unit, values, contest.peer, managers.NO_PEER, target=target))
    return figures


def missing(trace: str, *figures: str) -> list[Figure]:
    """Figures that need a trace that is not there."""
    note = f"{trace} is not in the folder given by --traces or KVIST_TRACES"
    return [
        Figure(
            figure=each,
            value=None,
            unit="",
            peer=None if each in LIMITS or each.startswith("replay.") else managers.PEER,
            target=TARGETS.get(each),
            at_most=LIMITS.get(each),
            note=note,
        )
        for each in figures
    ]


def conversation(contest: Contest, options: argparse.Namespace) -> list[Figure]:
    names = {"prompt_us": "host.prompt.conversation_b16", "append_us": "host.append"}
    requests = synthetic.trace_requests(options.traces, CONVERSATION, 500)
    if requests is None:
        return missing(CONVERSATION, *names.values(), "replay.hits_equal_bruteforce", *LIMITS)
    workload = Workload(as_slice(requests), POOL, CONCURRENCY)
    figures = times(contest, workload, 3 if options.quick else 7, names)
    figures.append(plan_figure(workload, 3 if options.quick else 7))
    figures.append(bytes_figure(contest, Workload(as_slice(requests[:200]), POOL, CONCURRENCY)))
    return [*figures, hits_figure(requests)]


def plan_figure(workload: Workload, runs: int) -> Figure:
    """plan() for a prompt, alone: what eviction must decide is in it, the commit is not."""
    tails, both = [], []
    for _ in range(runs):
        made = layout(workload.pool, workload.groups)
        driver = PlanDriver(PagedCacheManager(made))
        record = engine_loop.measure(driver, workload.requests, **workload.settings())
        tails.append(float(np.percentile(driver.plans_ns, 99) - record["clock_ns"]) / 1e3)
        both.append(record["allocate_p99_us"])
    return Figure(
        figure="host.plan_p99_us",
        value=statistics.median(tails),
        unit="us",
        runs=runs,
        at_most=LIMITS["host.plan_p99_us"],
        note=f"p99 over {len(workload.requests.prompts)} prompts; with the commit {statistics.median(both):.0f} us",
    )


def bytes_figure(contest: Contest, workload: Workload) -> Figure:
    """What is kept per block of the pool when the pool has been filled and everybody has left."""
    mine, theirs = contest.bookkeeping(workload)
    pages = workload.settings()["page_count"]
    return Figure(
        figure="host.bytes_per_block",
        value=mine / pages,
        unit="bytes",
        peer=contest.peer,
        peer_value=None if theirs is None else theirs / pages,
        ratio=None if theirs is None else theirs / mine,
        at_most=LIMITS["host.bytes_per_block"],
        note=f"tracemalloc; {mine:,} bytes for {pages:,} blocks"
        + (f"; peer missing: {managers.NO_PEER}" if theirs is None else ""),
    )


def hits_figure(requests: list[TraceRequest]) -> Figure:
    """Kvist's replay against the brute-force model, request by request."""
    made = layout(POOL, ONE_GROUP)
    replayed = Engine(PagedCacheManager(made), concurrency=CONCURRENCY).run(requests)
    expected, cache = bruteforce.simulate(
        ((each.prompt(), each.output()) for each in requests),
        page_count=made.page_capacity(made.groups[0]),
        block_tokens=managers.BLOCK_TOKENS,
        concurrency=CONCURRENCY,
    )
    assert replayed.stats is not None
    evicted = replayed.stats.groups[0].evicted
    different = [number for number, (a, b) in enumerate(zip(replayed.reused, expected, strict=True)) if a != b]
    return Figure(
        figure="replay.hits_equal_bruteforce",
        value=float(not different),
        unit="(1 = same)",
        target=TARGETS["replay.hits_equal_bruteforce"],
        note=f"{len(requests)} requests, {replayed.reused_tokens:,} tokens reused, {evicted:,} pages evicted "
        f"(brute force: {cache.evicted:,}); requests that differ: {len(different)}",
    )


def three_groups(contest: Contest, options: argparse.Namespace) -> list[Figure]:
    requests = synthetic.trace_requests(options.traces, CONVERSATION, 200 if options.quick else 500)
    if requests is None:
        return missing(CONVERSATION, "host.prompt.three_groups")
    workload = Workload(as_slice(requests), POOL, CONCURRENCY, THREE_GROUPS, managers.RESTORE_TOKENS)
    return times(contest, workload, 2 if options.quick else 5, {"prompt_us": "host.prompt.three_groups"})


def agentic(contest: Contest, options: argparse.Namespace) -> list[Figure]:
    requests = synthetic.trace_requests(options.traces, AGENTIC, 150 if options.quick else None)
    if requests is None:
        return missing(AGENTIC, "host.prompt.agentic")
    workload = Workload(as_slice(requests), "2.5Mtok", CONCURRENCY)
    return times(contest, workload, 2 if options.quick else 3, {"prompt_us": "host.prompt.agentic"})


def short(contest: Contest, options: argparse.Namespace) -> list[Figure]:
    figures = []
    for figure, unit in (("host.prompt.short", 1), ("host.prompt.short_aligned", managers.BLOCK_TOKENS)):
        requests = synthetic.short_prompts(1000 if options.quick else 3000, unit=unit)
        workload = Workload(as_slice(requests), "200ktok", 64)
        figures += times(contest, workload, 3 if options.quick else 5, {"prompt_us": figure})
    return figures


def conversations(contest: Contest, options: argparse.Namespace) -> list[Figure]:
    requests = synthetic.conversations(150 if options.quick else 500)
    names = {"prompt_us": "host.prompt.synthetic_b16", "append_us": "host.append.synthetic"}
    return times(contest, Workload(as_slice(requests), POOL, CONCURRENCY), 3 if options.quick else 5, names)


PARTS = {
    "conversation": conversation,
    "three_groups": three_groups,
    "agentic": agentic,
    "short": short,
    "synthetic": conversations,
}


def measure(options: argparse.Namespace) -> list[Figure]:
    with Contest() as contest:
        return [figure for name in options.only or PARTS for figure in PARTS[name](contest, options)]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure, parts=tuple(PARTS)))
