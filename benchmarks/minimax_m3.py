"""MiniMax-M3's block-sparse attention: how exact it is, and what a decoded token costs as the context grows.

The error is that of paged logits beside transformers' own, in float32, over four tiny models: the largest difference of
any token over the largest logit. The cost is one sparse layer of the published model (64 query heads, 4 key heads of
size 128, 4 index heads, 16 blocks of 128 keys, bf16) on the torch reference: all processor time that a decoded token
takes at 131,072 tokens of context over the same at 8,192, without the scores of the index, which have to look at every
index key and are given apart. The peer is dense attention of the same sizes on Kvist's CPU backend, in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import harness
import numpy as np
import torch
from records import Figure

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.families import Backends, page_layout
from kvist.attention.gqa import GQAInputs
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream
from kvist.step import Step
from kvist_attention_cpu.backend import NativeCpuBackend
from kvist_minimax_m3 import reference
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.spec import cache_spec

FIGURES = ("minimax.max_relative_error", "minimax.decode_cost_128k_over_8k")
PARTS = ("error", "cost")
PEER = "dense attention (kvist, cpu)"

SHORT, LONG = 8_192, 131_072
QUERY_HEADS, KEY_HEADS, INDEX_HEADS, SIZE = 64, 4, 4, 128
RULE = Selection(128, 16, 1)
#: index heads, topk, local blocks
VARIANTS = ((2, 3, 1), (4, 3, 1), (2, 4, 2), (2, 1, 0))
MODEL_TOKENS = 400


def tiny_model(index_heads: int, topk: int, local: int) -> Any:
    """Random weights; blocks of 4 tokens, so that a query reads at most 16 of them."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=24,
        dense_intermediate_size=40,
        shared_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        index_n_heads=index_heads,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=topk,
        index_local_blocks=local,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=1024,
        initializer_range=0.25,
        pad_token_id=0,
    )
    model = MiniMaxM3VLForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.2)
    return model


def model_error(model: Any, page_tokens: int, seed: int) -> float:
    """Three sequences in ragged chunks over shuffled pages; largest relative difference of any token's logits."""
    from kvist_minimax_m3.transformers import MiniMaxM3Adapter

    random = np.random.default_rng(seed)
    prompts = [random.integers(1, 97, count).astype(np.int32) for count in (MODEL_TOKENS, MODEL_TOKENS // 3, 50)]
    expected = [model(input_ids=torch.from_numpy(each).long()[None], use_cache=False).logits[0] for each in prompts]
    spec = cache_spec(model.config.to_dict(), block_tokens=page_tokens, dtype="float32", fingerprint="benchmark")
    adapter = MiniMaxM3Adapter(model, spec)
    classes = {"minimax_m3": reference.ReferenceBackend}
    layout = Layout.build(spec, 16 << 20, page_layout(adapter.needs, classes))
    memory = DeviceMemory(layout)
    memory.bytes.fill_(255)  # NaN wherever nothing was written
    backends = Backends(memory, adapter.needs, classes)
    adapter.bind(backends)
    manager = PagedCacheManager(layout)
    manager.shuffle_free_pages(random)
    sequences = [manager.open(prompt, reuse=False) for prompt in prompts]
    worst = 0.0
    while left := [n for n, sequence in enumerate(sequences) if sequence.computed < len(prompts[n])]:
        counts = {n: int(min(random.choice([1, 3, 17, 40]), len(prompts[n]) - sequences[n].computed)) for n in left}
        begins = {n: sequences[n].computed for n in left}
        plan = manager.plan([Run(sequences[n], counts[n]) for n in left])
        step = plan.commit()
        order = [next(n for n in left if sequences[n] is run.sequence) for run in plan.runs]
        ids = np.concatenate([prompts[n][begins[n] : begins[n] + counts[n]] for n in order])
        memory.apply(step)
        backends.begin(step)
        rows = torch.arange(len(ids))
        got = adapter.forward(torch.from_numpy(ids).long(), torch.from_numpy(step.positions), rows)
        manager.complete(step)
        for n, logits in zip(order, got.split([counts[n] for n in order])):
            want = expected[n][begins[n] : begins[n] + counts[n]]
            worst = max(worst, float((logits - want).abs().max() / want.abs().max()))
    adapter.detach()
    return worst


def error(options: argparse.Namespace) -> Figure:
    worst = 0.0
    for number, variant in enumerate(VARIANTS):
        harness.progress(f"error: model {number + 1} of {len(VARIANTS)}")
        model = tiny_model(*variant)
        for page_tokens in (4,) if options.quick else (1, 2, 4):
            worst = max(worst, model_error(model, page_tokens, number))
    return Figure(figure="minimax.max_relative_error", value=worst * 1e6, unit="e-6", at_most=10)


def layer_spec(sparse: bool) -> CacheSpec:
    row = RowFormat((KEY_HEADS, SIZE), "bfloat16")
    streams = [Stream(name, row, History()) for name in ("k", "v")]
    streams += [Stream("index_k", RowFormat((SIZE,), "bfloat16"), History())] if sparse else []
    return CacheSpec([Layer(0, streams)], RULE.block_tokens, "benchmark")


def decoding(backend_class: type[AttentionBackend], sparse: bool) -> Callable[[int], None]:
    """One decode step over pages that are full of random rows, for any length of context."""
    spec = layer_spec(sparse)
    arrangement = backend_class.page_layout(spec)
    page_bytes = Layout.build(spec, 1 << 32, arrangement).groups[0].page_bytes
    blocks = LONG // RULE.block_tokens
    memory = DeviceMemory(Layout.build(spec, page_bytes * (blocks + 2), arrangement))
    generator = torch.Generator().manual_seed(0)
    for page in memory.pages(0):
        rows = page.view(torch.bfloat16)
        rows.copy_(torch.randn(rows.shape, generator=generator))
    backend = backend_class(BackendContext(memory))
    table = (np.random.default_rng(0).permutation(blocks) + 1).astype(np.int32)[None]
    shape = {"query": (QUERY_HEADS, SIZE), "key": (KEY_HEADS, SIZE), "value": (KEY_HEADS, SIZE)}
    shape |= {"index_query": (INDEX_HEADS, SIZE), "index_key": (SIZE,)} if sparse else {}
    rows = {name: torch.randn(1, *size, generator=generator).bfloat16() for name, size in shape.items()}
    inputs = SparseInputs(**rows, scale=SIZE**-0.5, selection=RULE) if sparse else GQAInputs(**rows, scale=SIZE**-0.5)
    one = np.ones(1, np.int32)

    def decode(length: int) -> None:
        step = Step(0, 0 * one, one, length * one, 1, (table,), (np.zeros((0, 2), np.int32),))
        backend.begin(step)
        output = backend.forward(0, inputs)
        assert bool(output.isfinite().all())

    return decode


@attrs.define
class Clock:
    seconds: float = 0.0


@contextmanager
def timing_scores() -> Iterator[Clock]:
    """Counts the time that the reference spends on the scores of the index, reading index keys included."""
    clock, scores = Clock(), reference.ReferenceBackend.scores

    def timed(*arguments: Any) -> torch.Tensor:
        begin = time.process_time()
        result = scores(*arguments)
        clock.seconds += time.process_time() - begin
        return result

    reference.ReferenceBackend.scores = timed
    try:
        yield clock
    finally:
        reference.ReferenceBackend.scores = scores


def cost(options: argparse.Namespace) -> Figure:
    harness.progress(f"cost: filling two layers of {LONG} tokens")
    sparse, dense = decoding(reference.ReferenceBackend, sparse=True), decoding(NativeCpuBackend, sparse=False)
    ours: dict[int, list[float]] = {SHORT: [], LONG: []}
    scores: dict[int, list[float]] = {SHORT: [], LONG: []}
    theirs: dict[int, list[float]] = {SHORT: [], LONG: []}
    runs = 7 if options.quick else 31
    # In a model, the other layers' rows pass through the processor's caches between two steps of one layer.
    others = torch.zeros(64 << 20, dtype=torch.uint8)
    with timing_scores() as clock:
        for run in range(runs + 1):
            for length in (SHORT, LONG):
                others += 1
                clock.seconds, begin = 0.0, time.process_time()
                sparse(length)
                taken, scored = time.process_time() - begin, clock.seconds
                others += 1
                begin = time.process_time()
                dense(length)
                if run:  # the first one grows buffers
                    ours[length].append(taken - scored)
                    scores[length].append(scored)
                    theirs[length].append(time.process_time() - begin)
    milliseconds = {
        name: {n: 1e3 * statistics.median(each[n]) for n in each}
        for name, each in (("rest", ours), ("scores", scores), ("dense", theirs))
    }
    value, peer_value = (each[LONG] / each[SHORT] for each in (milliseconds["rest"], milliseconds["dense"]))
    shown = {name: f"{each[SHORT]:.2f} ms at 8k, {each[LONG]:.2f} ms at 128k" for name, each in milliseconds.items()}
    return Figure(
        figure="minimax.decode_cost_128k_over_8k",
        value=value,
        unit="x",
        peer=PEER,
        peer_value=peer_value,
        ratio=peer_value / value,
        runs=runs,
        at_most=1.25,
        note=f"selection and attention {shown['rest']}; scores {shown['scores']}; dense attention {shown['dense']}",
    )


def measure(options: argparse.Namespace) -> list[Figure]:
    """The parts that were asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module="transformers")
    asked = options.only or PARTS
    with torch.inference_mode():
        return [part(options) for name, part in (("error", error), ("cost", cost)) if name in asked]


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure, parts=PARTS))
