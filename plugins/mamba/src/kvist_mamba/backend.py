"""The recurrent mixers over pages in the clearest form: the oracle of every faster backend."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.errors import StateError
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec
from kvist.step import NO_PAGE, Step
from kvist_mamba import reference
from kvist_mamba.geometry import RecurrentLayer, check_inputs, recurrent_layers
from kvist_mamba.inputs import (
    CHECKPOINT,
    CONV_HISTORY,
    CONV_STATE,
    GATE_HISTORY,
    RECURRENT_STATE,
    RecurrentInputs,
    ShortConvInputs,
)
from kvist_mamba.reference.scan import ScanInputs

#: Page 0 of every group is nobody's: a row that names it is padding.
_PADDING = 0


@attrs.frozen
class StateRow:
    """One row of a step, as a recurrent layer sees it.

    tokens: its part of the flattened batch. source: the page that its state is read from.
    after: numbers of its tokens after which the state is written, ascending. targets: the page for each of them.
    """

    tokens: slice
    source: int
    after: tuple[int, ...]
    targets: tuple[int, ...]


def state_rows(step: Step, group_index: int) -> list[StateRow]:
    """Where the step's rows read and write the states of a group; padding rows are left out.

    A row with drafts has its state written after every token, because nobody knows yet how many stay; any other row
    only after its last one, over the state that it began with. Raises StateError for a row without a page.
    """
    table, starts = step.tables[group_index], step.query_starts
    rows = []
    for row in range(step.row_count):
        count = int(step.query_lengths[row])
        drafts = int(step.drafts[row]) if len(step.drafts) else 0
        columns = list(range(1, count + 1)) if drafts else [0]
        pages = table[step.slots[row]]
        source, targets = int(pages[0]), tuple(pages[columns].tolist())
        if source == _PADDING or not count:
            continue
        if NO_PAGE in (source, *targets):
            raise StateError(f"row {row} of the step has no page for its state")
        after = tuple(columns) if drafts else (count,)
        rows.append(StateRow(slice(int(starts[row]), int(starts[row + 1])), source, after, targets))
    return rows


@attrs.frozen
class ReplayRow:
    """One row of a step whose state takes drafts back by replay. page: read and written. start: position of its first
    token."""

    tokens: slice
    page: int
    start: int
    drafts: int


def replay_rows(step: Step, group_index: int) -> list[ReplayRow]:
    """The step's rows for a group without pages for drafts; padding rows are left out. Raises StateError for a row
    without a page."""
    starts, rows = step.query_starts, []
    for row in range(step.row_count):
        count, page = int(step.query_lengths[row]), int(step.tables[group_index][step.slots[row], 0])
        if page == _PADDING or not count:
            continue
        if page == NO_PAGE:
            raise StateError(f"row {row} of the step has no page for its state")
        drafts = int(step.drafts[row]) if len(step.drafts) else 0
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        rows.append(ReplayRow(tokens, page, int(step.lengths[row]) - count, drafts))
    return rows


class ReferenceBackend(AttentionBackend):
    """Plain torch, one row of the step after the other, in float32 (float64 for float64 inputs). Long runs of Mamba-2
    and of gated delta nets are computed in chunks, everything else token by token.

    Serves every kind of mixer and both ways to take drafts back, on any torch device. How a sequence is cut into steps
    is nothing to the result but the order of sums, as long as states are stored in the dtype of the computation; in a
    smaller one they are rounded at the end of each step. The values of padding rows are zero.
    """

    name = "mamba-reference"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major, for any spec with recurrent layers of plain floats."""
        recurrent_layers(spec, cls.name, replays=True)
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        self._memory = context.memory
        self._layers = recurrent_layers(context.spec, self.name, replays=True)
        self._groups = {layer: context.memory.layout.part(layer, CONV_STATE)[0] for layer in self._layers}
        self._step: Step | None = None
        self._rows: dict[int, list[StateRow]] = {}
        self._replays: dict[int, list[ReplayRow]] = {}

    def begin(self, step: Step) -> None:
        """Find the pages of the step's states, once for all layers."""
        groups = {group.index: group.retention.draft_pages for group in self._groups.values()}
        self._rows = {group: state_rows(step, group) for group, apart in groups.items() if apart}
        self._replays = {group: replay_rows(step, group) for group, apart in groups.items() if not apart}
        self._step = step

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Advance the layer's states by the step's tokens. ``inputs`` is a :class:`RecurrentInputs`; the result is a
        new tensor ``[token_count, width]`` in the dtype of the convolution's inputs.

        Raises StateError before the first ``begin``, SpecError for inputs that do not fit the layer.
        """
        assert isinstance(inputs, RecurrentInputs)
        layer, group = self._layers[layer_id], self._groups[layer_id].index
        check_inputs(layer, inputs, self._step)
        if layer.history:
            return self._replay(layer, inputs, self._replays[group])
        return self._advance(layer, inputs, self._rows[group])

    def _advance(self, layer: RecurrentLayer, inputs: RecurrentInputs, rows: list[StateRow]) -> torch.Tensor:
        conv = self._convolve(layer, inputs, rows)
        if isinstance(inputs, ShortConvInputs):
            return conv.to(inputs.conv_inputs.dtype)
        assert isinstance(inputs, ScanInputs) and layer.state is not None
        scan, width = reference.scan_of(inputs, conv, layer.state)
        values = conv.new_zeros(len(conv), width)
        states = self._view(layer, RECURRENT_STATE)
        for row in rows:
            values[row.tokens], after = scan(row.tokens, states[row.source].to(conv.dtype), row.after)
            states[list(row.targets)] = after.to(states.dtype)
        return values.to(inputs.conv_inputs.dtype)

    def _replay(self, layer: RecurrentLayer, inputs: RecurrentInputs, rows: list[ReplayRow]) -> torch.Tensor:
        """As :meth:`_advance`, with the histories' valid tokens before each row's own."""
        if not rows:
            return self._advance(layer, inputs, [])
        positions = self._memory.view(layer.id, CHECKPOINT, (1,), torch.int64)
        gates = reference.gates_of(inputs, _computed(inputs.conv_inputs.dtype))
        own = [inputs.conv_inputs] + ([] if gates is None else [gates])
        kept = [self._view(layer, stream) for stream, _ in zip((CONV_HISTORY, GATE_HISTORY), own)]
        joined: list[list[torch.Tensor]] = [[] for _ in own]
        turns, longer, begin = [], [], 0
        for row in rows:
            count = row.tokens.stop - row.tokens.start
            turn = reference.turn(int(positions[row.page]), row.start, count, row.drafts, layer.history)
            for parts, history, new in zip(joined, kept, own):
                parts += [history[row.page, :, : turn.valid].T.to(new.dtype), new[row.tokens]]
            part = slice(begin, begin + turn.valid + count)
            moves = (turn.done,) if turn.done else ()
            longer.append(StateRow(part, row.page, moves, (row.page,) * len(moves)))
            turns.append(turn)
            begin = part.stop
        whole = [torch.cat(parts) for parts in joined]
        values = self._advance(layer, reference.with_tokens(inputs, *whole), longer)
        result = values.new_zeros(len(inputs.conv_inputs), values.shape[1])
        for row, turn, joint in zip(rows, turns, longer):
            result[row.tokens] = values[joint.tokens][turn.valid :]
            for history, tokens in zip(kept, whole):
                left = tokens[joint.tokens][turn.done :]
                history[row.page, :, : len(left)] = left.T.to(history.dtype)
            positions[row.page] += turn.done
        return result

    def _convolve(self, layer: RecurrentLayer, inputs: RecurrentInputs, rows: list[StateRow]) -> torch.Tensor:
        """``[token_count, channels]`` in the dtype of the computation, without activation."""
        raw = inputs.conv_inputs.to(_computed(inputs.conv_inputs.dtype))
        weight = inputs.conv_weight.to(raw.dtype)
        bias = None if inputs.conv_bias is None else inputs.conv_bias.to(raw.dtype)
        sums = torch.zeros_like(raw)
        states = self._view(layer, CONV_STATE)
        for row in rows:
            state = states[row.source].to(raw.dtype)
            sums[row.tokens], history = reference.causal_conv(raw[row.tokens], weight, bias, state)
            states[list(row.targets)] = reference.conv_states(history, layer.columns, row.after).to(states.dtype)
        return sums

    def _view(self, layer: RecurrentLayer, stream: str) -> torch.Tensor:
        """``[page, *shape of the state]`` in the dtype that it is stored in."""
        shape, dtype = layer.stored(stream)
        return self._memory.view(layer.id, stream, shape, getattr(torch, dtype))


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
