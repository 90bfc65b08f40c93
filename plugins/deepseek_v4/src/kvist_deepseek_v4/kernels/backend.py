"""DeepSeek-V4's attention in Triton kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.errors import SpecError
from kvist.layout import PageLayout
from kvist.spec import CacheSpec
from kvist.step import Step
from kvist_deepseek_v4.checks import check_inputs
from kvist_deepseek_v4.formats import encodings, pages_of
from kvist_deepseek_v4.geometry import COMPRESSED, INDEX_K, INDEX_STATE, KV, STATE, layers_of
from kvist_deepseek_v4.inputs import DeepseekV4Inputs
from kvist_deepseek_v4.kernels.attend import attend
from kvist_deepseek_v4.kernels.batch import Batch
from kvist_deepseek_v4.kernels.compress import compress
from kvist_deepseek_v4.kernels.score import QUERIES, index_scores
from kvist_deepseek_v4.kernels.select import select
from kvist_deepseek_v4.kernels.write import write_rows, write_states
from kvist_deepseek_v4.rows import StreamRows

#: Scores that are held at a time: 1 GiB.
_SCORES = 1 << 28


class TritonBackend(AttentionBackend):
    """All rows of a step at once: compress the windows that it closes, score, select, attend; what the step itself
    brings is read from the inputs, and written when what it may overwrite has been read.

    Serves plain rows of even
    sizes. Pages are arranged as the reference arranges them, so either may go on where the other stopped.
    """

    name = "deepseek-v4-triton"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Row-major. Raises SpecError for encoded rows, and for rows of which rope cannot turn pairs."""
        hint = "use the backend 'deepseek-v4-reference'"
        for layer in layers_of(spec, cls.name).values():
            for size in (layer.head_dim, layer.index_dim):
                if size % 2:
                    raise SpecError(f"backend {cls.name!r}: layer {layer.id} has rows of {size} elements", hint=hint)
        for name, encoding in encodings(spec).items():
            raise SpecError(f"backend {cls.name!r}: {name!r} is stored as {encoding}", hint=hint)
        return pages_of(spec)

    def __init__(self, context: BackendContext) -> None:
        memory, spec = context.memory, context.spec
        self.page_layout(spec)
        self._layers = layers_of(spec, self.name)
        self._streams = {
            layer.id: {each.name: StreamRows.of(memory, layer.id, each, spec.domain) for each in layer.streams}
            for layer in spec.layers
        }
        groups = {rows.group for streams in self._streams.values() for rows in streams.values()}
        self._batch = Batch(memory.device, memory.layout, groups)

    def begin(self, step: Step) -> None:
        """Stage the step's tables. Raises StateError when a block that may be read has no page."""
        self._batch.stage(step)

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Compress, attend, write. ``inputs`` is a :class:`DeepseekV4Inputs`; the result, ``[T, heads, D]`` and still
        rotated, is a new tensor. Raises StateError before the first ``begin``, SpecError for inputs that do not fit.
        """
        assert isinstance(inputs, DeepseekV4Inputs)
        layer, streams, batch = self._layers[layer_id], self._streams[layer_id], self._batch
        check_inputs(layer, inputs, batch.step)
        kv = streams[KV]
        [own] = kv.codec.encode(inputs.kv)
        own = own.contiguous()
        if layer.ratio:
            self._compress(streams, (STATE, COMPRESSED), inputs.state, inputs.position_bias, inputs.norm, inputs)
        ids = None
        if layer.index_dim:
            learned = inputs.index_position_bias, inputs.index_norm
            self._compress(streams, (INDEX_STATE, INDEX_K), inputs.index_state, *learned, inputs)
            ids = self.select(layer_id, inputs)
        output = attend(
            inputs.query,
            inputs.scale,
            inputs.sinks,
            kv,
            own,
            layer.window,
            streams.get(COMPRESSED),
            layer.ratio,
            ids,
            batch,
        )
        # A ring may need the place of rows that have just been read.
        write_rows(kv, own, batch)
        return output

    def select(self, layer_id: int, inputs: DeepseekV4Inputs) -> torch.Tensor:
        """The compressed rows that the step's queries read, once its rows are written: int32 ``[T, n]``, ascending,
        then -1."""
        layer, keys, batch = self._layers[layer_id], self._streams[layer_id][INDEX_K], self._batch
        assert inputs.index_query is not None and inputs.index_weights is not None
        columns = batch.longest // layer.ratio
        width = min(inputs.topk, columns)
        tiles = batch.tiles(QUERIES).on_host
        ids = torch.empty(len(inputs.kv), width, dtype=torch.int32, device=inputs.kv.device)
        if not width:
            return ids
        step = max(1, _SCORES // (columns * QUERIES))
        for first in range(0, len(tiles), step):
            end = min(first + step, len(tiles))
            tokens = slice(int(tiles[first, 1]), int(np.sum(tiles[end - 1, 1:])))
            scores = index_scores(
                inputs.index_query, inputs.index_weights, keys, layer.ratio, batch, first, end, columns
            )
            ids[tokens] = select(scores, batch.positions[tokens], layer.ratio, inputs.topk)
        return ids

    def _compress(
        self,
        streams: dict[str, StreamRows],
        names: tuple[str, str],
        own: torch.Tensor | None,
        position_bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        inputs: DeepseekV4Inputs,
    ) -> None:
        assert own is not None and position_bias is not None and norm is not None and inputs.frequencies is not None
        states, rows = (streams[name] for name in names)
        compress(states, rows, own, position_bias, norm, inputs.frequencies, inputs.eps, self._batch)
        write_states(states, own, position_bias, self._batch)
