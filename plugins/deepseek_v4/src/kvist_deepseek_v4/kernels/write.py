"""New rows into their pages: one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_deepseek_v4.kernels.batch import Batch
from kvist_deepseek_v4.rows import StreamRows


def write_rows(rows: StreamRows, own: torch.Tensor, batch: Batch) -> None:
    """Store ``own [T, ...]``, a row for each token of the step, as :meth:`StreamRows.write` does."""
    _launch(rows, own, None, batch)


def write_states(rows: StreamRows, own: torch.Tensor, position_bias: torch.Tensor, batch: Batch) -> None:
    """The same for states ``[T, 2, width]``: to the gates ``position_bias [ratio, width]`` is added."""
    _launch(rows, own, position_bias, batch)


def _launch(rows: StreamRows, own: torch.Tensor, bias: torch.Tensor | None, batch: Batch) -> None:
    [view] = rows.views
    table, width = batch.table(rows.group), own[0].numel() if len(own) else 0
    if len(own):
        _write[(len(own),)](
            own.contiguous(),
            bias.contiguous() if bias is not None else None,
            view,
            table,
            batch.token_rows,
            batch.positions,
            batch.ends,
            view.stride(0),
            table.stride(0),
            ratio=len(bias) if bias is not None else 1,
            width=width,
            tile=triton.next_power_of_2(width),
            slots=rows.slots,
            block_rows=rows.block_rows,
        )


@triton.jit
def _write(
    own,
    bias,
    view,
    table,
    token_rows,
    positions,
    ends,
    page_stride,
    table_stride,
    ratio: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, position = tl.load(token_rows + token), tl.load(positions + token)
    block = position // block_rows
    page = tl.load(table + row * table_stride + block).to(tl.int64)
    # In a ring a later token of the step may have the same slot.
    later = position + slots < tl.minimum((block + 1) * block_rows, tl.load(ends + row))
    count = tl.where((page < 0) | later, 0, width)
    element = tl.arange(0, tile)
    values = tl.load(own + token * width + element, mask=element < width, other=0.0)
    if bias is not None:
        gate: tl.constexpr = width // 2
        at = (position % ratio) * gate + element - gate
        more = tl.load(bias + at, mask=(element >= gate) & (element < width), other=0.0)
        values = values.to(tl.float32) + more.to(tl.float32)
    tl.store(view + page * page_stride + (position % slots) * width + element, values, mask=element < count)
