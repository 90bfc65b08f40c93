"""Compiles every kernel for one GPU (compute capability 9.0), at the sizes of the published model; needs no GPU.

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

from kvist_minimax_m3.kernels import score, select, split, transposed

#: 64 query heads on 4 key heads of size 128, 4 index heads of size 128, blocks of 128 tokens, 16 blocks per query.
ROWS = {"query": "*bf16", "key": "*bf16", "value": "*bf16", "pages": "*i32", "positions": "*i64", "scale": "fp32"}
PARTS = {"part_best": "*fp32", "part_total": "*fp32", "part_value": "*fp32"}
PAGES = {"key_page": "i64", "value_page": "i64"}
ATTENTION = {"key_heads": 4, "group": 16, "size": 128, "value_size": 128, "page_tokens": 128, "block_tokens": 128}

SCORE = {**ROWS, "tiles": "*i32", "scores": "*fp32", "page_stride": "i64"}
SCORE_SIZES = {"heads": 4, "tile_rows": 64, "size": 128, "page_tokens": 128, "block_tokens": 128}
SPLIT = {**ROWS, **PARTS, **PAGES, "tiles": "*i32", "blocks": "*i32"}

KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "scores": (score._score, SCORE, {**SCORE_SIZES, "compute": tl.bfloat16}),
    "scores of fp8": (score._score, {**SCORE, "key": "*fp8e4nv"}, {**SCORE_SIZES, "compute": tl.bfloat16}),
    "selection": (
        select._select,
        {"scores": "*fp32", "positions": "*i64", "ids": "*i32"},
        {"heads": 4, "rows": 4, "columns": 1024, "slots": 16, "topk": 16, "block_tokens": 128}
        | {"local_blocks": 1, "init_blocks": 0},
    ),
    "decode": (split._attend, SPLIT, {**ATTENTION, "dense": False, "tile_rows": 16}),
    "dense": (split._attend, SPLIT, {**ATTENTION, "dense": True, "tile_rows": 64, "blocks": None, "block_tokens": 64}),
    "combine": (
        split._combine,
        {"best": "*fp32", "total": "*fp32", "value": "*fp32", "output": "*bf16"},
        {"rows": 2, "parts": 16, "size": 128},
    ),
    "prefill": (
        transposed._attend_block,
        {**ROWS, **PARTS, **PAGES, "starts": "*i64", "entries": "*i64"},
        {**ATTENTION, "queries": 4, "tile_rows": 64},
    ),
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
