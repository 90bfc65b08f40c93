"""One loop, shaped like an engine's, that drives any cache manager and measures its host cost.

First in, first out admission of at most ``concurrency`` running requests; a prompt is computed as it is admitted, in
one piece or in chunks; then one token for each running request per step; a request leaves when it has its output.
Admission reserves prompt and output against the pool, so that no allocation can fail; this arithmetic is the same for
everybody and is not measured.

Needs only numpy, because peers run it in environments of their own. Times are CPU time of the thread, so that
neighbours on the machine do not matter, less the cost of reading the clock.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: Together the prompt path. ``append`` is counted per token.
PROMPT_PHASES = ("construct", "lookup", "allocate", "commit", "free")

_now = time.thread_time_ns


class Slice:
    """The requests of a trace as arrays. ``prompts[i]`` and ``outputs[i]`` are int32 token ids."""

    def __init__(self, prompts: list[npt.NDArray[np.int32]], outputs: list[npt.NDArray[np.int32]]) -> None:
        self.prompts = prompts
        self.outputs = outputs

    def save(self, path: Path) -> None:
        """Write one ``.npz`` file for a process that has no trace reader."""
        np.savez(
            path,
            prompts=np.concatenate(self.prompts),
            prompt_lengths=[len(tokens) for tokens in self.prompts],
            outputs=np.concatenate(self.outputs),
            output_lengths=[len(tokens) for tokens in self.outputs],
        )

    @classmethod
    def load(cls, path: Path) -> Slice:
        """Read what ``save`` wrote."""
        with np.load(path) as arrays:
            prompts = np.split(arrays["prompts"], np.cumsum(arrays["prompt_lengths"])[:-1])
            outputs = np.split(arrays["outputs"], np.cumsum(arrays["output_lengths"])[:-1])
        return cls(prompts, outputs)


class Driver(Protocol):
    """One cache manager. A handle is whatever ``construct`` returns."""

    def prepare(self, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> Any:
        """Bring a request into the form that the manager's callers have it in. Not measured."""

    def construct(self, prepared: Any) -> Any:
        """Make the manager's request object, block hashing included."""

    def lookup(self, handle: Any) -> int:
        """Find the reusable prefix. Returns its tokens."""

    def allocate(self, handle: Any, limit: int) -> int:
        """Get the pages for the prompt's next chunk, evicting what must go. Returns where the chunk ends: at ``limit``,
        or before it where the manager wants to keep something that exists at chunk ends only."""

    def commit(self, handle: Any, end: int) -> None:
        """The prompt is computed up to ``end``: make that findable; after the last chunk, go on with decoding."""

    def decode(self, running: list[Any]) -> None:
        """One token more for every running request. Measured as ``append``."""

    def deliver(self, handle: Any) -> None:
        """Hand over generated token ids that are not known yet. Measured as ``append``."""

    def free(self, handle: Any) -> None:
        """The request is done."""


class _Running:
    def __init__(self, number: int, handle: Any, remaining: int, pages: int) -> None:
        self.number = number
        self.handle = handle
        self.remaining = remaining
        self.pages = pages


def clock_cost_ns() -> float:
    """Nanoseconds that an interval between two readings of the clock measures when nothing is in between."""
    return statistics.median(-(_now() - _now()) for _ in range(2000))


def measure(
    driver: Driver,
    requests: Slice,
    *,
    page_count: int,
    block_tokens: int,
    concurrency: int,
    chunk_tokens: int | None = None,
    spare_pages: int = 0,
) -> dict[str, Any]:
    """Run all requests once. Returns a JSON-like record; times in microseconds per request, or per token for append.

    chunk_tokens: prompts are computed in chunks that end at multiples of this; ``None`` computes each in one piece.
    spare_pages: what a request is given at admission beside a page per block of prompt and output.

    In the record, ``requests_us`` has the prompt path of each request, and ``reused`` the tokens that the manager said
    it reuses.
    """
    gc.collect()
    gc.freeze()
    clock = clock_cost_ns()
    spent = dict.fromkeys((*PROMPT_PHASES, "append"), 0)
    allocations: list[int] = []
    reused = [0] * len(requests.prompts)
    requests_ns = [0.0] * len(requests.prompts)
    waiting = deque(range(len(requests.prompts)))
    running: list[_Running] = []
    reserved = token_count = step_count = chunk_count = 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            number = waiting[0]
            prompt, output = requests.prompts[number], requests.outputs[number]
            pages = -(-(len(prompt) + len(output)) // block_tokens) + spare_pages
            if reserved + pages > page_count:
                if not running:
                    raise ValueError(f"request {number} needs {pages} pages, the pool has {page_count}")
                break
            waiting.popleft()
            reserved += pages
            prepared = driver.prepare(prompt, output)
            t0 = _now()
            handle = driver.construct(prepared)
            t1 = _now()
            reused[number] = driver.lookup(handle)
            t2 = _now()
            spent["construct"] += t1 - t0
            spent["lookup"] += t2 - t1
            before, position, in_chunks, chunks = t2 - t0, reused[number], 0, 0
            while position < len(prompt):
                limit = len(prompt)
                if chunk_tokens is not None:
                    limit = min(limit, (position // chunk_tokens + 1) * chunk_tokens)
                t2 = _now()
                position = driver.allocate(handle, limit)
                t3 = _now()
                driver.commit(handle, position)
                t4 = _now()
                spent["allocate"] += t3 - t2
                spent["commit"] += t4 - t3
                in_chunks += t4 - t2
                chunks += 1
                allocations.append(t3 - t2)
            chunk_count += chunks
            requests_ns[number] = before + in_chunks - (2 + 2 * chunks) * clock
            running.append(_Running(number, handle, len(output), pages))
        handles = [each.handle for each in running]
        token_count += len(handles)
        step_count += 1
        t0 = _now()
        driver.decode(handles)
        spent["append"] += _now() - t0
        staying = []
        for each in running:
            each.remaining -= 1
            if each.remaining > 0:
                staying.append(each)
                continue
            t0 = _now()
            driver.deliver(each.handle)
            t1 = _now()
            driver.free(each.handle)
            t2 = _now()
            spent["append"] += t1 - t0
            spent["free"] += t2 - t1
            requests_ns[each.number] += t2 - t1 - clock
            reserved -= each.pages
        running = staying
    gc.unfreeze()
    requests_done = len(reused)
    intervals = dict.fromkeys(spent, requests_done)
    intervals |= {"allocate": chunk_count, "commit": chunk_count, "append": step_count + requests_done}
    net = {phase: max(0.0, spent[phase] - clock * intervals[phase]) for phase in spent}
    record: dict[str, Any] = {f"{phase}_us": net[phase] / requests_done / 1e3 for phase in PROMPT_PHASES}
    record["prompt_us"] = sum(net[phase] for phase in PROMPT_PHASES) / requests_done / 1e3
    record["append_us"] = net["append"] / token_count / 1e3
    record["decode_step_us"] = net["append"] / step_count / 1e3
    record["allocate_p99_us"] = max(0.0, float(np.percentile(allocations, 99)) - clock) / 1e3
    record["requests_us"] = [nanoseconds / 1e3 for nanoseconds in requests_ns]
    record["chunks"] = chunk_count
    record["clock_ns"] = clock
    record["appends"] = token_count
    record["steps"] = step_count
    record["hit_rate"] = sum(reused) / sum(len(prompt) for prompt in requests.prompts)
    record["reused"] = reused
    return record


def bookkeeping_bytes(make: Callable[[], Driver], requests: Slice, **settings: Any) -> int:
    """Bytes that a manager holds on to when all requests have come and gone: what it allocated for itself when it was
    made, and what it keeps about cached content, token ids included. The pages are in nobody's memory here.

    Counted by tracemalloc, so memory that is not Python's or numpy's is not seen.
    """
    gc.collect()
    tracemalloc.start()
    try:
        driver = make()
        measure(driver, requests, **settings)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
