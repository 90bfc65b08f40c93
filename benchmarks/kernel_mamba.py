"""The recurrent mixers' kernels, as kernels.py measures them beside mamba-ssm, flash-linear-attention or torch."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch
from kernel_case import PEER, Call, Kernel

from kvist.step import Step
from kvist_mamba import reference
from kvist_mamba.kernels.conv import convolve
from kvist_mamba.kernels.delta_net import delta_net_scan
from kvist_mamba.kernels.mamba2 import mamba2_scan
from kvist_mamba.kernels.replay import ReplayRows
from kvist_mamba.kernels.rows import Rows


@attrs.frozen
class Sizes:
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
    history: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def channels(self) -> int:
        """Of Mamba-2's convolution."""
        return self.heads * self.size + 2 * self.groups * self.columns


TINY = Sizes(
    sequences=2,
    chunk=37,
    heads=4,
    size=6,
    groups=2,
    columns=5,
    key_heads=2,
    value_heads=4,
    value_size=6,
    history=6,
    dtype=torch.float32,
)


class Setting:
    """A device, sizes and a source of random numbers."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.tolerance = 1e-4 if sizes.dtype == torch.float32 else 2e-2
        self._generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.sizes.dtype, device=self.device)

    def step(self, row_count: int, tokens: int, drafts: int = 0, start: int = 0) -> tuple[Step, torch.Tensor]:
        """Rows in shuffled pages, and their pages ``[rows]``, with drafts ``[rows, 1 + tokens]``."""
        columns = 1 + tokens if drafts else 1
        pages = (np.random.default_rng(0).permutation(row_count * columns) + 1).astype(np.int32).reshape(-1, columns)
        counts, slots = np.full(row_count, tokens, np.int32), np.arange(row_count, dtype=np.int32)
        drafted = np.full(row_count if drafts else 0, drafts, np.int32)
        step = Step(0, slots, counts, counts + start, 0, (pages,), (np.zeros((0, 2), np.int32),), drafts=drafted)
        where = torch.from_numpy(pages).to(self.device).long()
        return step, where if drafts else where[:, 0]

    def staged(self, row_count: int, tokens: int) -> tuple[Rows, torch.Tensor]:
        """The rows of such a step, and their pages."""
        step, pages = self.step(row_count, tokens)
        rows = Rows(self.device)
        rows.stage(step, 0)
        return rows, pages


def kernels(device: torch.device, sizes: Sizes) -> Iterator[Kernel]:
    """Convolution and state update of a decoding batch, scans of a chunk of prefill, and drafts by replay."""
    setting = Setting(device, sizes)
    yield convolution(setting)
    yield from mamba2(setting)
    yield from delta_net(setting)


def convolution(setting: Setting) -> Kernel:
    sizes = setting.sizes
    rows, pages = setting.staged(sizes.sequences, 1)
    channels = sizes.channels
    raw, weight = setting.random(sizes.sequences, channels).to(sizes.dtype), setting.random(channels, 4).to(sizes.dtype)
    states = setting.random(sizes.sequences + 1, channels, 3).to(sizes.dtype)
    own = states.clone()

    def plain() -> torch.Tensor:
        window = torch.cat([states[pages], raw[:, :, None]], dim=2)
        states[pages] = window[:, :, 1:]
        return torch.nn.functional.silu((window.float() * weight.float()).sum(-1))

    return Kernel(
        "kernels.mamba_convolution", lambda: convolve(raw, weight, None, own, rows, activation=True), plain, 1e-4
    )


def mamba2(setting: Setting) -> Iterator[Kernel]:
    sizes, random = setting.sizes, setting.random
    heads, size, columns = sizes.heads, sizes.size, sizes.columns
    a, d, bias = -random(heads).exp(), random(heads), random(heads)
    limits = (0.0, float("inf"))

    def scan(rows: Rows, conv: torch.Tensor, dt: torch.Tensor, states: torch.Tensor) -> Call:
        values = setting.empty(len(conv), heads * size)

        def run() -> torch.Tensor:
            mamba2_scan(conv, dt, a, d, bias, limits, states, rows, values)
            return values

        return run

    rows, pages = setting.staged(sizes.sequences, 1)
    states = random(sizes.sequences + 1, heads, size, columns)
    conv, dt = random(sizes.sequences, sizes.channels), random(sizes.sequences, heads)
    split = reference.split_mamba2(conv, heads, size, columns)
    ours = scan(rows, conv, dt, states.clone())
    theirs, peer = _mamba2_decode(split, dt, a, d, bias, states, pages)
    yield Kernel("kernels.mamba2_decode", ours, theirs, setting.tolerance, peer)

    rows, pages = setting.staged(1, sizes.chunk)
    conv, dt = random(sizes.chunk, sizes.channels), random(sizes.chunk, heads)
    split = reference.split_mamba2(conv, heads, size, columns)
    ours = scan(rows, conv, dt, states.clone())
    theirs, peer = _mamba2_prefill(split, dt, a, d, bias, states[1].clone(), sizes.dtype)
    yield Kernel("kernels.mamba2_prefill", ours, theirs, setting.tolerance, peer)

    # Half a history and four tokens, beside four tokens with a page for the state after each of them.
    before, count, history = sizes.history // 2, 4, sizes.history
    step, pages = setting.step(sizes.sequences, count, drafts=count - 1, start=before)
    conv, dt = random(sizes.sequences * count, sizes.channels), random(sizes.sequences * count, heads)
    kept_conv, kept_dt = random(pages.max() + 1, sizes.channels, history), random(pages.max() + 1, heads, history)
    states = random(int(pages.max()) + 1, heads, size, columns)
    replay = ReplayRows(setting.device, history)
    replay.stage(step, 0)
    replay.turn(torch.zeros(len(states), 1, dtype=torch.int64, device=setting.device))
    values = setting.empty(len(conv) + sizes.sequences * history, heads * size)
    own = states.clone()

    def replayed() -> torch.Tensor:
        tokens, gates = replay.join(kept_conv, conv), replay.join(kept_dt, dt)
        mamba2_scan(tokens, gates, a, d, bias, limits, own, replay, values)
        replay.keep(kept_conv, tokens)
        replay.keep(kept_dt, gates)
        return replay.values(values)

    for page in pages[:, 0].tolist():
        x, b, c = reference.split_mamba2(kept_conv[page, :, :before].T, heads, size, columns)
        gate = torch.nn.functional.softplus(kept_dt[page, :, :before].T + bias)
        states[page] = reference.mamba2_scan(x, gate, b, c, a, d, states[page], [before])[1][0]
    rows = Rows(setting.device)
    rows.stage(step, 0)
    theirs = scan(rows, conv, dt, states)
    yield Kernel("kernels.mamba2_drafts", replayed, theirs, setting.tolerance, "a state after each draft")


def delta_net(setting: Setting) -> Iterator[Kernel]:
    sizes, random = setting.sizes, setting.random
    shape = (sizes.value_heads, sizes.value_size, sizes.value_size)
    states = random(sizes.sequences + 1, *shape)
    for name, row_count, tokens in (
        ("kernels.delta_net_decode", sizes.sequences, 1),
        ("kernels.delta_net_prefill", 1, sizes.chunk),
    ):
        rows, pages = setting.staged(row_count, tokens)
        count = row_count * tokens
        conv = random(count, 2 * sizes.key_heads * shape[1] + shape[0] * shape[2])
        decay, beta = -random(count, shape[0]).exp(), random(count, shape[0]).sigmoid()
        values, own = setting.empty(count, shape[0] * shape[2]), states.clone()

        def ours() -> torch.Tensor:
            delta_net_scan(conv, decay, beta, own, rows, values)  # noqa: B023 - called before the next turn
            return values  # noqa: B023

        split = reference.split_delta_net(conv, *shape)
        if tokens == 1:
            theirs, peer = _delta_net_decode(split, decay, beta, states.clone(), pages)
        else:
            theirs, peer = _delta_net_prefill(split, decay, beta, states[1].clone(), sizes.dtype)
        yield Kernel(name, ours, theirs, setting.tolerance, peer)


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

        def plain() -> torch.Tensor:
            step = torch.nn.functional.softplus(dt + bias)
            return reference.mamba2_chunked_scan(x, step, b, c, a, d, state, [len(x)])[0].flatten(1)

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


def _delta_net_prefill(
    split: Split, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, dtype: torch.dtype
) -> tuple[Call, str]:
    """flash-linear-attention's scan in chunks where it is installed, torch otherwise; of one sequence with a state
    before it."""
    q, k, v = split
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:

        def plain() -> torch.Tensor:
            return reference.delta_net_chunked_scan(q, k, v, decay, beta, state, [len(v)])[0].flatten(1)

        return plain, PEER
    q, k, v = (each.to(dtype)[None].contiguous() for each in split)

    def scan() -> torch.Tensor:
        result, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            g=decay[None],
            beta=beta[None],
            scale=q.shape[3] ** -0.5,
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return torch.as_tensor(result)[0].flatten(1)

    return scan, "flash-linear-attention"
