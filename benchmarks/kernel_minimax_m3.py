"""MiniMax-M3's kernels, as kernels.py measures them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from kernel_case import Kernel

from kvist.spec import ceil_div
from kvist.step import Step
from kvist_minimax_m3.batch import Batch
from kvist_minimax_m3.blocks import block_scores, select_blocks
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.kernels import score, select, split, transposed
from kvist_minimax_m3.reference import attend
from kvist_minimax_m3.rows import LayerRows, gather
from kvist_minimax_m3.selection import Selection


@attrs.frozen
class Sizes:
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


TINY = Sizes(
    context=22, sequences=2, chunk=5, query_heads=4, key_heads=2, size=16, block_tokens=4, topk=3, dtype=torch.float32
)


def kernels(device: torch.device, sizes: Sizes) -> Iterator[Kernel]:
    """Scores, selection and decode of a batch, and attention of a chunk of prefill."""
    rule = Selection(sizes.block_tokens, sizes.topk, 1)
    blocks = ceil_div(sizes.context, sizes.block_tokens)
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
