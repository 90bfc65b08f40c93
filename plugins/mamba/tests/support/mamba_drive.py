"""Runs single recurrent layers on a real cache: hidden states in, layer outputs out, free pages full of NaN."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from mamba_models import mixers, prepare, tiny_model

from kvist.attention.base import BackendContext
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.memory.device import DeviceMemory
from kvist.restore import RestorePolicy
from kvist.step import Step
from kvist_mamba import cache_spec
from kvist_mamba.backend import ReferenceBackend
from kvist_mamba.inputs import RECURRENT_STATE, STREAMS, RecurrentInputs


@attrs.define(eq=False)
class Request:
    """One sequence, the hidden states that its layers see, and what they have put out so far.

    hidden: per layer ``[tokens, hidden size]``, a function of the tokens alone. outputs: per layer and position.
    page: where the last step left the sequence's states.
    """

    sequence: Any
    tokens: np.ndarray
    hidden: dict[int, torch.Tensor]
    outputs: dict[int, dict[int, torch.Tensor]]
    page: int = 0

    def output(self, layer: int) -> tuple[list[int], torch.Tensor]:
        """Positions computed in this sequence, ascending, and the layer's outputs there."""
        found = sorted(self.outputs[layer].items())
        return [position for position, _ in found], torch.stack([value for _, value in found])


class Drive:
    """A manager, its memory and a backend for all recurrent layers of one tiny model."""

    def __init__(
        self,
        model_type: str,
        *,
        block_tokens: int = 8,
        memory_bytes: int = 2 << 20,
        restore: RestorePolicy | None = None,
        backoff_tokens: int = 0,
        backend: type = ReferenceBackend,
        dtype: torch.dtype = torch.float32,
        **spec: Any,
    ) -> None:
        self.model = tiny_model(model_type).to(dtype)
        self.mixers = mixers(self.model)
        config = self.model.config.to_dict()
        self.spec = cache_spec(config, block_tokens=block_tokens, dtype=str(dtype).removeprefix("torch."), **spec)
        part = self.spec.only(STREAMS)
        layout = Layout.build(self.spec, memory_bytes, backend.page_layout(part))
        self.manager = PagedCacheManager(layout, restore or RestorePolicy(), backoff_tokens)
        self.memory = DeviceMemory(layout)
        self.backend = backend(BackendContext(self.memory, part))
        states = next(group for group in layout.groups if group.exact)
        self.group, self.draft_pages = states.index, states.retention.draft_pages

    def hidden_of(self, tokens: np.ndarray) -> dict[int, torch.Tensor]:
        """Any hidden states will do, as long as equal prefixes have equal ones."""
        hidden = {}
        for layer in self.mixers:
            table = torch.randn(97, self.model.config.hidden_size, generator=torch.Generator().manual_seed(layer))
            hidden[layer] = table[torch.tensor(tokens, dtype=torch.int64)].to(self.model.dtype)
        return hidden

    def expected(self, tokens: np.ndarray) -> dict[int, torch.Tensor]:
        """What transformers' own layers put out for a whole sequence, without any cache."""
        hidden = self.hidden_of(tokens)
        with torch.no_grad():
            return {layer: mixer(hidden[layer][None])[0] for layer, mixer in self.mixers.items()}

    def open(self, tokens: np.ndarray, prompt: int | None = None, **options: Any) -> Request:
        """A request whose sequence knows the first ``prompt`` tokens, all by default."""
        sequence = self.manager.open(tokens[:prompt], **options)
        return Request(sequence, tokens, self.hidden_of(tokens), {layer: {} for layer in self.mixers})

    def step(
        self, runs: Iterable[tuple[Request, int, int]], accepted: list[int] | None = None, padding: tuple[int, ...] = ()
    ) -> None:
        """One step: (request, new tokens, drafts) each; ``accepted`` query tokens of each stay, all by default.

        The query tokens are the request's own next ones. ``padding`` are query tokens of rows that are nobody's, with
        NaN for their inputs.
        """
        requests = {id(request.sequence): request for request, _, _ in runs}
        asked = [Run(request.sequence, new, drafts) for request, new, drafts in runs]
        kept = {id(run.sequence): count for run, count in zip(asked, accepted or [r.query_tokens for r in asked])}
        for run in asked:
            short = run.sequence.computed + run.new_tokens - run.sequence.known
            if short > 0:
                request = requests[id(run.sequence)]
                run.sequence.extend(request.tokens[run.sequence.known :][:short])
        plan = self.manager.plan(asked)
        assert plan.fits
        step = plan.commit()
        rows = [requests[id(sequence)] for sequence in plan.sequences]
        self.memory.apply(step)
        self.poison()
        spans = [range(end - count, end) for end, count in zip(step.lengths.tolist(), step.query_lengths.tolist())]
        self.backend.begin(padded(step, padding))
        for layer, mixer in self.mixers.items():
            hidden = torch.cat([row.hidden[layer][list(span)] for row, span in zip(rows, spans)])
            inputs, finish = prepare(mixer, hidden)
            with torch.no_grad():
                values = self.backend.forward(layer, with_nan(inputs, sum(padding)))
                assert not values[len(hidden) :].any(), "values of padding rows are zero"
                outputs = finish(values[: len(hidden)])
            at = 0
            for row, span in zip(rows, spans):
                for position in span[: kept[id(row.sequence)]]:
                    row.outputs[layer][position] = outputs[at + position - span.start]
                at += len(span)
        self.memory.save(step)
        order = [kept[id(row.sequence)] for row in rows]
        for number, row in enumerate(rows):
            apart = len(step.drafts) and step.drafts[number] and self.draft_pages
            row.page = int(step.tables[self.group][step.slots[number], order[number] if apart else 0])
        self.manager.complete(step, order)

    def prefill(self, *requests: Request, polite: bool = True, chunk: int = 1 << 30) -> None:
        """Compute all known tokens, all requests in the same steps. polite: end chunks where the manager asks for."""
        while True:
            runs = []
            for request in requests:
                sequence = request.sequence
                end = min(sequence.known, sequence.computed + chunk)
                end = sequence.next_end(end) if polite else end
                if end > sequence.computed:
                    runs.append((request, end - sequence.computed, 0))
            if not runs:
                return
            self.step(runs)

    def tell(self, request: Request) -> None:
        """The manager learns which drafts were accepted."""
        sequence = request.sequence
        sequence.extend(request.tokens[sequence.known : sequence.computed])

    def state(self, request: Request) -> torch.Tensor:
        """A copy of the page with the sequence's states, as bytes, in use or not."""
        content = self.memory.layout.groups[self.group].content_bytes
        return self.memory.pages(self.group)[request.page, :content].clone()

    def recurrent_state(self, request: Request, layer: int) -> torch.Tensor:
        """One layer's state of the sequence, in float32."""
        row = self.memory.layout.part(layer, RECURRENT_STATE)[1].stream.row
        return self.memory.view(layer, RECURRENT_STATE, row.shape, getattr(torch, row.dtype))[request.page].float()

    def poison(self) -> None:
        """NaN in every page that nobody holds or can find, and in the reserved one."""
        pages = self.memory.pages(self.group).numpy()
        pages[self.manager.free_pages(self.group)] = 0xFF
        pages[0] = 0xFF

    def error(self, request: Request, first: int = 0) -> float:
        """How far what the request computed from position ``first`` on is from what transformers computes, relative to
        its size; the worst layer's."""
        expected, worst = self.expected(request.tokens), 0.0
        for layer in self.mixers:
            positions, found = request.output(layer)
            assert positions == list(range(first, positions[-1] + 1))
            wanted = expected[layer][positions]
            worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
        return worst

    def check(self, request: Request, tolerance: float = 1e-5, first: int = 0) -> None:
        """What the request computed from position ``first`` on is what transformers computes, relative to its size."""
        error = self.error(request, first)
        assert error <= tolerance, f"off by {error:.1e}"


def with_nan(inputs: RecurrentInputs, count: int) -> RecurrentInputs:
    """The inputs with so many more tokens."""
    fields = [name for name in ("conv_inputs", "dt", "log_decay", "beta") if hasattr(inputs, name)]
    added = {name: F.pad(getattr(inputs, name), (0, 0, 0, count), value=torch.nan) for name in fields}
    return attrs.evolve(inputs, **added)


def padded(step: Step, counts: tuple[int, ...]) -> Step:
    """The step with rows behind its own that have so many query tokens and page 0 everywhere, as a captured graph runs
    a batch of another size."""
    if not counts:
        return step
    step, rows = step.compact(), len(counts)
    more = np.array(counts, np.int32)
    return attrs.evolve(
        step,
        slots=np.concatenate([step.slots, np.full(rows, step.row_count, np.int32)]),
        query_lengths=np.concatenate([step.query_lengths, more]),
        lengths=np.concatenate([step.lengths, more + 100]),
        tables=tuple(np.concatenate([table, np.zeros_like(table[:1])]) for table in step.tables),
        drafts=np.concatenate([step.drafts, 0 * more]) if len(step.drafts) else step.drafts,
    )
