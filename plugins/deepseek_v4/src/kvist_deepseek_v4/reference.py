"""DeepSeek-V4's attention in plain torch: the oracle of kernels, and the backend for a CPU."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.layout import PageLayout
from kvist.spec import CacheSpec
from kvist.step import IntArray, Step
from kvist_deepseek_v4.checks import check_inputs
from kvist_deepseek_v4.compress import norm, pool, rotate, window_in_front
from kvist_deepseek_v4.formats import pages_of
from kvist_deepseek_v4.geometry import COMPRESSED, INDEX_K, INDEX_STATE, KV, STATE, LayerGeometry, layers_of
from kvist_deepseek_v4.inputs import DeepseekV4Inputs
from kvist_deepseek_v4.rows import StreamRows
from kvist_deepseek_v4.selection import index_scores, select, visible_rows

#: Elements of selected rows that are gathered at a time.
_GATHERED = 1 << 23


@attrs.frozen(eq=False)
class StepRow:
    """One sequence of the step. tokens: its part of the batch. tables: its pages by group."""

    tokens: slice
    begin: int
    end: int
    tables: tuple[IntArray, ...]


@attrs.frozen(eq=False)
class Series:
    """What compressed rows, or index rows, are made from; see :class:`DeepseekV4Inputs`. names: of the streams of
    states and of rows."""

    names: tuple[str, str]
    state: torch.Tensor
    position_bias: torch.Tensor
    norm: torch.Tensor
    frequencies: torch.Tensor
    eps: float

    @classmethod
    def of_rows(cls, inputs: Any) -> Series:
        learned = inputs.position_bias, inputs.norm, inputs.frequencies, inputs.eps
        return cls((STATE, COMPRESSED), inputs.state, *learned)

    @classmethod
    def of_index(cls, inputs: Any) -> Series:
        learned = inputs.index_position_bias, inputs.index_norm, inputs.frequencies, inputs.eps
        return cls((INDEX_STATE, INDEX_K), inputs.index_state, *learned)


class ReferenceBackend(AttentionBackend):
    """One sequence after the other: write rows, make the compressed rows that the step completes, select, attend.

    Attention, pooling and scores are computed in float32, float64 for float64 queries. Rows are stored as the spec
    says, encoded ones too, and rounded before they take part, so a result does not depend on how a prompt was cut into
    steps. A step's own window rows and states are read from the inputs: a chunk may be longer than any window, and
    where the table names no page they are not written. Serves any sizes, on any torch device.
    """

    name = "deepseek-v4-reference"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major, planar where rows are encoded: see :func:`~kvist_deepseek_v4.formats.pages_of`."""
        layers_of(spec, cls.name)
        return pages_of(spec)

    def __init__(self, context: BackendContext) -> None:
        self._layers = layers_of(context.spec, self.name)
        domain = context.spec.domain
        self._streams = {
            layer.id: {stream.name: StreamRows.of(context.memory, layer.id, stream, domain) for stream in layer.streams}
            for layer in context.spec.layers
        }
        self._device = context.memory.device
        self._step: Step | None = None
        self._rows: list[StepRow] = []

    def begin(self, step: Step) -> None:
        """Keep the step, cut into sequences."""
        starts = step.query_starts.tolist()
        self._step = step
        self._rows = [
            StepRow(
                slice(starts[row], starts[row + 1]),
                int(step.lengths[row] - step.query_lengths[row]),
                int(step.lengths[row]),
                tuple(table[step.slots[row]] for table in step.tables),
            )
            for row in range(step.row_count)
        ]

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write, compress, attend. ``inputs`` is a :class:`DeepseekV4Inputs`; the result, ``[T, heads, D]`` and still
        rotated, is a new tensor. Raises StateError before the first ``begin`` and where a row that is read has no page,
        SpecError for inputs that do not fit.
        """
        assert isinstance(inputs, DeepseekV4Inputs)
        layer, kv = self._layers[layer_id], self._streams[layer_id][KV]
        check_inputs(layer, inputs, self._step)
        output = torch.empty_like(inputs.query)
        for row in self._rows:
            window = self._write_window(layer, kv, row, inputs.kv[row.tokens])
            if layer.ratio:
                self._compress(layer, row, Series.of_rows(inputs))
            if layer.index_dim:
                self._compress(layer, row, Series.of_index(inputs))
            output[row.tokens] = self._attend(layer, row, inputs, window)
        return output

    def select(self, layer_id: int, row: int, inputs: DeepseekV4Inputs) -> torch.Tensor:
        """The compressed rows that the queries of the step's sequence ``row`` read, once its rows are written:
        int64 ``[Q, n]``, see :func:`~kvist_deepseek_v4.selection.select`."""
        return self._select(self._layers[layer_id], self._rows[row], inputs)

    def _write_window(self, layer: LayerGeometry, kv: StreamRows, row: StepRow, own: torch.Tensor) -> torch.Tensor:
        """Store the step's rows. Returns all that its queries may read, the last of the window included."""
        table = row.tables[kv.group]
        cached = kv.read(table, max(0, row.begin - layer.window + 1), row.begin)
        kv.write(table, row.begin, own)
        return torch.cat((cached, kv.stored(own)))

    def _compress(self, layer: LayerGeometry, row: StepRow, series: Series) -> None:
        """Store the step's states, then the rows of the windows that it completes."""
        states, rows = (self._streams[layer.id][name] for name in series.names)
        ratio, table = layer.ratio, row.tables[states.group]
        own = self._own_states(layer, row, series)
        first, end = row.begin // ratio, row.end // ratio
        start = max(0, (first - layer.overlap) * ratio)
        # Read before they are written over: a ring may need the place.
        known = torch.cat((states.read(table, start, row.begin), own))[: end * ratio - start] if first < end else own
        states.write(table, row.begin, own)
        if first == end:
            return
        if layer.overlap and not first:
            known = torch.cat((window_in_front(known, ratio), known))
        pooled = norm(pool(known, ratio, layer.overlap), series.norm, series.eps)
        positions = torch.arange(first, end, device=self._device) * ratio
        rows.write(row.tables[rows.group], first, rotate(pooled, positions, series.frequencies))

    def _own_states(self, layer: LayerGeometry, row: StepRow, series: Series) -> torch.Tensor:
        """The states of the step's tokens, gates with the bias of their positions."""
        positions = torch.arange(row.begin, row.end, device=self._device)
        own = series.state[row.tokens].float()
        return torch.stack((own[:, 0], own[:, 1] + series.position_bias.float()[positions % layer.ratio]), dim=1)

    def _select(self, layer: LayerGeometry, row: StepRow, inputs: DeepseekV4Inputs) -> torch.Tensor:
        positions = torch.arange(row.begin, row.end, device=self._device)
        visible = visible_rows(positions, layer.ratio)
        assert inputs.index_query is not None and inputs.index_weights is not None
        keys = self._streams[layer.id][INDEX_K]
        known = keys.read(row.tables[keys.group], 0, row.end // layer.ratio)
        query = keys.codec.turn(inputs.index_query[row.tokens])
        scores = index_scores(query, inputs.index_weights[row.tokens], known)
        return select(scores, visible, inputs.topk)

    def _attend(
        self, layer: LayerGeometry, row: StepRow, inputs: DeepseekV4Inputs, window: torch.Tensor
    ) -> torch.Tensor:
        """One sequence. window: ``[K, D]``, the last rows up to its last token. Returns ``[Q, heads, D]``."""
        query = inputs.query[row.tokens]
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        query = query.to(dtype)
        positions = torch.arange(row.begin, row.end, device=self._device)
        keys = torch.arange(row.end - len(window), row.end, device=self._device)
        distance = positions[:, None] - keys
        seen = (distance >= 0) & (distance < layer.window)
        values = [(window.to(dtype), seen)]
        if layer.ratio:
            stream = self._streams[layer.id][COMPRESSED]
            compressed = stream.read(row.tables[stream.group], 0, row.end // layer.ratio).to(dtype)
            if layer.index_dim:
                ids = self._select(layer, row, inputs)
                return self._attend_selected(layer, query, values[0], compressed, ids, inputs)
            visible = visible_rows(positions, layer.ratio)
            values.append((compressed, torch.arange(len(compressed), device=self._device) < visible[:, None]))
        rows = torch.cat([each for each, _ in values])
        seen = torch.cat([each for _, each in values], dim=1)
        weights = _weights(query @ rows.T, seen, inputs)
        return weights @ rows

    def _attend_selected(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        window: tuple[torch.Tensor, torch.Tensor],
        compressed: torch.Tensor,
        ids: torch.Tensor,
        inputs: DeepseekV4Inputs,
    ) -> torch.Tensor:
        """As above, with rows of its own for each query: ``ids`` ``[Q, n]``, -1 for none."""
        rows, seen = window
        output = torch.empty_like(query)
        part = max(1, _GATHERED // max(1, ids.shape[1] * layer.head_dim))
        for first in range(0, len(query), part):
            queries = slice(first, first + part)
            own = (
                compressed[ids[queries].clamp(min=0)]
                if len(compressed)
                else compressed.expand(len(query[queries]), 0, -1)
            )
            scores = torch.cat((query[queries] @ rows.T, query[queries] @ own.transpose(1, 2)), dim=-1)
            weights = _weights(scores, torch.cat((seen[queries], ids[queries] >= 0), dim=-1), inputs)
            output[queries] = weights[..., : len(rows)] @ rows + weights[..., len(rows) :] @ own
        return output


def _weights(scores: torch.Tensor, seen: torch.Tensor, inputs: DeepseekV4Inputs) -> torch.Tensor:
    """Softmax of ``scores * scale`` over what is seen and one sink per head. scores ``[Q, heads, K]``, seen ``[Q, K]``.

    A query sees itself, so there is always something beside the sink.
    """
    scores = (scores * inputs.scale).masked_fill(~seen[:, None], float("-inf"))
    sinks = inputs.sinks.to(scores.dtype)[None, :, None].expand(len(scores), -1, 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
