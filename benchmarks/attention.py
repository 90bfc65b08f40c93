"""Decode attention over shuffled pages, beside torch's attention over contiguous memory.

One layer, 32 sequences of 2048 tokens, 8 key heads of size 64, 32 query heads, pages of 16 tokens in random order. What
is counted is the keys and values that attention has to read. Kvist's time includes writing the step's own rows; the
peer gets its keys and values already in one piece, ``[sequence, head, token, element]``, and writes nothing. Both
run on the threads that torch is given (``OMP_NUM_THREADS``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import harness
import numpy as np
import torch
import torch.nn.functional as F
from records import Figure

from kvist.attention.base import BackendContext
from kvist.attention.gqa import GQAInputs
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream
from kvist.step import Step
from kvist_attention_cpu.backend import NativeCpuBackend

FIGURES = ("attention.decode_fp32", "attention.decode_bf16")
PEER = "torch SDPA, contiguous"

SEQUENCES, LENGTH, HEADS, GROUP_SIZE, HEAD_SIZE, BLOCK_TOKENS = 32, 2048, 8, 4, 64, 16


def kvist_decode(
    dtype: torch.dtype, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Fill a paged cache with the same rows; returns one decode step over it."""
    row = RowFormat((HEADS, HEAD_SIZE), str(dtype).removeprefix("torch."))
    streams = (Stream("k", row, History()), Stream("v", row, History()))
    spec = CacheSpec((Layer(0, streams),), BLOCK_TOKENS, "benchmark")
    arrangement = NativeCpuBackend.page_layout(spec)
    blocks = SEQUENCES * LENGTH // BLOCK_TOKENS
    page_bytes = Layout.build(spec, 1 << 32, arrangement).groups[0].page_bytes
    memory = DeviceMemory(Layout.build(spec, page_bytes * (blocks + 2), arrangement))
    backend = NativeCpuBackend(BackendContext(memory))
    table = (np.random.default_rng(0).permutation(blocks) + 1).astype(np.int32).reshape(SEQUENCES, -1)
    slots = np.arange(SEQUENCES, dtype=np.int32)

    def step(tokens: int, length: int) -> Step:
        counts = np.full(SEQUENCES, tokens, np.int32)
        lengths = np.full(SEQUENCES, length, np.int32)
        return Step(0, slots, counts, lengths, SEQUENCES if tokens == 1 else 0, (table,), (np.zeros((0, 2), np.int32),))

    chunk = 64  # attention of the filling steps is not what is measured: few queries make it short
    for first in range(0, LENGTH, chunk):
        part = [rows[:, :, first : first + chunk].transpose(1, 2).flatten(0, 1) for rows in (keys, values)]
        backend.begin(step(chunk, first + chunk))
        no_query = torch.zeros(len(part[0]), HEADS, HEAD_SIZE, dtype=dtype)
        backend.forward(0, GQAInputs(no_query, part[0], part[1], 1.0, window=1))
    inputs = GQAInputs(query[:, :, 0], keys[:, :, -1], values[:, :, -1], HEAD_SIZE**-0.5)

    def run() -> torch.Tensor:
        backend.begin(step(1, LENGTH))
        return backend.forward(0, inputs)

    return run


def decode(figure: str, dtype: torch.dtype, runs: int, target: float) -> Figure:
    """Interleaved runs of both, after checking that they agree."""
    harness.progress(f"{figure}: filling {SEQUENCES} sequences of {LENGTH} tokens")
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(SEQUENCES, HEADS, LENGTH, HEAD_SIZE, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(SEQUENCES, HEADS * GROUP_SIZE, 1, HEAD_SIZE, generator=generator).to(dtype)
    ours = kvist_decode(dtype, keys, values, query)

    # The query heads of a group as queries of one head: the same sums as `enable_gqa`, several times faster in bf16.
    grouped = query.view(SEQUENCES, HEADS, GROUP_SIZE, HEAD_SIZE)

    def peer() -> torch.Tensor:
        return F.scaled_dot_product_attention(grouped, keys, values).view(SEQUENCES, -1, HEAD_SIZE)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours(), peer(), rtol=tolerance, atol=tolerance)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for run, taken in zip((ours, peer), seconds):
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
    gigabytes = 2 * keys.numel() * keys.element_size() / 1e9
    return Figure(
        figure=figure,
        value=gigabytes / statistics.median(seconds[0]),
        unit="GB/s",
        peer=PEER,
        peer_value=gigabytes / statistics.median(seconds[1]),
        ratio=statistics.median(theirs / mine for mine, theirs in zip(*seconds)),
        runs=runs,
        target=target,
    )


def measure(options: argparse.Namespace) -> list[Figure]:
    """Both dtypes."""
    runs = 9 if options.quick else 41
    with torch.inference_mode():
        return [
            decode("attention.decode_fp32", torch.float32, runs, 1.0),
            decode("attention.decode_bf16", torch.bfloat16, runs, 1.0),
        ]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
