"""The gated delta rule: short rows token by token, long ones in chunks as matrix products.

A program has some columns of one head of one row, and keeps their state from chunk to chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvist_mamba.kernels.elementwise import unit, unit_rows
from kvist_mamba.kernels.rows import CHUNK_TOKENS, Rows

#: Elements of the state that a program holds, token by token and in chunks.
_TILE = 2048
_CHUNK_TILE = 4096
#: Smallest side of a matrix in a product.
_DOT = 16


def delta_net_scan(
    conv: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
    values: torch.Tensor,
) -> None:
    """:func:`kvist_mamba.reference.delta_net_scan` of every row.

    conv float32 ``[T, 2 Hk dk + Hv dv]``, activated ``q | k | v``; log_decay, beta ``[T, Hv]``; states
    ``[page, Hv, dk, dv]`` are brought up to date, values ``[T, Hv dv]`` filled in but for padding.
    """
    _, heads, key_size, value_size = states.shape
    key_heads = (conv.shape[1] - heads * value_size) // (2 * key_size)
    tensors = (conv, log_decay, beta, states, values)
    numbers = (log_decay.stride(0), beta.stride(0), states.stride(0), key_size**-0.5)
    sizes = {"heads": heads, "key_heads": key_heads, "key_size": key_size, "value_size": value_size}
    if len(rows.short):
        height = triton.next_power_of_2(key_size)
        block = min(triton.next_power_of_2(value_size), max(1, _TILE // height))
        _scan[(len(rows.short), heads, triton.cdiv(value_size, block))](
            *tensors,
            rows.short,
            rows.begins,
            rows.ends,
            rows.sources,
            rows.targets,
            *numbers,
            **sizes,
            height=height,
            block=block,
        )
    if len(rows.long):
        height = max(_DOT, triton.next_power_of_2(key_size))
        block = max(_DOT, min(triton.next_power_of_2(value_size), _CHUNK_TILE // height))
        _chunked_scan[(len(rows.long), heads, triton.cdiv(value_size, block))](
            *tensors,
            rows.long,
            rows.chunks,
            rows.begins,
            rows.sources,
            rows.targets,
            *numbers,
            **sizes,
            chunk=CHUNK_TOKENS,
            height=height,
            block=block,
        )


@triton.jit
def _scan(
    conv,
    log_decay,
    beta,
    states,
    values,
    short,
    begins,
    ends,
    sources,
    targets,
    decay_stride,
    beta_stride,
    page_stride,
    scale,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.load(short + tl.program_id(0)), tl.program_id(1)
    source = tl.load(sources + row)
    if source <= 0:
        return
    keys: tl.constexpr = key_heads * key_size
    channels: tl.constexpr = 2 * keys + heads * value_size
    line = tl.arange(0, height)
    element = tl.program_id(2) * block + tl.arange(0, block)
    low, known = line < key_size, element < value_size
    mask = low[:, None] & known[None, :]
    own = (head * key_size + line)[:, None] * value_size + element[None, :]
    state = tl.load(states + source.to(tl.int64) * page_stride + own, mask=mask, other=0.0).to(tl.float32)
    key_at = head // (heads // key_heads) * key_size + line
    begin, end = tl.load(begins + row).to(tl.int64), tl.load(ends + row).to(tl.int64)
    for token in range(begin, end):
        at = conv + token * channels
        query = unit(tl.load(at + key_at, mask=low, other=0.0)) * scale
        key = unit(tl.load(at + keys + key_at, mask=low, other=0.0))
        value = tl.load(at + 2 * keys + head * value_size + element, mask=known, other=0.0)
        state *= tl.exp(tl.load(log_decay + token * decay_stride + head).to(tl.float32))
        strength = tl.load(beta + token * beta_stride + head).to(tl.float32)
        change = strength * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * change[None, :]
        result = tl.sum(state * query[:, None], 0)
        out = values + (token * heads + head) * value_size + element
        tl.store(out, result.to(values.dtype.element_ty), mask=known)
        target = tl.load(targets + token)
        if target >= 0:
            place = states + target.to(tl.int64) * page_stride + own
            tl.store(place, state.to(states.dtype.element_ty), mask=mask)


@triton.jit
def _chunked_scan(
    conv,
    log_decay,
    beta,
    states,
    values,
    long,
    chunks,
    begins,
    sources,
    targets,
    decay_stride,
    beta_stride,
    page_stride,
    scale,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    chunk: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
):
    which, head = long + 3 * tl.program_id(0), tl.program_id(1)
    row = tl.load(which)
    source, begin = tl.load(sources + row).to(tl.int64), tl.load(begins + row)
    keys: tl.constexpr = key_heads * key_size
    channels: tl.constexpr = 2 * keys + heads * value_size
    line = tl.arange(0, height)
    element = tl.program_id(2) * block + tl.arange(0, block)
    low, known = line < key_size, element < value_size
    mask = low[:, None] & known[None, :]
    own = (head * key_size + line)[:, None] * value_size + element[None, :]
    state = tl.load(states + source * page_stride + own, mask=mask, other=0.0).to(tl.float32)
    key_at = head // (heads // key_heads) * key_size + line
    nth = tl.arange(0, chunk)
    later = nth[:, None] >= nth[None, :]
    for index in range(tl.load(which + 1), tl.load(which + 2)):
        first, count = tl.load(chunks + 2 * index), tl.load(chunks + 2 * index + 1)
        inside = (nth < count) & (first + nth >= begin)
        token = (first + nth).to(tl.int64)
        at = conv + token[:, None] * channels
        near, wide = inside[:, None] & low[None, :], inside[:, None] & known[None, :]
        query = unit_rows(tl.load(at + key_at[None, :], mask=near, other=0.0)) * scale
        key = unit_rows(tl.load(at + keys + key_at[None, :], mask=near, other=0.0))
        value = tl.load(at + 2 * keys + head * value_size + element[None, :], mask=wide, other=0.0)
        strength = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
        # Differences of sums that have grown: in float32 they would lose what the sums are larger than they.
        decay = tl.load(log_decay + token * decay_stride + head, mask=inside, other=0.0).to(tl.float64)
        total, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        before = tl.exp(total.to(tl.float32))
        between = tl.exp(tl.where(later, total[:, None] - total[None, :], float("-inf")).to(tl.float32))
        # What a token adds depends on what all before it in the chunk have added: one equation after the other.
        likeness = tl.dot(key, tl.trans(key), input_precision="tf32x3") * between * strength[:, None]
        found = tl.dot(key, state, input_precision="tf32x3") * before[:, None]
        added = strength[:, None] * (value - found)
        for number in range(1, chunk):
            now = nth == number
            weight = tl.sum(tl.where(now[:, None] & (nth < number)[None, :], likeness, 0.0), 0)
            added -= tl.where(now[:, None], tl.sum(weight[:, None] * added, 0)[None, :], 0.0)
        weights = tl.dot(query, tl.trans(key), input_precision="tf32x3") * between
        result = tl.dot(query, state, input_precision="tf32x3") * before[:, None]
        result += tl.dot(weights, added, input_precision="tf32x3")
        out = values + (token[:, None] * heads + head) * value_size + element[None, :]
        tl.store(out, result.to(values.dtype.element_ty), mask=wide)
        left = tl.exp((whole - total).to(tl.float32))
        kept = tl.dot(tl.trans(left[:, None] * key), added, input_precision="tf32x3")
        state = tl.exp(whole.to(tl.float32)) * state + kept
        target = tl.load(targets + first + count - 1)
        if target >= 0:
            tl.store(states + target.to(tl.int64) * page_stride + own, state.to(states.dtype.element_ty), mask=mask)
