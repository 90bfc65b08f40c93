"""Recurrent and hybrid models: how exact their states are, what they take, and what a budget for states brings.

`mamba.max_relative_error` is the worst of all model types and cases: layers in float32 over pages, against the layers
of transformers over the whole sequence. `mamba.bfloat16_state_error` is how far states are from those in float32 when
they are stored in bfloat16 after each of 400 tokens, for the worst kind of mixer. `mamba.bytes_over_formula` is what a
sequence's states take on the device beside the bytes of their elements, for the worst of three models and two sizes of
blocks.

`mamba.tokens_per_80gib` counts how many sequences of 4,000 tokens fit into 80 GiB, times their tokens. Beside it stands
what vLLM's layout would hold, by its rule: pages of attention are made as long as a layer's state is large, states are
padded to them, and layers are allocated in groups of as many as the rarer kind has. The peer itself is not run.

`mamba.agentic_reuse` replays the agentic trace on Nemotron-H-8B's cache: room for 2M tokens of keys and values, which
states cannot take, and beside it a tenth of that for states.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import harness
import numpy as np
import synthetic
from records import Figure

from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.replay.engine import Engine, ReplayResult
from kvist.replay.traces import TraceRequest
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, ceil_div

FIGURES = (
    "mamba.max_relative_error",
    "mamba.bfloat16_state_error",
    "mamba.bytes_over_formula",
    "mamba.tokens_per_80gib",
    "mamba.tokens_per_80gib_bamba",
    "mamba.tokens_per_80gib_qwen3_next",
    "mamba.agentic_reuse",
)
#: The drive of single layers over pages that the plugin's tests use.
_SUPPORT = Path(__file__).resolve().parent.parent / "plugins" / "mamba" / "tests" / "support"
_MEMORY = 80 << 30
_LENGTHS = (500, 4_000, 32_000)
_PEER = "vLLM's rule"
#: Tokens of a block of vLLM's attention kernels: what its blocks are multiples of.
_ALIGNMENT = 16
_ATTENTION_TOKENS = 2_000_000
_BLOCK_TOKENS = 64
#: The longest prompts of the agentic trace are longer than the model was made for.
_NO_LIMIT = 1 << 20

MODELS: dict[str, dict[str, Any]] = {
    "Nemotron-H-8B": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "Bamba-9B": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
    "Qwen3-Next": {"model_type": "qwen3_next"},
}


def _spec(name: str, block_tokens: int, **options: Any) -> CacheSpec:
    from kvist_mamba import cache_spec

    config = {**MODELS[name], "max_position_embeddings": _NO_LIMIT}
    return cache_spec(config, block_tokens=block_tokens, dtype="bfloat16", **options)


def _state_page(spec: CacheSpec) -> int:
    """Bytes of the page with all states of a sequence."""
    return next(group.page_bytes for group in Layout.build(spec, _MEMORY).groups if group.exact)


@attrs.frozen
class Sizes:
    """What a model keeps. Bytes of one layer: ``state`` per sequence, ``row`` per token."""

    states: int
    state: int
    attentions: int
    row: int

    @classmethod
    def of(cls, spec: CacheSpec) -> Sizes:
        kept: dict[bool, list[int]] = {True: [], False: []}
        for layer in spec.layers:
            exact = layer.streams[0].retention.exact
            kept[exact].append(sum(stream.row.row_bytes for stream in layer.streams))
        return cls(len(kept[True]), kept[True][0], len(kept[False]), kept[False][0])


def theirs(sizes: Sizes, length: int) -> tuple[int, int]:
    """Sequences of ``length`` tokens that vLLM's layout holds in the memory, and tokens of its blocks of attention."""
    block = _ALIGNMENT * ceil_div(sizes.state, _ALIGNMENT * sizes.row)
    few, many = sorted((sizes.states, sizes.attentions))
    group = many if many < 1.5 * few else few
    blocks = _MEMORY // (block * sizes.row * group)
    needed = ceil_div(sizes.states, group) + ceil_div(sizes.attentions, group) * ceil_div(length, block)
    return blocks // needed, block


def ours(name: str, length: int) -> int:
    """The same for Kvist, by its own count, with a page of states and the reserved pages."""
    capacity = PagedCacheManager(Layout.build(_spec(name, 16), _MEMORY)).capacity()
    return capacity.requests(length)


def capacities() -> Iterator[Figure]:
    harness.progress(
        "| model | state of a sequence | keys and values of a token | tokens | sequences | vLLM's rule | ratio "
        "| vLLM's block |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    ids = dict(zip(MODELS, FIGURES[3:6]))
    for name in MODELS:
        sizes = Sizes.of(_spec(name, 16))
        for length in _LENGTHS:
            mine, (peers, block) = ours(name, length), theirs(sizes, length)
            state, token = sizes.states * sizes.state / 2**20, sizes.attentions * sizes.row / 1024
            harness.progress(
                f"| {name} | {state:.1f} MiB | {token:.0f} KiB | {length:,} | {mine:,} | {peers:,} "
                f"| {mine / peers:.2f}x | {block:,} tokens |"
            )
            if length == 4_000:
                yield Figure(
                    figure=ids[name],
                    value=mine * length,
                    unit="tokens",
                    peer=_PEER,
                    peer_value=peers * length,
                    ratio=mine / peers,
                    target=1.0,
                    note=f"{mine} and {peers} sequences; a prefix is reused in blocks of 16 tokens, or of {block}",
                )


def overhead() -> Figure:
    """Bytes of a page of states over those of its elements."""
    worst, where = 0.0, ""
    for name in MODELS:
        for block_tokens in (16, 64):
            spec = _spec(name, block_tokens)
            sizes = Sizes.of(spec)
            ratio = _state_page(spec) / (sizes.states * sizes.state)
            if ratio > worst:
                worst, where = ratio, f"{name}, blocks of {block_tokens} tokens"
    return Figure(figure=FIGURES[2], value=worst, unit="", at_most=1.02, note=f"worst: {where}")


def drafts() -> None:
    """States of a sequence while four drafts are undecided: a page before them and after each query token, or one with
    a history."""
    harness.progress(
        "| model | pages of a sequence with 4 drafts, snapshots | replay | larger than a plain state by |\n"
        "|---|--:|--:|--:|"
    )
    for name in MODELS:
        plain, replay = _state_page(_spec(name, 16)), _state_page(_spec(name, 16, rollback="replay"))
        more = 100 * (replay / plain - 1)
        harness.progress(f"| {name} | {6 * plain / 2**20:,.0f} MiB | {replay / 2**20:.0f} MiB | {more:.1f} % |")


def error(quick: bool) -> Figure:
    """The worst relative error over all model types and cases."""
    sys.path.insert(0, str(_SUPPORT))
    import torch
    from mamba_drive import Drive

    from kvist_mamba.tiny import CONFIGS

    torch.set_num_threads(1)
    count = 40 if quick else 150
    cases = {
        "whole": [(count, 0, count)],
        "token by token": [(1, 0, 1)] * count,
        "chunks": [(size, 0, size) for size in (5, 2, 1, 13)] + [(19, 0, 19)] * ((count - 21) // 19),
        "drafts": [(5, 0, 5)] + [(1, 5, 1 + number % 6) for number in range((count - 15) // 6)],
    }
    worst, where = 0.0, ""
    for model_type in sorted(CONFIGS):
        for rollback in ("snapshots", "replay"):
            drive = Drive(model_type, rollback=rollback)
            for case, steps in cases.items():
                if rollback == "replay" and case != "drafts":
                    continue
                text = np.random.default_rng(len(case)).integers(2, 97, count + 10).astype(np.int32)
                request = drive.open(text, reuse=False)
                for new, drafts, kept in steps:
                    drive.step([(request, new, drafts)], [kept])
                found = drive.error(request)
                if found > worst:
                    worst, where = found, f"{model_type}, {case}, {rollback}"
                drive.manager.close(request.sequence)
        harness.progress(f"{model_type}: worst so far {worst:.1e} ({where})")
    return Figure(figure=FIGURES[0], value=worst * 1e6, unit="millionths", at_most=10.0, note=f"worst: {where}")


def rounding(quick: bool) -> Figure:
    """States in bfloat16 beside the same in float32, and what becomes of the layers' outputs."""
    sys.path.insert(0, str(_SUPPORT))
    import torch
    from mamba_drive import Drive

    counts = (10, 60) if quick else (10, 100, 400)
    worst, where = 0.0, ""
    harness.progress("| model type | tokens | error of the state | error of the output |\n|---|--:|--:|--:|")
    for model_type in ("mamba", "mamba2", "qwen3_next"):
        text = np.random.default_rng(0).integers(2, 97, counts[-1]).astype(np.int32)
        drives = [Drive(model_type, state_dtype=dtype, memory_bytes=8 << 20) for dtype in ("bfloat16", "float32")]
        requests = [drive.open(text) for drive in drives]
        for count in range(1, counts[-1] + 1):
            for drive, request in zip(drives, requests):
                drive.step([(request, 1, 0)])
            if count not in counts:
                continue
            off = 0.0
            for layer in drives[0].mixers:
                rounded, exact = (drive.recurrent_state(request, layer) for drive, request in zip(drives, requests))
                off = max(off, float(torch.linalg.norm(rounded - exact) / torch.linalg.norm(exact)))
            harness.progress(f"| {model_type} | {count} | {off:.1e} | {drives[0].error(requests[0]):.1e} |")
            if off > worst:
                worst, where = off, f"{model_type} after {count} tokens"
    return Figure(figure=FIGURES[1], value=100 * worst, unit="%", at_most=3.0, note=f"worst: {where}")


def replayed(requests: Sequence[TraceRequest], share: float, every_blocks: int | None) -> ReplayResult:
    """The trace on a cache with a share of the attention's bytes beside it for states; ``inf`` for no limit."""
    spec = _spec("Nemotron-H-8B", _BLOCK_TOKENS)
    sizes = Sizes.of(spec)
    attention = _ATTENTION_TOKENS * sizes.attentions * sizes.row
    states = int(attention * share) if share < float("inf") else 1 << 41
    layout = Layout.build(spec, attention + states)
    history = next(group for group in layout.groups if not group.exact)
    # What is a floor for keys and values is a ceiling for states.
    layout = layout.with_floors({history.name: attention // history.page_bytes})
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks))
    return Engine(manager, concurrency=4, chunk_tokens=8192).run(requests)


def reuse(options: argparse.Namespace) -> Figure:
    requests = synthetic.trace_requests(options.traces, "agentic_trace.jsonl")
    if requests is None:
        why = "no agentic_trace.jsonl: give its folder with --traces"
        return Figure(figure=FIGURES[6], value=None, unit="% of prompt tokens", note=why)
    if options.quick:
        requests = requests[:150]
    harness.progress(
        "| states, of attention's bytes | states at | reused | states held and cached |\n|---|---|--:|--:|"
    )
    value = 0.0
    for share in (0.1,) if options.quick else (0.05, 0.1, 0.2, 0.5, 1.0, float("inf")):
        for every in (None,) if options.quick else (None, 128):
            result = replayed(requests, share, every)
            assert result.stats is not None
            group = next(g for g in result.stats.groups if "State" in g.name)
            points = "ends and branches" if every is None else f"and every {every * _BLOCK_TOKENS:,} tokens"
            limit = "no limit" if share == float("inf") else f"{100 * share:g} %"
            kept = f"{group.held + group.cached} of {group.capacity}"
            harness.progress(f"| {limit} | {points} | {100 * result.hit_rate:.1f} % | {kept} |")
            if share == 0.1 and every is None:
                value = 100 * result.hit_rate
    return Figure(figure=FIGURES[6], value=value, unit="% of prompt tokens", note="states at ends and branches")


def measure(options: argparse.Namespace) -> list[Figure]:
    drafts()
    return [error(options.quick), rounding(options.quick), overhead(), *capacities(), reuse(options)]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
