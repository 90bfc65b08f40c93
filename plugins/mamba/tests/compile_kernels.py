"""Compiles every kernel for one GPU (compute capability 9.0), at the sizes of published models; needs no GPU.

``test_kernels.py`` runs this file in a process of its own, without the interpreter. The interpreter accepts Python that
the compiler does not, so this is what shows that the kernels are Triton.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvist_mamba.kernels import conv, delta_net, mamba1, mamba2, replay
from kvist_mamba.kernels.rows import CHUNK_TOKENS

ROWS = dict.fromkeys(("begins", "ends", "sources", "targets", "short", "long", "chunks", "written"), "*i32")
ROWS |= dict.fromkeys(("token_starts", "token_sources", "token_rows", "starts", "own_starts", "pages"), "*i32")
ROWS |= dict.fromkeys(("positions", "counts", "drafts", "dones"), "*i32") | {"checkpoints": "*i64", "blame": "*fp32"}
#: A model in bfloat16 with recurrent states in float32, at most 2 GiB from page to page.
TYPES = {
    **ROWS,
    **dict.fromkeys(("inputs", "weight", "bias", "dt", "b", "c", "d", "dt_bias", "beta", "values"), "*bf16"),
    **dict.fromkeys(("kept", "new", "joined"), "*bf16"),
    **dict.fromkeys(("conv", "u", "a", "sums", "log_decay", "states"), "*fp32"),
    **dict.fromkeys(("dt_low", "dt_high", "scale"), "fp32"),
}
CONV = {**TYPES, "states": "*bf16"}
#: Nemotron-H: 128 heads of size 64 in 8 groups, 128 columns. Bamba-9B has 256 in one group.
NEMOTRON = {"heads": 128, "group_heads": 16, "size": 64, "columns": 128}
BAMBA = {"heads": 128, "group_heads": 128, "size": 64, "columns": 256}
#: Qwen3-Next: 16 key heads and 32 value heads of size 128.
QWEN = {"heads": 32, "key_heads": 16, "key_size": 128, "value_size": 128}

KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "convolution": (conv._convolve, CONV, {"tokens": 16, "block": 128, "columns": 3, "activation": True}),
    "convolution of LFM2": (
        conv._convolve,
        CONV,
        {"tokens": 1, "block": 128, "columns": 2, "activation": False, "bias": None},
    ),
    "convolution state": (conv._update, CONV, {"block": 128, "columns": 3, "slots": 4}),
    "mamba1": (mamba1._scan, TYPES, {"block": 64, "columns": 16, "width": 16}),
    "mamba2": (mamba2._scan, TYPES, {**NEMOTRON, "block": 16, "width": 128}),
    "mamba2, state of 16 bits": (
        mamba2._scan,
        {**TYPES, "states": "*bf16"},
        {**NEMOTRON, "block": 16, "width": 128},
    ),
    "mamba2 in chunks": (
        mamba2._chunked_scan,
        TYPES,
        {**NEMOTRON, "chunk": CHUNK_TOKENS, "block": 32, "width": 128},
    ),
    "mamba2 in chunks, wide": (
        mamba2._chunked_scan,
        TYPES,
        {**BAMBA, "chunk": CHUNK_TOKENS, "block": 16, "width": 256},
    ),
    "delta net": (delta_net._scan, TYPES, {**QWEN, "height": 128, "block": 16}),
    "delta net in chunks": (
        delta_net._chunked_scan,
        TYPES,
        {**QWEN, "chunk": CHUNK_TOKENS, "height": 128, "block": 32},
    ),
    "replay, turns": (replay._turn, TYPES, {"history": 16, "block": 32}),
    "replay, joining": (replay._join, TYPES, {"history": 16, "block": 128}),
    "replay, keeping": (replay._keep, TYPES, {"history": 16, "slots": 16, "block": 128}),
    "replay, moving": (replay._move, TYPES, {}),
}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    for name, what in KERNELS.items():
        compiled = compile_kernel(*what)
        print(name, len(compiled.asm["cubin"]), "bytes,", compiled.metadata.shared, "bytes shared")
        sys.stdout.flush()
