"""Tiny random MiniMax-M3 models, what transformers itself computes, and a hostile cache around a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM
from transformers.utils import logging as hf_logging

from kvist.attention.families import Backends, page_layout
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.memory.device import DeviceMemory
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.spec import cache_spec
from kvist_minimax_m3.transformers import MiniMaxM3Adapter

hf_logging.disable_progress_bar()

VOCABULARY = 97

#: index heads, key heads, topk, local blocks; 8 query heads, blocks of 4 tokens.
VARIANTS = {
    "equal heads": (2, 2, 3, 1),
    "two index heads per key head": (4, 2, 3, 1),
    "two local blocks": (2, 2, 4, 2),
    "one block, none forced": (2, 2, 1, 0),
}


@functools.cache
def _tiny(index_heads: int, kv_heads: int, topk: int, local: int, block: int = 4) -> Any:
    torch.manual_seed(0)
    full, sparse = "full_attention", "minimax_m3_sparse"
    config = MiniMaxM3VLTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=24,
        dense_intermediate_size=40,
        shared_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        # Dense and sparse attention, each beside both kinds of MLP.
        layer_types=[full, full, sparse, sparse, sparse],
        mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
        index_n_heads=index_heads,
        index_head_dim=16,
        index_block_size=block,
        index_topk_blocks=topk,
        index_local_blocks=local,
        # transformers' default turns all elements.
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=1024,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = MiniMaxM3VLForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights start at zero, which would hide mistakes.
            if "norm" in name:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Iterator[Callable[..., Any]]:
    """``tiny(variant, block)``: a small model with random weights, the same at each call."""
    used = []

    def build(variant: str = "equal heads", block: int = 4) -> Any:
        used.append(_tiny(*VARIANTS[variant], block))
        return used[-1]

    yield build
    for model in used:
        assert model.config._attn_implementation == "eager", "the test left the model attached"


_logits: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}


def dense_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """What transformers computes for all positions at once, without any cache: ``[tokens, vocabulary]``."""
    key = (id(model), tuple(int(token) for token in tokens))
    if key not in _logits:
        with torch.inference_mode():
            _logits[key] = model(input_ids=torch.tensor([key[1]]), use_cache=False).logits[0]
    return _logits[key]


class Machine:
    """A model on a real manager and memory. Pages come in random order; what nobody owns is NaN before every step, and
    so is what a page holds behind the end of the last sequence in it.

    run: computes tokens of sequences in one step and compares each token's logits with ``expected(sequence)``.
    """

    def __init__(self, model: Any, *, page: int = 4, pages: int = 64, seed: int = 0, **how: Any) -> None:
        manager = how.pop("manager", {})
        backend = how.pop("backend", ReferenceBackend)
        self.tolerance = how.pop("tolerance", 1e-5)
        self.model = model
        # Before attaching, which is when transformers' own answer can still be had.
        self.oracle: dict[int, torch.Tensor] = {}
        spec = cache_spec(model.config.to_dict(), **{"block_tokens": page, "dtype": "float32", **how})
        self.adapter = MiniMaxM3Adapter(model, spec)
        try:
            needs, classes = self.adapter.needs, {"minimax_m3": backend}
            arrangement = page_layout(needs, classes)
            page_bytes = Layout.build(spec, 1 << 26, arrangement).groups[0].page_bytes
            self.layout = Layout.build(spec, page_bytes * pages, arrangement)
            self.memory = DeviceMemory(self.layout)
            self.memory.bytes.fill_(255)
            self.backends = Backends(self.memory, needs, classes)
            self.backend = self.backends["minimax_m3"]
            self.adapter.bind(self.backends)
            self.manager = PagedCacheManager(self.layout, **manager)
            self.manager.shuffle_free_pages(np.random.default_rng(seed))
        except BaseException:
            self.adapter.detach()
            raise

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.adapter.detach()
        self.manager.check()

    def poison(self) -> None:
        """Everything that no sequence and no cached block holds becomes NaN."""
        self.manager.check()
        free = torch.from_numpy(self.manager.free_pages(0)).long()
        self.memory.pages(0)[free] = 255

    def step(self, runs: Sequence[tuple[Any, Sequence[int], int]], accepted: Sequence[int] | None = None) -> Any:
        """One step of ``(sequence, its query tokens, how many of them are drafts)``. Returns logits by run."""
        self.poison()
        plan = self.manager.plan([Run(sequence, len(tokens) - drafts, drafts) for sequence, tokens, drafts in runs])
        assert plan.fits, plan.shortages
        step = plan.commit()
        by_sequence = {id(sequence): tokens for sequence, tokens, _ in runs}
        ordered = [by_sequence[id(run.sequence)] for run in plan.runs]
        ids = torch.tensor([int(token) for tokens in ordered for token in tokens])
        with torch.inference_mode():
            self.memory.apply(step)
            self.backends.begin(step)
            logits = self.adapter.forward(ids, torch.from_numpy(step.positions), torch.arange(len(ids)))
            self.memory.save(step)
        self.manager.complete(step, accepted)
        parts = dict(zip((id(run.sequence) for run in plan.runs), logits.split([len(each) for each in ordered])))
        return [parts[id(sequence)] for sequence, _, _ in runs]

    def compute(self, work: Sequence[tuple[Any, int]], expected: Callable[[Any], torch.Tensor]) -> None:
        """Compute the next ``count`` known tokens of each sequence in one step; all logits must be the expected."""
        runs, begins = [], []
        for sequence, count in work:
            begins.append(sequence.computed)
            runs.append((sequence, sequence.tokens[sequence.computed : sequence.computed + count], 0))
        for (sequence, tokens, _), begin, got in zip(runs, begins, self.step(runs)):
            want = expected(sequence)[begin : begin + len(tokens)]
            assert relative_error(got, want) < self.tolerance

    def finish(self, sequence: Any, expected: Callable[[Any], torch.Tensor], chunk: int = 7) -> None:
        """Compute the rest of a sequence in chunks."""
        while sequence.computed < len(sequence.tokens):
            self.compute([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))], expected)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value. NaN anywhere is NaN, which is below nothing."""
    return float((got - want).abs().max() / want.abs().max())


@pytest.fixture
def machine() -> type[Machine]:
    return Machine


@pytest.fixture
def logits() -> Callable[[Any, Sequence[int]], torch.Tensor]:
    return dense_logits


@pytest.fixture
def tokens() -> Callable[..., np.ndarray]:
    """``tokens(count, seed)``: random ids."""
    return lambda count, seed=0: np.random.default_rng(seed).integers(2, VOCABULARY, count).astype(np.int32)
