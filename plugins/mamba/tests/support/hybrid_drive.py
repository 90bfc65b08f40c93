"""Runs whole hybrid models on a real cache, by an engine or by hand, and compares every logit with transformers'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import torch
from hybrid_models import expected_logits, hybrid_model, relative_error

from kvist.attention.families import Backends, page_layout
from kvist.attention.reference import ReferenceBackend as AttentionReference
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run, Tiers
from kvist.memory.copier import ThreadCopier
from kvist.memory.device import DeviceMemory
from kvist.memory.mover import CpuMover, Tier
from kvist.restore import RestorePolicy
from kvist.step import Step
from kvist_mamba import cache_spec
from kvist_mamba.backend import ReferenceBackend
from kvist_mamba.transformers import HybridAdapter
from kvist_transformers import Engine

TOLERANCE = 1e-5


def poison(manager: Any, memory: DeviceMemory) -> None:
    """NaN in every page that nobody holds or can find, and in the reserved ones."""
    manager.check()
    for group in range(len(memory.layout.groups)):
        pages = memory.pages(group)
        # All ones is NaN in every float type.
        pages[torch.tensor(np.asarray(manager.free_pages(group)), dtype=torch.int64)] = 0xFF
        pages[0] = 0xFF


def room(model_type, token_count, states):
    """Bytes in which so many tokens and states fit, and hardly more."""
    layout = Layout.build(cache_spec(hybrid_model(model_type).config.to_dict(), block_tokens=8), 1 << 30)
    counts = [states if group.exact else -(-token_count // 8) for group in layout.groups]
    pages = [group.page_bytes for group in layout.groups]
    return max(pages) + sum(count * size for count, size in zip(counts, pages))


@attrs.frozen(eq=False)
class Logits:
    """One row that an engine sampled from."""

    request: Any
    position: int
    values: torch.Tensor


class WatchedEngine(Engine):
    """An engine with hostile memory that keeps all logits that it samples from."""

    def __init__(self, model_type: str, overrides: dict[str, Any] | None = None, **arguments: Any) -> None:
        self.model_type, self.overrides = model_type, overrides or {}
        self.logits: list[Logits] = []
        super().__init__(
            hybrid_model(model_type, **self.overrides),
            **{"memory": "2MiB", "max_batch_tokens": 16, "max_sequences": 6, "block_tokens": 8, **arguments},
        )
        self.manager.shuffle_free_pages(np.random.default_rng(0))
        self._begin, self._forward = self.backends.begin, self.adapter.forward
        self.backends.begin, self.adapter.forward = self._poisoned_begin, self._recorded_forward

    def _poisoned_begin(self, step: Step) -> None:
        poison(self.manager, self.memory)
        self._current = step
        self._begin(step)

    def _recorded_forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = self._forward(ids, positions, rows)
        step = self._current
        jobs = {job.sequence.slot: job for job in self.scheduler.jobs() if job.sequence is not None}
        for values, token in zip(logits, rows.tolist()):
            row = int(np.searchsorted(step.query_starts, token, side="right")) - 1
            request = jobs[int(step.slots[row])].request
            self.logits.append(Logits(request, int(positions[token]), values))
        return logits

    def check(self, completions: Iterable[tuple[Any, Any]], tolerance: float = TOLERANCE) -> float:
        """The largest error of all logits so far. ``completions``: request and completion of all that ran."""
        worst = 0.0
        for request, completion in completions:
            assert completion.error is None, completion.error
            generated = completion.tokens.tolist()
            whole = np.concatenate([request.tokens, completion.tokens])
            expected = expected_logits(self.model_type, whole, **self.overrides)
            first = len(request.tokens) - 1
            assert generated == expected[first:-1].argmax(-1).tolist()
            found = {each.position: each.values for each in self.logits if each.request is request}
            assert sorted(found) == list(range(first, len(whole) - 1))
            for each in self.logits:
                if each.request is request:
                    worst = max(worst, relative_error(each.values, expected[each.position]))
        assert worst <= tolerance, f"off by {worst:.1e}"
        return worst

    def run(self, requests: list[Any], tolerance: float = TOLERANCE) -> list[Any]:
        """Run and check requests; completions in order."""
        completions = self.generate(requests)
        self.check(zip(requests, completions), tolerance)
        return completions


@attrs.define(eq=False)
class Driven:
    """One sequence with all tokens that it will ever have."""

    sequence: Any
    tokens: np.ndarray


class ModelDrive:
    """A model, its adapter and a manager, driven by hand: drafts, suspension, tiers. Close it after use."""

    def __init__(
        self,
        model_type: str,
        *,
        block_tokens: int = 8,
        memory_bytes: int = 1 << 20,
        restore: RestorePolicy | None = None,
        host: bool = False,
    ) -> None:
        self.model_type = model_type
        model = hybrid_model(model_type)
        spec = cache_spec(model.config.to_dict(), block_tokens=block_tokens, dtype="float32", fingerprint="tiny")
        self.adapter = HybridAdapter(model, spec)
        classes = {"gqa": AttentionReference, "recurrent": ReferenceBackend}
        classes = {family: classes[family] for family in self.adapter.needs}
        self.layout = Layout.build(spec, memory_bytes, page_layout(self.adapter.needs, classes))
        self.memory = DeviceMemory(self.layout)
        self.backends = Backends(self.memory, self.adapter.needs, classes)
        self.adapter.bind(self.backends)
        self.copier = None
        options: dict[str, Any] = {"restore": restore} if restore else {}
        if host:
            host_layout = attrs.evolve(self.layout, slab_count=4 * self.layout.slab_count)
            self.copier = ThreadCopier(CpuMover({Tier.DEVICE: self.memory, Tier.HOST: DeviceMemory(host_layout)}, None))
            options["tiers"] = Tiers(self.copier, host_layout)
        self.manager = PagedCacheManager(self.layout, **options)
        self.manager.shuffle_free_pages(np.random.default_rng(0))

    def __enter__(self) -> ModelDrive:
        return self

    def __exit__(self, *exception: object) -> None:
        self.adapter.detach()
        if self.copier is not None:
            self.copier.close()

    def open(self, tokens: np.ndarray, prompt: int | None = None, **options: Any) -> Driven:
        """A sequence that knows the first ``prompt`` tokens, all by default."""
        return Driven(self.manager.open(tokens[:prompt], **options), tokens)

    def settle(self) -> None:
        """Wait until nothing moves between tiers any more."""
        self.manager.poll()
        while self.manager.copying:
            assert self.copier is not None and self.copier.wait(None, deadline_s=10)
            self.manager.poll()

    def step(self, runs: Iterable[tuple[Driven, int, int]], accepted: list[int] | None = None) -> None:
        """One step: (sequence, new tokens, drafts) each, of which ``accepted`` query tokens stay, all by default.

        The first ``accepted - 1`` drafts are the sequence's own next tokens, the others are wrong. The logits of every
        token that stays are compared.
        """
        runs = list(runs)
        kept = accepted or [new + drafts for _, new, drafts in runs]
        driven, counts = {}, {}
        for (each, new, _), count in zip(runs, kept):
            sequence = each.sequence
            driven[id(sequence)], counts[id(sequence)] = each, count
            short = sequence.computed + new - sequence.known
            if short > 0:
                sequence.extend(each.tokens[sequence.known :][:short])
        plan = self.manager.plan([Run(each.sequence, new, drafts) for each, new, drafts in runs])
        assert plan.fits
        step = plan.commit()
        self.memory.apply(step)
        poison(self.manager, self.memory)
        self.backends.begin(step)
        ids = []
        for sequence, end, length in zip(plan.sequences, step.lengths.tolist(), step.query_lengths.tolist()):
            own = driven[id(sequence)].tokens[end - length : end].copy()
            wrong = counts[id(sequence)]
            own[wrong:] = (own[wrong:] + 1) % 90 + 2
            ids.append(own)
        positions = torch.from_numpy(step.positions.copy())
        with torch.inference_mode():
            logits = self.adapter.forward(
                torch.from_numpy(np.concatenate(ids)).long(), positions, torch.arange(step.token_count)
            )
        for row, sequence in enumerate(plan.sequences):
            each, begin = driven[id(sequence)], int(step.query_starts[row])
            expected = expected_logits(self.model_type, each.tokens)
            here = slice(begin, begin + counts[id(sequence)])
            error = relative_error(logits[here], expected[positions[here]])
            assert error <= TOLERANCE, f"positions {positions[here].tolist()}: off by {error:.1e}"
        self.memory.save(step)
        self.manager.complete(step, [counts[id(sequence)] for sequence in plan.sequences])

    def compute(self, each: Driven, until: int, chunk: int = 7) -> None:
        """Advance one sequence in chunks that end where its restore points are."""
        while each.sequence.computed < until:
            begin = each.sequence.computed
            self.step([(each, each.sequence.next_end(min(until, begin + chunk)) - begin, 0)])
