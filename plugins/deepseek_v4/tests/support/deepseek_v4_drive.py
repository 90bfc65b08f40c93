"""A hostile cache around the tiny model: a real manager and memory, and NaN wherever nothing has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from deepseek_v4_models import LAYERS, VOCABULARY, embeddings, hidden, layer_output, model_logits, tiny

from kvist.attention.base import BackendContext
from kvist.attention.families import Backends, page_layout
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, RestorePolicy, Run
from kvist.memory.device import DeviceMemory
from kvist.step import NO_PAGE
from kvist_deepseek_v4.reference import ReferenceBackend
from kvist_deepseek_v4.restore import restore_rows
from kvist_deepseek_v4.rows import StreamRows
from kvist_deepseek_v4.spec import cache_spec, mtp_spec
from kvist_deepseek_v4.transformers import DeepseekV4Adapter

Backend = type[Any]

#: What is in rows that nobody needs: no number, in bytes of encoded rows and of their scales, too.
NOTHING = {torch.float32: torch.nan, torch.bfloat16: torch.nan, torch.uint8: 255}


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).astype(np.int32)


@attrs.define(eq=False)
class Request:
    """A sequence, and by layer the hidden states of all its tokens and what its layers should put out."""

    sequence: Any
    states: dict[int, torch.Tensor]
    wanted: dict[int, torch.Tensor]


@attrs.frozen
class _Predictor:
    """A backend that takes the inputs of whatever layer for its own."""

    backend: Any
    layer: int

    def forward(self, _: int, inputs: Any) -> torch.Tensor:
        return self.backend.forward(self.layer, inputs)


class Cache:
    """Manager and memory of the tiny model. ``alone``: no sequence gets or gives anything, so what the model's
    description says can be dropped is NaN before every step, within pages too. ``layers``: those that steps compute.
    ``mtp``: a multi-token prediction layer computes the same tokens in a domain of its own; its weights are those of
    layer 0, which has a window only, too."""

    def __init__(self, *, block: int = 16, blocks: int = 64, drafts: int = 0, seed: int = 0, **how: Any) -> None:
        self.model = tiny()
        self.alone = how.pop("alone", False)
        mtp = how.pop("mtp", False)
        self.layers = how.pop("layers", range(len(LAYERS) + mtp))
        backend = how.pop("backend", ReferenceBackend)
        restore = how.pop("restore", RestorePolicy())
        config, dtype = self.model.config.to_dict(), how.pop("dtype", "float32")
        self.spec = cache_spec(config, block_tokens=block, dtype=dtype, drafts=drafts, **how)
        self.drafts = [mtp_spec(config, block_tokens=block, dtype=dtype, drafts=drafts)] if mtp else []
        self.adapter = DeepseekV4Adapter(self.model, self.spec)
        try:
            classes = {"deepseek_v4": backend}
            arrangement = page_layout(self.adapter.needs, classes)
            sizes = [group.page_bytes for group in Layout.build(self.spec, 1 << 30, arrangement, self.drafts).groups]
            self.layout = Layout.build(self.spec, blocks * sum(sizes), arrangement, self.drafts)
            self.memory = DeviceMemory(self.layout)
            self.memory.bytes.fill_(255)
            self.backends = Backends(self.memory, self.adapter.needs, classes)
            self.predictors = [backend(BackendContext(self.memory, spec)) for spec in self.drafts]
            self.adapter.bind(self.backends)
        except BaseException:
            self.adapter.detach()
            raise
        self.manager = PagedCacheManager(self.layout, restore)
        self.random = np.random.default_rng(seed)
        self.manager.shuffle_free_pages(self.random)
        self.worst = 0.0

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: Any) -> None:
        self.adapter.detach()

    def poison(self, running: Sequence[Any]) -> None:
        """NaN in every free page; and where sequences are alone, in all of their pages that resuming does not need."""
        self.manager.check()
        for group in range(len(self.layout.groups)):
            free = torch.from_numpy(self.manager.free_pages(group)).long()
            self.memory.pages(group)[free] = 255
            self.memory.pages(group)[0] = 255
        if self.alone:
            for sequence in running:
                self._poison_own(sequence)

    def _poison_own(self, sequence: Any) -> None:
        for spec in (self.spec, *self.drafts):
            self._poison_domain(sequence, spec)

    def _poison_domain(self, sequence: Any, spec: Any) -> None:
        needed = {(rows.layer_id, rows.stream): rows for rows in restore_rows(spec, sequence.computed)}
        for layer in spec.layers:
            for stream in layer.streams:
                rows = StreamRows.of(self.memory, layer.id, stream, spec.domain)
                table = self.manager._tables.arrays[rows.group][sequence.slot]
                keep = needed.get((layer.id, stream.name))
                kept = np.arange(keep.begin, keep.end) if keep else np.arange(0)
                for block in np.flatnonzero(table != NO_PAGE):
                    inside = kept[kept // rows.block_rows == block]
                    gone = np.setdiff1d(np.arange(rows.slots), inside % rows.slots)
                    for view in rows.views:
                        view[int(table[block]), gone] = NOTHING[view.dtype]
                    if stream.name in ("state", "index_state") and stream.row.shape[1] == 2 * self._width(stream.name):
                        # Of a closed window only the first series is read again.
                        closed = inside[inside < sequence.computed // 4 * 4] % rows.slots
                        page = rows.views[0][int(table[block])]
                        for slot in closed:
                            page[slot, :, self._width(stream.name) :] = torch.nan

    @staticmethod
    def _width(name: str) -> int:
        return 32 if name == "state" else 16

    def commit(self, runs: Sequence[tuple[Any, int, int]]) -> tuple[Any, list[Any]]:
        """A step of ``(sequence, query tokens, how many of them are drafts)``, and the sequences in its order."""
        self.poison([sequence for sequence, *_ in runs])
        self.manager.shuffle_free_pages(self.random)
        plan = self.manager.plan([Run(sequence, count - drafts, drafts) for sequence, count, drafts in runs])
        assert plan.fits, plan.shortages
        step = plan.commit()
        self.memory.apply(step)
        self.backends.begin(step)
        for predictor in self.predictors:
            predictor.begin(step)
        return step, [run.sequence for run in plan.runs]

    # Layer by layer, over random hidden states.

    def open(self, count: int, seed: int = 0, like: Request | None = None, shared: int = 0, **how: Any) -> Request:
        """A sequence of ``count`` tokens, the first ``shared`` of which are those of ``like``."""
        ids = tokens(count, seed)
        if like is not None:
            ids[:shared] = like.sequence.tokens[:shared]
        sequence = self.manager.open(ids, reuse=not self.alone, **how)
        return self.expect(sequence, count, seed, like, shared)

    def expect(self, sequence: Any, count: int, seed: int, like: Request | None = None, shared: int = 0) -> Request:
        """What the layers of a sequence get, and what transformers makes of it."""
        states, wanted = {}, {}
        for layer in self.layers:
            states[layer] = hidden(layer, count, seed)
            if like is not None:
                states[layer][:shared] = like.states[layer][:shared]
            wanted[layer] = layer_output(layer % len(LAYERS), states[layer])
        return Request(sequence, states, wanted)

    def expect_like(self, like: Request, count: int) -> Request:
        """Another sequence of the same tokens."""
        return Request(self.manager.open(like.sequence.tokens[:count], reuse=not self.alone), like.states, like.wanted)

    def fork(self, parent: Request, count: int, seed: int) -> Request:
        """A second sequence that goes on as another from where ``parent`` is."""
        sequence, here = self.manager.fork(parent.sequence), parent.sequence.computed
        sequence.extend(tokens(count - here, seed))
        return self.expect(sequence, count, seed, parent, here)

    def extend(self, request: Request, count: int, seed: int, keep: int | None = None) -> Request:
        """The sequence goes on up to ``count`` tokens; the first ``keep`` ones, all by default, are as they were."""
        here = request.sequence.known if keep is None else keep
        request.sequence.extend(tokens(count - request.sequence.known, seed))
        return self.expect(request.sequence, count, seed, request, here)

    def retentions(self) -> set[Any]:
        return {group.retention for group in self.layout.groups}

    def lose(self, request: Request, retention: Any, block: int) -> None:
        """Take a cached page of one group out of the prefix tree, as eviction would."""
        [group] = [group.index for group in self.layout.groups if group.retention == retention]
        manager, block_tokens = self.manager, self.layout.block_tokens
        for extent, matched in manager._tree.walk(request.sequence.scope, request.sequence.tokens):
            first = extent.start // block_tokens
            if first <= block < first + -(-matched // block_tokens):
                page = extent.pages[group, block - first]
                assert page != NO_PAGE
                manager._ledger.unpublish(group, np.array([page], np.int32))
                extent.pages[group, block - first] = NO_PAGE

    def step(self, work: Sequence[tuple[Any, ...]]) -> None:
        """One step of ``(request, tokens)`` or ``(request, tokens, drafts, accepted)``: all layers, compared with what
        transformers gives within 1e-5. Drafts that are not accepted are noise."""
        runs = [(request, count, *(rest or (0, 0))) for request, count, *rest in work]
        step, order = self.commit([(request.sequence, count + drafts, drafts) for request, count, drafts, _ in runs])
        by_sequence = {id(request.sequence): (request, count, drafts, kept) for request, count, drafts, kept in runs}
        ordered = [by_sequence[id(sequence)] for sequence in order]
        positions = torch.from_numpy(step.positions)
        begins = [request.sequence.computed for request, *_ in ordered]
        for layer in self.layers:
            parts = []
            for (request, count, drafts, kept), begin in zip(ordered, begins):
                right = request.states[layer][begin : begin + count + kept]
                parts += [right, torch.randn(count + drafts - len(right), 64)]
            output = self._output(layer, torch.cat(parts), positions)
            at = 0
            for (request, count, drafts, kept), begin in zip(ordered, begins):
                got, want = output[at : at + count + kept], request.wanted[layer][begin : begin + count + kept]
                off = float((got - want).abs().max()) if len(want) else 0.0
                assert off <= 1e-5, f"layer {layer}, positions {begin}..{begin + count + kept - 1}: off by {off}"
                self.worst = max(self.worst, off)
                at += count + drafts
        self.memory.save(step)
        self.manager.complete(step, [count + kept for _, count, _, kept in ordered])

    def outputs(self, request: Request, step: Any) -> list[torch.Tensor]:
        """What the layers put out in a step of one request alone, by layer."""
        positions, found = torch.from_numpy(step.positions), []
        for layer in self.layers:
            found.append(self._output(layer, request.states[layer][step.positions], positions))
        return found

    @torch.inference_mode()
    def _output(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What a layer's attention makes of the step's hidden states."""
        if layer >= len(LAYERS):
            self.adapter.bind({"deepseek_v4": _Predictor(self.predictors[0], layer)})
        output, _ = self.model.model.layers[layer % len(LAYERS)].self_attn(
            states[None],
            position_embeddings=embeddings(self.model, positions),
            position_ids=positions[None],
            attention_mask=None,
            **self.adapter.arguments,
        )
        self.adapter.bind(self.backends)
        return output[0]

    def finish(self, request: Request, chunk: int | None = None) -> None:
        """Compute what is left, in chunks."""
        while left := len(request.sequence.tokens) - request.sequence.computed:
            end = request.sequence.next_end(request.sequence.computed + min(left, chunk or left))
            self.step([(request, end - request.sequence.computed)])

    # The whole model, over token ids.

    def logits(
        self, runs: Sequence[tuple[Any, Sequence[int], int]], accepted: Sequence[int] | None = None
    ) -> list[Any]:
        """One step of ``(sequence, its query tokens, how many of them are drafts)``. Returns logits by run."""
        step, order = self.commit([(sequence, len(ids), drafts) for sequence, ids, drafts in runs])
        by_sequence = {id(sequence): ids for sequence, ids, _ in runs}
        ids = torch.tensor([int(token) for sequence in order for token in by_sequence[id(sequence)]])
        with torch.inference_mode():
            logits = self.adapter.forward(ids, torch.from_numpy(step.positions), torch.arange(len(ids)))
        self.memory.save(step)
        self.manager.complete(step, accepted)
        parts = dict(zip(map(id, order), logits.split([len(by_sequence[id(each)]) for each in order])))
        return [parts[id(sequence)] for sequence, *_ in runs]

    def compute(self, sequence: Any, chunk: int | None = None) -> None:
        """Compute what is left of a sequence; its logits are transformers' within 1e-4."""
        wanted = model_logits(sequence.tokens)
        while left := len(sequence.tokens) - sequence.computed:
            begin = sequence.computed
            end = sequence.next_end(begin + min(left, chunk or left))
            [got] = self.logits([(sequence, sequence.tokens[begin:end], 0)])
            assert float((got - wanted[begin:end]).abs().max()) < 1e-4
