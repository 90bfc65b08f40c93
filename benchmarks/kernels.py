"""Kernels of the plugins on a GPU, each beside plain torch on the same tensors.

Times are medians of single launches by the GPU's own clock, after a check that both give the same. Without a GPU
nothing is measured, and the page says so. Sizes are those of the published models.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import harness
import numpy as np
import torch
from kernel_deepseek_v4 import deepseek_v4
from kernel_table import PEER, Call, Kernel
from records import Figure, paired

from kvist.step import Step

FIGURES = (
    "kernels.deepseek_v4_states",
    "kernels.deepseek_v4_compressed_4",
    "kernels.deepseek_v4_compressed_128",
    "kernels.deepseek_v4_scores",
    "kernels.deepseek_v4_selection",
    "kernels.deepseek_v4_decode",
    "kernels.deepseek_v4_decode_128",
    "kernels.deepseek_v4_prefill",
    "kernels.minimax_m3_scores",
    "kernels.minimax_m3_selection",
    "kernels.minimax_m3_decode",
    "kernels.minimax_m3_prefill",
    "kernels.mamba_convolution",
    "kernels.mamba2_decode",
    "kernels.mamba2_prefill",
    "kernels.delta_net_decode",
)


@attrs.frozen
class MiniMaxSizes:
    """A batch of decoding sequences, and one prompt's last chunk."""

    context: int = 32_768
    sequences: int = 16
    chunk: int = 512
    query_heads: int = 64
    key_heads: int = 4
    size: int = 128
    block_tokens: int = 128
    topk: int = 16
    dtype: torch.dtype = torch.bfloat16


def minimax_m3(device: torch.device, sizes: MiniMaxSizes | None = None) -> Iterator[Kernel]:
    """Scores, selection and decode of a batch, and attention of a chunk of prefill."""
    from kvist_minimax_m3.batch import Batch
    from kvist_minimax_m3.blocks import block_scores, select_blocks
    from kvist_minimax_m3.inputs import SparseInputs
    from kvist_minimax_m3.kernels import score, select, split, transposed
    from kvist_minimax_m3.reference import attend
    from kvist_minimax_m3.rows import LayerRows, gather
    from kvist_minimax_m3.selection import Selection

    sizes = sizes or MiniMaxSizes()
    rule = Selection(sizes.block_tokens, sizes.topk, 1)
    blocks = sizes.context // sizes.block_tokens
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(sizes.dtype)

    page_count = sizes.sequences * blocks + 1
    rows = LayerRows(
        random(page_count, sizes.block_tokens, sizes.key_heads, sizes.size),
        random(page_count, sizes.block_tokens, sizes.key_heads, sizes.size),
        random(page_count, sizes.block_tokens, sizes.size),
    )
    table = (np.random.default_rng(0).permutation(page_count - 1) + 1).astype(np.int32).reshape(sizes.sequences, -1)

    def staged(row_count: int, queries: int) -> tuple[Batch, SparseInputs]:
        counts = np.full(row_count, queries, np.int32)
        lengths = np.full(row_count, sizes.context, np.int32)
        slots = np.arange(row_count, dtype=np.int32)
        step = Step(
            0, slots, counts, lengths, row_count if queries == 1 else 0, (table,), (np.zeros((0, 2), np.int32),)
        )
        batch = Batch(device, 0, sizes.block_tokens)
        batch.stage(step)
        tokens = row_count * queries
        query, key = (tokens, sizes.query_heads, sizes.size), (tokens, sizes.key_heads, sizes.size)
        new = random(*query), random(*key), random(*key), random(*key), random(tokens, sizes.size)
        return batch, SparseInputs(*new, scale=sizes.size**-0.5, selection=rule)

    def plain_scores(batch: Batch, inputs: SparseInputs) -> torch.Tensor:
        parts = []
        for row, length in enumerate(batch.lengths):
            tokens = slice(batch.starts[row], batch.starts[row + 1])
            key = gather(rows.index_key, batch.pages[row], length)
            parts.append(block_scores(inputs.index_query[tokens], key, batch.positions[tokens], rule.block_tokens))
        return torch.cat(parts)

    def paged(batch: Batch, inputs: SparseInputs) -> tuple[Any, ...]:
        return rows.key, rows.value, batch, inputs.scale, rule.block_tokens

    batch, inputs = staged(sizes.sequences, 1)
    scores = plain_scores(batch, inputs)
    ids = select_blocks(scores, batch.positions, rule)
    output = torch.empty_like(inputs.query)

    def decode() -> torch.Tensor:
        split.attend_split(inputs.query, *paged(batch, inputs), ids, output)
        return output

    # Products of bf16 add up in another order, and weights of attention are rounded to bf16.
    exact = sizes.dtype == torch.float32
    yield Kernel(
        "kernels.minimax_m3_scores",
        lambda: score.block_scores(inputs.index_query, rows.index_key, batch, rule.block_tokens),
        lambda: plain_scores(batch, inputs),
        1e-4 if exact else 1e-2,
    )
    yield Kernel(
        "kernels.minimax_m3_selection",
        lambda: select.select_blocks(scores, batch.positions, rule),
        lambda: select_blocks(scores, batch.positions, rule),
    )
    yield Kernel("kernels.minimax_m3_decode", decode, lambda: attend(inputs, rows, batch, ids), 1e-4 if exact else 2e-2)
    chunk_batch, chunk = staged(1, sizes.chunk)
    chunk_ids = select_blocks(plain_scores(chunk_batch, chunk), chunk_batch.positions, rule)
    chunk_output = torch.empty_like(chunk.query)

    def prefill() -> torch.Tensor:
        transposed.attend_transposed(chunk.query, *paged(chunk_batch, chunk), chunk_ids, 0, chunk_output)
        return chunk_output

    yield Kernel(
        "kernels.minimax_m3_prefill",
        prefill,
        lambda: attend(chunk, rows, chunk_batch, chunk_ids),
        1e-4 if exact else 2e-2,
    )


@attrs.frozen
class RecurrentSizes:
    """A batch of decoding sequences, and one prompt's chunk: Nemotron-H's Mamba-2, Qwen3-Next's gated delta net."""

    sequences: int = 64
    chunk: int = 2048
    heads: int = 128
    size: int = 64
    groups: int = 8
    columns: int = 128
    key_heads: int = 16
    value_heads: int = 32
    value_size: int = 128
    dtype: torch.dtype = torch.bfloat16


def recurrent(device: torch.device, sizes: RecurrentSizes | None = None) -> Iterator[Kernel]:
    """Convolution and state update of a decoding batch, and the scan of a chunk of prefill."""
    from kvist_mamba import reference
    from kvist_mamba.kernels.conv import convolve
    from kvist_mamba.kernels.delta_net import delta_net_scan
    from kvist_mamba.kernels.mamba2 import mamba2_scan
    from kvist_mamba.kernels.rows import Rows

    sizes = sizes or RecurrentSizes()
    generator = torch.Generator(device).manual_seed(0)
    heads, size, groups, columns = sizes.heads, sizes.size, sizes.groups, sizes.columns
    tolerance = 1e-4 if sizes.dtype == torch.float32 else 2e-2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def staged(row_count: int, tokens: int) -> tuple[Rows, torch.Tensor]:
        """Rows in shuffled pages, and their pages."""
        pages = (np.random.default_rng(0).permutation(row_count) + 1).astype(np.int32)
        counts, slots = np.full(row_count, tokens, np.int32), np.arange(row_count, dtype=np.int32)
        no_copies = np.zeros((0, 2), np.int32)
        rows = Rows(device)
        rows.stage(Step(0, slots, counts, counts, 0, (pages[:, None],), (no_copies,)), 0)
        return rows, torch.from_numpy(pages).to(device).long()

    rows, pages = staged(sizes.sequences, 1)
    channels = heads * size + 2 * groups * columns
    raw, weight = random(sizes.sequences, channels).to(sizes.dtype), random(channels, 4).to(sizes.dtype)
    conv_states = random(sizes.sequences + 1, channels, 3).to(sizes.dtype)
    own_conv_states = conv_states.clone()

    def plain_convolution() -> torch.Tensor:
        window = torch.cat([conv_states[pages], raw[:, :, None]], dim=2)
        conv_states[pages] = window[:, :, 1:]
        return torch.nn.functional.silu((window.float() * weight.float()).sum(-1))

    yield Kernel(
        "kernels.mamba_convolution",
        lambda: convolve(raw, weight, None, own_conv_states, rows, activation=True),
        plain_convolution,
        1e-4,
    )

    a, d, bias = -random(heads).exp(), random(heads), random(heads)
    limits = (0.0, float("inf"))

    def mamba2(rows: Rows, conv: torch.Tensor, dt: torch.Tensor, states: torch.Tensor) -> Call:
        values = torch.empty(len(conv), heads * size, dtype=sizes.dtype, device=device)

        def run() -> torch.Tensor:
            mamba2_scan(conv, dt, a, d, bias, limits, states, rows, values)
            return values

        return run

    states = random(sizes.sequences + 1, heads, size, columns)
    conv, dt = random(sizes.sequences, channels), random(sizes.sequences, heads)
    theirs, peer = _mamba2_decode(reference.split_mamba2(conv, heads, size, columns), dt, a, d, bias, states, pages)
    yield Kernel("kernels.mamba2_decode", mamba2(rows, conv, dt, states.clone()), theirs, tolerance, peer)
    rows, pages = staged(1, sizes.chunk)
    conv, dt = random(sizes.chunk, channels), random(sizes.chunk, heads)
    theirs, peer = _mamba2_prefill(
        reference.split_mamba2(conv, heads, size, columns), dt, a, d, bias, states[1].clone(), sizes.dtype
    )
    yield Kernel("kernels.mamba2_prefill", mamba2(rows, conv, dt, states.clone()), theirs, tolerance, peer)

    rows, pages = staged(sizes.sequences, 1)
    shape = (sizes.value_heads, sizes.value_size, sizes.value_size)
    states = random(sizes.sequences + 1, *shape)
    conv = random(sizes.sequences, 2 * sizes.key_heads * shape[1] + shape[0] * shape[2])
    decay, beta = -random(sizes.sequences, shape[0]).exp(), random(sizes.sequences, shape[0]).sigmoid()
    values = torch.empty(sizes.sequences, shape[0] * shape[2], dtype=sizes.dtype, device=device)
    own_states = states.clone()

    def delta_net() -> torch.Tensor:
        delta_net_scan(conv, decay, beta, own_states, rows, values)
        return values

    theirs, peer = _delta_net_decode(reference.split_delta_net(conv, *shape), decay, beta, states, pages)
    yield Kernel("kernels.delta_net_decode", delta_net, theirs, tolerance, peer)


Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _mamba2_decode(
    split: Split,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    pages: torch.Tensor,
) -> tuple[Call, str]:
    """mamba-ssm's update where it is installed, torch otherwise."""
    x, b, c = split
    heads, size, columns = states.shape[1:]
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    except ImportError:
        repeat = heads // b.shape[1]

        def plain() -> torch.Tensor:
            step = torch.nn.functional.softplus(dt + bias)[:, :, None]
            key, query = (each.repeat_interleave(repeat, dim=1)[:, :, None] for each in (b, c))
            state = torch.exp(step * a[:, None])[..., None] * states[pages] + (step * x)[..., None] * key
            states[pages] = state
            return ((state * query).sum(-1) + d[:, None] * x).flatten(1)

        return plain, PEER
    # One value per head, as strides of 0 tell it.
    wide = dt[:, :, None].expand(-1, -1, size)
    rates, skips = a[:, None, None].expand(heads, size, columns), d[:, None].expand(heads, size)
    biases, rows = bias[:, None].expand(heads, size), pages.int()

    def update() -> torch.Tensor:
        result: torch.Tensor = selective_state_update(
            states, x, wide, rates, b, c, skips, dt_bias=biases, dt_softplus=True, state_batch_indices=rows
        )
        return result.flatten(1)

    return update, "mamba-ssm"


def _mamba2_prefill(
    split: Split,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[Call, str]:
    """mamba-ssm's scan where it is installed, torch otherwise; of one sequence with a state before it."""
    x, b, c = split
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        from kvist_mamba.reference import mamba2_chunked_scan

        def plain() -> torch.Tensor:
            step = torch.nn.functional.softplus(dt + bias)
            return mamba2_chunked_scan(x, step, b, c, a, d, state, [len(x)])[0].flatten(1)

        return plain, PEER
    x, b, c = (each.to(dtype)[None].contiguous() for each in (x, b, c))

    def scan() -> torch.Tensor:
        result, _ = mamba_chunk_scan_combined(
            x,
            dt[None],
            a,
            b,
            c,
            chunk_size=128,
            D=d,
            initial_states=state[None],
            dt_bias=bias,
            dt_softplus=True,
            return_final_states=True,
        )
        return torch.as_tensor(result)[0].flatten(1)

    return scan, "mamba-ssm"


def _delta_net_decode(
    split: Split, decay: torch.Tensor, beta: torch.Tensor, states: torch.Tensor, pages: torch.Tensor
) -> tuple[Call, str]:
    """flash-linear-attention's step where it is installed, on states that lie side by side; torch otherwise."""
    q, k, v = split
    scale = q.shape[2] ** -0.5
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    except ImportError:
        repeat = v.shape[1] // k.shape[1]

        def plain() -> torch.Tensor:
            query, key = (
                torch.nn.functional.normalize(each, dim=2).repeat_interleave(repeat, dim=1)[..., None]
                for each in (q, k)
            )
            state = torch.exp(decay)[:, :, None, None] * states[pages]
            change = beta[:, :, None] * (v - (state * key).sum(2))
            state = state + key * change[:, :, None]
            states[pages] = state
            return (state * query * scale).sum(2).flatten(1)

        return plain, PEER
    state = states[pages]

    def step() -> torch.Tensor:
        nonlocal state
        result, state = fused_recurrent_gated_delta_rule(
            *(each[:, None].contiguous() for each in (q, k, v)),
            g=decay[:, None],
            beta=beta[:, None],
            scale=scale,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return torch.as_tensor(result).flatten(1)

    return step, "flash-linear-attention"


#: What is measured: for each plugin a function of the device that gives its kernels.
TABLE: tuple[Callable[[torch.device], Iterator[Kernel]], ...] = (deepseek_v4, minimax_m3, recurrent)


def compare(kernel: Kernel) -> None:
    """Raise AssertionError unless both calls give the same."""
    torch.testing.assert_close(
        kernel.ours().float(), kernel.theirs().float(), rtol=kernel.tolerance, atol=kernel.tolerance
    )


def microseconds(call: Call) -> float:
    """One launch by the GPU's clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))


def time_kernel(kernel: Kernel, runs: int) -> Figure:
    harness.progress(kernel.figure)
    compare(kernel)  # compiles, too
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for call, times in zip((kernel.ours, kernel.theirs), taken):
            times.append(microseconds(call))
    note = f"fastest {min(taken[0]):.0f} us, slowest {max(taken[0]):.0f} us of {statistics.median(taken[0]):.0f} us"
    return paired(kernel.figure, "us", taken[0], kernel.peer, taken[1], note=note)


def measure(options: argparse.Namespace) -> list[Figure]:
    """All kernels, or none without a GPU."""
    if not torch.cuda.is_available():
        harness.progress("kernels: this machine has no GPU; nothing is measured")
        why = "not measured: this machine has no GPU"
        return [Figure(figure=name, value=None, unit="us", peer=PEER, note=why) for name in FIGURES]
    runs = 20 if options.quick else 100
    with torch.inference_mode():
        return [time_kernel(kernel, runs) for make in TABLE for kernel in make(torch.device("cuda"))]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
