"""DeepSeek-V4: how exact it is over pages, what a token takes, and what it brings to keep tails at restore points only.

`deepseek.max_logit_error` is the largest difference of a logit from transformers', over a tiny model with every kind of
layer in float32, computed at once, token by token, in chunks and with drafts that are taken back.

`deepseek.bytes_per_token_flash` and `_pro` are what a token adds to the history, in bfloat16, padding included. Beside
them stands what a scheduler charges that counts every row of every kind for every token, windows and states too, as
TensorRT-LLM's does for a prompt.

`deepseek.reuse_of_all_tails` replays the agentic trace on V4-Flash's cache without a limit of memory, with what windows
and states need kept at ends in whole blocks, branches and every 512 blocks, and beside it with all of it kept at every
block: `deepseek.tail_bytes_of_all_tails` is what it then holds of the latter's bytes. The trade between the two is
drawn as an SVG file (--chart).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import chart
import harness
import numpy as np
import synthetic
from chart import Line, Panel
from records import Figure

from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.replay.engine import Engine, ReplayResult
from kvist.replay.traces import TraceRequest
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec

FIGURES = (
    "deepseek.max_logit_error",
    "deepseek.bytes_per_token_flash",
    "deepseek.bytes_per_token_pro",
    "deepseek.reuse_of_all_tails",
    "deepseek.tail_bytes_of_all_tails",
)
#: The drive of the tiny model over pages that the plugin's tests use.
_SUPPORT = Path(__file__).resolve().parent.parent / "plugins" / "deepseek_v4" / "tests" / "support"
_BLOCK_TOKENS = 128
#: More than the trace can fill.
_NO_LIMIT = 1 << 42
#: Blocks between regular restore points: in the figures, and in the chart.
_EVERY = 512
_INTERVALS = (None, 512, 256, 128, 64, 32)
CHART = Path(__file__).resolve().parent.parent / "results" / "deepseek_v4.svg"

#: The released schedules, with the multi-token prediction layer's ratio at the end.
MODELS: dict[str, dict[str, Any]] = {
    "V4-Flash": {"num_hidden_layers": 43, "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0]},
    "V4-Pro": {"num_hidden_layers": 61, "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0]},
}


def _spec(name: str) -> CacheSpec:
    from kvist_deepseek_v4 import cache_spec

    return cache_spec({"model_type": "deepseek_v4", **MODELS[name]}, block_tokens=_BLOCK_TOKENS, dtype="bfloat16")


def error(quick: bool) -> Figure:
    """The largest difference of a logit."""
    sys.path.insert(0, str(_SUPPORT))
    import torch
    from deepseek_v4_drive import Cache, tokens
    from deepseek_v4_models import model_logits

    torch.set_num_threads(1)
    count = 70 if quick else 230
    prompt, random = tokens(count), np.random.default_rng(0)
    wanted = model_logits(prompt)
    worst, where = 0.0, ""
    for block in (16, 64):
        for case, size in (("whole", count), ("token by token", 1), ("chunks of 7", 7), ("drafts", 1)):
            drafts = 4 if case == "drafts" else 0
            with Cache(block=block, drafts=4, alone=True) as cache:
                sequence = cache.manager.open(prompt[:1], reuse=False)
                while (at := sequence.computed) < count - drafts:
                    new = min(size, count - at)
                    right = int(random.integers(0, drafts + 1))
                    sequence.extend(prompt[sequence.known : at + new])
                    ids = np.concatenate([prompt[at : at + new + right], tokens(drafts - right, at)])
                    [got] = cache.logits([(sequence, ids, drafts)], [new + right])
                    sequence.extend(prompt[sequence.known : at + new + right])
                    off = float((got[: new + right] - wanted[at : at + new + right]).abs().max())
                    if not off <= worst:
                        worst, where = off, f"{case}, blocks of {block} tokens"
    note = f"worst: {where}; logits are up to {float(wanted.abs().max()):.1f}"
    return Figure(figure=FIGURES[0], value=worst * 1e6, unit="millionths", at_most=100.0, note=note)


def sizes() -> Iterator[Figure]:
    from kvist_deepseek_v4.sizes import fixed_bytes, growing_bytes_per_token

    harness.progress("| model | history of a token | padding | windows and states of a sequence | every row |")
    harness.progress("|---|--:|--:|--:|--:|")
    for figure, name in zip(FIGURES[1:3], MODELS):
        spec = _spec(name)
        layout = Layout.build(spec, 1 << 36)
        history = next(group for group in layout.groups if not group.sparse)
        taken, content = history.page_bytes / _BLOCK_TOKENS, float(growing_bytes_per_token(spec))
        assert history.content_bytes == content * _BLOCK_TOKENS
        every = float(sum(s.row.row_bytes / s.tokens_per_row for layer in spec.layers for s in layer.streams))
        fixed = fixed_bytes(spec)
        harness.progress(
            f"| {name} | {content:,.0f} B | {taken - content:,.0f} B | {fixed / 2**20:,.1f} MiB | {every:,.0f} B |"
        )
        yield Figure(
            figure=figure,
            value=taken,
            unit="bytes",
            peer="every row of every token",
            peer_value=every,
            ratio=every / taken,
            note=f"{content:,.0f} bytes without padding; windows and states take {fixed:,} bytes of a sequence",
        )


def others() -> None:
    """What other engines count for packed rows, by their rules; nothing is run."""
    from kvist_deepseek_v4.charges import charges

    harness.progress("| model | engine | a token | windows and states | a prompt of 65,536 tokens |")
    harness.progress("|---|---|--:|--:|--:|")
    for name, model in MODELS.items():
        for charge in charges({"model_type": "deepseek_v4", **model}, 65_536, 8192):
            harness.progress(
                f"| {name} | {charge.engine} | {charge.token:,.0f} B | {charge.running / 2**20:,.1f} MiB | "
                f"{charge.prompt / 2**30:,.2f} GiB |"
            )


def replayed(requests: Sequence[TraceRequest], policy: RestorePolicy) -> tuple[ReplayResult, int]:
    """The trace, and the bytes of windows and states that are cached at its end."""
    layout = Layout.build(_spec("V4-Flash"), _NO_LIMIT)
    manager = PagedCacheManager(layout, policy)
    result = Engine(manager, concurrency=4, chunk_tokens=8192).run(requests)
    assert result.stats is not None
    kept = {group.name: group for group in result.stats.groups}
    assert all(group.evicted == 0 for group in result.stats.groups)
    return result, sum(kept[group.name].cached * group.page_bytes for group in layout.groups if group.sparse)


def reuse(options: argparse.Namespace) -> list[Figure]:
    requests = synthetic.trace_requests(options.traces, "agentic_trace.jsonl")
    if requests is None:
        why = "no agentic_trace.jsonl: give its folder with --traces"
        return [Figure(figure=name, value=None, unit="%", note=why) for name in FIGURES[3:]]
    if options.quick:
        requests = requests[:150]
    every, all_tails = replayed(requests, RestorePolicy(1))
    harness.progress("| restore points | reused | of all tails | tails | of all tails |\n|---|--:|--:|--:|--:|")
    harness.progress(f"| every block | {100 * every.hit_rate:.1f} % | 100 % | {all_tails / 2**30:,.1f} GiB | 100 % |")
    found: dict[tuple[bool, int | None], tuple[float, float]] = {}
    for whole in (True,) if options.quick else (False, True):
        for blocks in (_EVERY,) if options.quick else _INTERVALS:
            result, tails = replayed(requests, RestorePolicy(blocks, whole))
            share, size = 100 * result.reused_tokens / every.reused_tokens, 100 * tails / all_tails
            found[whole, blocks] = size, share
            points = ("ends in whole blocks" if whole else "ends") + (f", every {blocks} blocks" if blocks else "")
            rate = 100 * result.hit_rate
            harness.progress(f"| {points} | {rate:.1f} % | {share:.1f} % | {tails / 2**30:,.1f} GiB | {size:.1f} % |")
    if not options.quick:
        draw(options.chart, found)
    size, share = found[True, _EVERY]
    note = f"restore points at ends in whole blocks, branches and every {_EVERY} blocks of {_BLOCK_TOKENS} tokens"
    return [
        Figure(figure=FIGURES[3], value=share, unit="% of tokens", target=95.0, note=note),
        Figure(figure=FIGURES[4], value=size, unit="% of bytes", at_most=5.0, note=note),
    ]


def draw(path: Path, found: dict[tuple[bool, int | None], tuple[float, float]]) -> None:
    """What each restore policy reuses, over what it keeps."""
    names = {True: "ends in whole blocks", False: "ends inside blocks, too"}
    lines = [
        Line(name, [found[whole, blocks] for blocks in _INTERVALS], colour)
        for colour, (whole, name) in enumerate(names.items())
    ]
    title = "Restore points every 512, 256, 128, 64, 32 blocks, left: never"
    labels = "bytes of tails, % of all", "tokens reused, % of what all tails bring"
    chart.write(path, [Panel(title, *labels, lines, linear=True, key_at_bottom=True)])
    harness.progress(f"written: {path}")


def measure(options: argparse.Namespace) -> list[Figure]:
    figures = [error(options.quick), *sizes()]
    others()
    return [*figures, *reuse(options)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chart", type=Path, metavar="FILE", default=CHART, help="default: results/deepseek_v4.svg")


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure, add_options))
