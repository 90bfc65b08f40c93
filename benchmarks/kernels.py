"""Kernels of the plugins on a GPU, each beside plain torch on the same tensors.

Times are medians of single launches by the GPU's own clock, after a check that both give the same. Sizes are those of
the published models. Without a GPU nothing is measured, and the page says so; with TRITON_INTERPRET=1 the check is made
there all the same, at tiny sizes in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator

import harness
import torch
from kernel_case import PEER, Call, Kernel
from records import Figure, paired

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
    "kernels.mamba2_drafts",
    "kernels.delta_net_decode",
    "kernels.delta_net_prefill",
)


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


def kernels(device: torch.device, *, tiny: bool = False) -> Iterator[Kernel]:
    """All of them. Each has to be called before the next one is taken."""
    # They need triton, which is not everywhere.
    import kernel_deepseek_v4
    import kernel_mamba
    import kernel_minimax_m3

    yield from kernel_deepseek_v4.kernels(device, kernel_deepseek_v4.TINY if tiny else kernel_deepseek_v4.Sizes())
    yield from kernel_minimax_m3.kernels(device, kernel_minimax_m3.TINY if tiny else kernel_minimax_m3.Sizes())
    yield from kernel_mamba.kernels(device, kernel_mamba.TINY if tiny else kernel_mamba.Sizes())


def measure(options: argparse.Namespace) -> list[Figure]:
    """All kernels, or none without a GPU."""
    with torch.inference_mode():
        if torch.cuda.is_available():
            runs = 20 if options.quick else 100
            return [time_kernel(kernel, runs) for kernel in kernels(torch.device("cuda"))]
        why = "not measured: this machine has no GPU"
        if os.environ.get("TRITON_INTERPRET") == "1":
            for kernel in kernels(torch.device("cpu"), tiny=True):
                harness.progress(kernel.figure)
                compare(kernel)
            why += "; in Triton's interpreter it gives what its peer gives"
        return [Figure(figure=name, value=None, unit="us", peer=PEER, note=why) for name in FIGURES]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
