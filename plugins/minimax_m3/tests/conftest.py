"""Tiny random MiniMax-M3 models, what transformers itself computes, and a hostile cache around a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.families import Backends, page_layout
from kvist.attention.gqa import GQAInputs
from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run, Tiers
from kvist.memory.copier import ThreadCopier
from kvist.memory.device import DeviceMemory
from kvist.memory.disk import DiskStore
from kvist.memory.mover import CpuMover, Tier
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream
from kvist.step import NO_PAGE, Step
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.spec import cache_spec

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
    # Not above: the kernels' processes need no transformers, whose import takes longer than their tests.
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

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
        from kvist_minimax_m3.transformers import MiniMaxM3Adapter

        manager = how.pop("manager", {})
        backend = how.pop("backend", ReferenceBackend)
        self.tolerance = how.pop("tolerance", 1e-5)
        self.model = model
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


class Tiered:
    """A machine with a host tier and, with a folder, a disk."""

    def __init__(self, model: Any, *, folder: Path | None = None, **how: Any) -> None:
        self.cache = Machine(model, **how)
        layout = self.cache.layout
        host = attrs.evolve(layout, slab_count=4 * layout.slab_count) if folder is None else None
        memories = {Tier.DEVICE: self.cache.memory}
        if host is not None:
            self.host = memories[Tier.HOST] = DeviceMemory(host)
        part_bytes = [group.content_bytes for group in layout.groups]
        self.disk = DiskStore(folder, format_digest(layout), part_bytes, 1 << 24) if folder is not None else None
        self.copier = ThreadCopier(CpuMover(memories, self.disk))
        self.cache.manager = PagedCacheManager(layout, tiers=Tiers(self.copier, host, self.disk))
        self.cache.manager.shuffle_free_pages(np.random.default_rng(5))

    def __enter__(self) -> Tiered:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.settle()
        self.cache.adapter.detach()
        self.copier.close()
        if self.disk is not None:
            self.disk.close()

    def settle(self) -> None:
        """Let every copy between tiers finish."""
        self.cache.manager.poll()
        while self.cache.manager.copying:
            assert self.copier.wait(None, 30)
            self.cache.manager.poll()

    def load(self, sequence: Any) -> None:
        if self.cache.manager.load(sequence):
            self.settle()


@pytest.fixture
def machine() -> type[Machine]:
    return Machine


@pytest.fixture
def tiers() -> type[Tiered]:
    return Tiered


@pytest.fixture
def expecting() -> Callable[..., Callable[[Any], torch.Tensor]]:
    """``expecting(model, *prompts)`` gives ``expected(sequence)`` from transformers, for sequences of these prompts.

    To be called before the model is attached.
    """

    def known(model: Any, *prompts: Any) -> Callable[[Any], torch.Tensor]:
        answers = {tuple(prompt.tolist()): dense_logits(model, prompt) for prompt in prompts}
        return lambda sequence: answers[tuple(sequence.tokens.tolist())]

    return known


@pytest.fixture
def logits() -> Callable[[Any, Sequence[int]], torch.Tensor]:
    return dense_logits


@pytest.fixture
def tokens() -> Callable[..., np.ndarray]:
    """``tokens(count, seed)``: random ids."""
    return lambda count, seed=0: np.random.default_rng(seed).integers(2, VOCABULARY, count).astype(np.int32)


@attrs.frozen
class Case:
    """One model's sizes. Layer 1 is dense, layers 4 and 7 are sparse."""

    kv_heads: int = 2
    index_heads: int = 2
    query_heads: int = 8
    head_dim: int = 16
    index_size: int = 16
    page: int = 4
    dtype: str = "float32"
    index_dtype: str = "float32"
    selection: Selection = attrs.field(factory=lambda: Selection(4, 3, 1))

    def spec(self) -> CacheSpec:
        row = RowFormat((self.kv_heads, self.head_dim), self.dtype)
        plain = [Stream(name, row, History(), sharding=Heads(self.kv_heads)) for name in ("k", "v")]
        index = Stream("index_k", RowFormat((self.index_size,), self.index_dtype), History())
        return CacheSpec([Layer(1, plain), Layer(4, [*plain, index]), Layer(7, [*plain, index])], self.page, "test")


class Paged:
    """Hand-made steps over one backend, checked token by token against a brute force in float64 without pages.

    Page tables are shuffled, everything that was never written is NaN, and no byte of a page outside the tables may
    change. content: by layer and sequence, the five inputs of every token.
    """

    def __init__(self, backend: type[AttentionBackend], case: Case, totals: Sequence[int], seed: int = 0) -> None:
        self.case, self.totals, self.computed, self.steps = case, list(totals), [0] * len(totals), 0
        random = self.random = np.random.default_rng(seed)
        spec = case.spec()
        blocks = sum(-(-total // case.page) for total in totals)
        arrangement = backend.page_layout(spec)
        page_bytes = Layout.build(spec, 1 << 28, arrangement).groups[0].page_bytes
        self.memory = DeviceMemory(Layout.build(spec, page_bytes * (blocks + 8), arrangement))
        self.memory.bytes.fill_(255)
        self.backend = backend(BackendContext(self.memory))
        free = list(random.permutation(np.arange(1, blocks + 4)))
        width = max(-(-total // case.page) for total in totals)
        self.table = np.full((len(totals), width), NO_PAGE, np.int32)
        # Slots are in another order than the rows of a step.
        self.slots = random.permutation(len(totals)).astype(np.int32)
        for slot, total in zip(self.slots, totals):
            for block in range(-(-total // case.page)):
                self.table[slot, block] = free.pop()
        self.unused = np.array(free)
        sizes = (case.query_heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.head_dim)
        sizes += (case.index_heads, case.index_size), (case.index_size,)
        # Drawn apart, so that other pages hold the same content.
        values = np.random.default_rng(seed + 1)
        self.content = {
            (layer, index): [torch.from_numpy(values.normal(size=(total, *size))).float() for size in sizes]
            for layer in (1, 4, 7)
            for index, total in enumerate(totals)
        }
        self.scale = 0.25

    def inputs(self, layer: int, chunks: Sequence[tuple[int, int]]) -> Any:
        parts = []
        for which in range(5):
            pieces = [
                self.content[layer, index][which][self.computed[index] : self.computed[index] + count]
                for index, count in chunks
            ]
            parts.append(torch.cat([self.content[layer, 0][which][:0], *pieces]))
        if layer == 1:
            return GQAInputs(*parts[:3], self.scale)
        return SparseInputs(*parts, self.scale, self.case.selection)

    def make_step(self, chunks: Sequence[tuple[int, int]]) -> Step:
        self.steps += 1
        return Step(
            id=self.steps,
            slots=self.slots[[index for index, _ in chunks]],
            query_lengths=np.array([count for _, count in chunks], np.int32),
            lengths=np.array([self.computed[index] + count for index, count in chunks], np.int32),
            decode_rows=sum(count == 1 for _, count in chunks),
            tables=(self.table,),
            copies=(np.zeros((0, 2), np.int32),),
        )

    def step(self, chunks: Sequence[tuple[int, int]], tolerance: float = 1e-5) -> list[torch.Tensor]:
        """Compute ``(sequence, tokens)`` in one step and check every layer."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
        self.backend.begin(self.make_step(chunks))
        outputs = []
        for layer in (1, 4, 7):
            output = self.backend.forward(layer, self.inputs(layer, chunks)).clone()
            want = [
                self.oracle(layer, index, self.computed[index] + i) for index, count in chunks for i in range(count)
            ]
            if want:
                np.testing.assert_allclose(output.double().numpy(), np.stack(want), rtol=tolerance, atol=tolerance)
            outputs.append(output)
        for index, count in chunks:
            self.computed[index] += count
        assert bool((self.memory.pages(0)[self.unused] == 255).all()), "a page that no table names was written"
        return outputs

    def play(self, seed: int, tolerance: float = 1e-5) -> None:
        """Random ragged steps until every sequence is computed."""
        random = np.random.default_rng(seed)
        while left := [n for n, total in enumerate(self.totals) if self.computed[n] < total]:
            chosen = random.permutation(left)[: random.integers(1, len(left) + 1)]
            wish = random.choice([1, 1, 2, 5, 9, 13], len(chosen))
            self.step(
                [(int(n), int(min(count, self.totals[n] - self.computed[n]))) for n, count in zip(chosen, wish)],
                tolerance,
            )

    def selected(self, layer: int, index: int, position: int) -> list[list[int]]:
        """For each query head, the blocks that it reads, by plain sorting."""
        case, rule = self.case, self.case.selection
        query = self.content[layer, index][3][position].double().numpy()
        key = self.content[layer, index][4][: position + 1].to(getattr(torch, case.index_dtype)).double().numpy()
        own = position // rule.block_tokens
        local = {max(own - i, 0) for i in range(rule.local_blocks)}

        def best(score: Callable[[int], float]) -> list[int]:
            kinds = {block: 0 if block < rule.init_blocks else 1 if block in local else 2 for block in range(own + 1)}
            ranks = sorted((kinds[b], -score(b) if kinds[b] == 2 else 0.0, b) for b in range(own + 1))
            return sorted(block for _, _, block in ranks[: rule.topk])

        def score(head: int, block: int) -> float:
            keys = key[block * rule.block_tokens : (block + 1) * rule.block_tokens]
            return float(max(keys @ query[head]))

        per_key_head = case.index_heads // case.kv_heads
        heads = [best(lambda b, h=h: score(h, b)) for h in range(case.index_heads)]
        if per_key_head > 1 and rule.group_reduce != "per_index_head":
            grouped = [range(g * per_key_head, (g + 1) * per_key_head) for g in range(case.kv_heads)]
            if rule.group_reduce == "max":
                heads = [best(lambda b, g=g: max(score(h, b) for h in g)) for g in grouped]
            else:
                heads = [sorted({b for h in g for b in heads[h]}) for g in grouped]
        return [heads[q * len(heads) // case.query_heads] for q in range(case.query_heads)]

    def oracle(self, layer: int, index: int, position: int) -> np.ndarray:
        case, block_tokens = self.case, self.case.selection.block_tokens
        query, key, value = (each.double().numpy() for each in self.content[layer, index][:3])
        if case.dtype != "float32":
            key, value = (
                torch.from_numpy(each).to(getattr(torch, case.dtype)).double().numpy() for each in (key, value)
            )
        everything = [list(range(position // block_tokens + 1))] * case.query_heads
        blocks = everything if layer == 1 else self.selected(layer, index, position)
        output = np.zeros((case.query_heads, case.head_dim))
        for head in range(case.query_heads):
            read = np.concatenate([np.arange(b * block_tokens, (b + 1) * block_tokens) for b in blocks[head]])
            read = read[read <= position]
            kv = head // (case.query_heads // case.kv_heads)
            scores = self.scale * key[read, kv] @ query[position, head]
            weights = np.exp(scores - scores.max())
            output[head] = weights / weights.sum() @ value[read, kv]
        return output


@pytest.fixture
def paged() -> type[Paged]:
    return Paged


@pytest.fixture
def case() -> type[Case]:
    return Case
