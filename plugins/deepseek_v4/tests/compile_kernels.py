"""Compiles every kernel for one GPU (compute capability 9.0), at the sizes of the published models; needs no GPU.

``test_kernels.py`` runs this file in a process of its own, without the interpreter. The interpreter accepts Python that
the compiler does not, so this is what shows that the kernels are Triton.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvist_deepseek_v4.kernels import attend, compress, score, select, write

#: Shared memory that a program may have on this GPU.
SHARED = 232448

#: V4-Flash in bfloat16: 64 heads of 512, of which 64 rotate; windows of 128; 64 index heads of 128; blocks of 128.
TABLES = dict.fromkeys(("table", "state_table", "pool_table", "token_rows", "positions", "tiles"), "*i32")
TABLES |= dict.fromkeys(("firsts", "begins", "ends", "closed"), "*i32")
TYPES = {
    **TABLES,
    **dict.fromkeys(("query", "own", "kv", "pool", "view", "rows", "keys", "norm", "output", "value"), "*bf16"),
    **dict.fromkeys(("bias", "states", "cos", "sin", "scores", "weights", "sinks", "best", "total"), "*fp32"),
    **dict.fromkeys(("part_best", "part_total", "part_value"), "*fp32"),
    **dict.fromkeys(("ids",), "*i32"),
    **dict.fromkeys(("page_stride", "state_page", "page", "pool_page"), "i64"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
}
STATES = {**TYPES, "view": "*fp32"}
WRITE = {"slots": 128, "block_rows": 128}
COMPRESS = {"size": 512, "tile": 512, "tokens": 8, "pairs": 32, "block_tokens": 128}
ATTEND = {"heads": 64, "tile_heads": 32, "size": 512, "tile": 512, "rows": 32, "window": 128, "slots": 128}
ATTEND |= {"block_tokens": 128, "compute": tl.bfloat16, "split": False}
NO_IDS = {**ATTEND, "ids": None}

KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "window rows": (write._write, TYPES, {**WRITE, "ratio": 1, "width": 512, "tile": 512, "bias": None}),
    "states": (write._write, STATES, {**WRITE, "ratio": 4, "width": 2048, "tile": 2048, "slots": 8}),
    "compress 4": (
        compress._compress,
        {**TYPES, "rows": "*bf16"},
        {**COMPRESS, "ratio": 4, "series": 2, "tokens": 4, "state_slots": 8, "block_rows": 32},
    ),
    "compress 128": (
        compress._compress,
        {**TYPES, "rows": "*bf16"},
        {**COMPRESS, "ratio": 128, "series": 1, "state_slots": 128, "block_rows": 1},
    ),
    "index scores": (
        score._score,
        TYPES,
        {"ratio": 4, "heads": 64, "tile_heads": 64, "size": 128, "tile": 128, "rows": 64, "block_rows": 32}
        | {"compute": tl.bfloat16},
    ),
    "selection": (select._select, TYPES, {"ratio": 4, "tile": 1024}),
    "attention, window": (attend._attend, TYPES, {**NO_IDS, "ratio": 0, "block_rows": 1}),
    "attention, all": (attend._attend, TYPES, {**NO_IDS, "ratio": 128, "block_rows": 1}),
    "attention, selected": (attend._attend, TYPES, {**ATTEND, "ratio": 4, "block_rows": 32}),
    "attention in parts": (attend._attend, TYPES, {**ATTEND, "ratio": 4, "block_rows": 32, "split": True}),
    "combine": (attend._combine, TYPES, {"rows": 2, "parts": 8, "size": 512, "tile": 512}),
}
#: What the backend launches a kernel with, where it is not the default.
WARPS = {attend._attend: 8}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    options = {"num_warps": WARPS[kernel]} if kernel in WARPS else {}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for name, what in KERNELS.items():
        compiled = compile_kernel(*what)
        shared = compiled.metadata.shared
        assert shared <= SHARED, f"{name} needs {shared} bytes of shared memory"
        print(name, len(compiled.asm["cubin"]), "bytes,", shared, "bytes shared")
        sys.stdout.flush()
