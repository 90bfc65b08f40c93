"""The backend: a C kernel that writes and reads pages in place."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import numpy as np
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.geometry import GQALayer, check_inputs, gqa_layer, gqa_layers
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError, StateError
from kvist.layout import Order, PageLayout
from kvist.spec import CacheSpec, Stream
from kvist.step import IntArray, Step
from kvist_attention_cpu.native import DTYPES, LayerArguments, StepArguments, load_kernel

#: Tokens of a tile of keys, as the kernel has them.
_TILE_TOKENS = 16
_DTYPE_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(DTYPES)}


@attrs.frozen
class KeyTiles:
    """Keys ``[head, tile, element, 16 tokens]``, values ``[head, token, element]``; nothing is padded.

    Blocks that are no multiple of 16 tokens have one tile as wide as the block.
    """

    tag: str = "gqa-key-tiles-1"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        """Exactly the rows."""
        return row_count * stream.row.row_bytes

    def order(self, stream: Stream, row_count: int) -> Order:
        """Head after head; of keys a tile is one piece."""
        tile = _TILE_TOKENS if row_count % _TILE_TOKENS == 0 else row_count
        return Order(by_unit=True, run_rows=tile if stream.name == "k" else 1)


class NativeCpuBackend(AttentionBackend):
    """The C kernel: one call per layer writes all new rows and attends over all rows of the step, in place.

    Serves MHA, GQA and MQA with any block size, head sizes, window, sink tokens, sink logits and softcap; rows and
    inputs of float32, bfloat16 or float16, computed in float32. Runs on ``torch.get_num_threads()`` threads, as of
    ``begin``. Owns its scratch and outputs, which only grow.
    """

    name = "cpu-native"

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """Key tiles. Raises KernelUnavailableError when there is no kernel on this machine."""
        load_kernel()
        gqa_layers(spec, cls.name, DTYPES)
        return KeyTiles()

    def __init__(self, context: BackendContext) -> None:
        memory = context.memory
        if memory.device.type != "cpu":
            raise SpecError(
                f"backend {self.name!r} cannot serve memory on {memory.device}", hint="use memory on the CPU"
            )
        self._kernel = load_kernel()
        self._attend = self._kernel.kvist_attend
        self._block_tokens = memory.layout.block_tokens
        # The kernel points into these; they live as long as the backend, which keeps the memory alive too.
        self._memory = memory
        self._layers: dict[int, tuple[GQALayer, LayerArguments]] = {}
        self._groups: dict[int, StepArguments] = {}
        for spec_layer in context.spec.layers:
            layer = gqa_layer(spec_layer, self.name, DTYPES)
            group, key = memory.layout.part(layer.id, "k")
            _, value = memory.layout.part(layer.id, "v")
            step_arguments = self._groups.setdefault(group.index, StepArguments())
            arguments = LayerArguments(
                step=ctypes.addressof(step_arguments),
                arena=memory.bytes.data_ptr(),
                page_bytes=group.page_bytes,
                key_offset=key.offset,
                value_offset=value.offset,
                block_tokens=self._block_tokens,
                heads=layer.heads,
                key_size=layer.key_size,
                value_size=layer.value_size,
                dtype=DTYPES.index(layer.dtype),
            )
            self._layers[layer.id] = (layer, arguments)
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._outputs: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._threads = 1
        self._step: Step | None = None
        self._token_count = 0
        self._held: tuple[IntArray, ...] = ()

    def begin(self, step: Step) -> None:
        """Cut the tables to the step's rows; the kernel finds the rest itself."""
        width = -(-int(step.lengths.max(initial=0)) // self._block_tokens)
        starts = step.query_starts
        lengths = np.ascontiguousarray(step.lengths, np.int32)
        units = np.empty(2 * int(starts[-1]) + 2, np.int32)
        held = [starts, lengths, units]
        self._threads = torch.get_num_threads()
        for group_index, arguments in self._groups.items():
            table = np.ascontiguousarray(step.tables[group_index][step.slots, :width], np.int32)
            held.append(table)
            arguments.table, arguments.width = table.ctypes.data, width
            arguments.starts, arguments.lengths = starts.ctypes.data, lengths.ctypes.data
            arguments.units, arguments.rows = units.ctypes.data, len(lengths)
            arguments.threads = self._threads
        self._step, self._token_count, self._held = step, int(starts[-1]), tuple(held)
        self._outputs.clear()

    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write, then attend. ``inputs`` is a :class:`GQAInputs`; the result is reused by the next call.

        Raises StateError before the first ``begin`` and when a row to write or read has no page, SpecError for a dtype
        that the kernel does not know.
        """
        assert isinstance(inputs, GQAInputs)
        layer, arguments = self._layers[layer_id]
        step = check_inputs(layer, inputs, self._step, self._token_count)
        query, key, value = inputs.query, inputs.key, inputs.value
        code = _DTYPE_CODES.get(query.dtype)
        if code is None:
            raise SpecError(f"backend {self.name!r}: inputs are {query.dtype}", hint=f"use one of {', '.join(DTYPES)}")
        if key.dtype != query.dtype or value.dtype != query.dtype:
            key, value = key.to(query.dtype), value.to(query.dtype)
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        if not query_strides[2] == key_strides[2] == value_strides[2] == 1:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        output = self._output(query, layer.value_size)
        self._prepare(arguments, query.shape[1] // layer.heads)
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        arguments.query_token, arguments.query_head, _ = query_strides
        arguments.key_token, arguments.key_head, _ = key_strides
        arguments.value_token, arguments.value_head, _ = value_strides
        arguments.output, arguments.query_dtype = output.data_ptr(), code
        arguments.window, arguments.sink_tokens = inputs.window or 0, inputs.sink_tokens
        arguments.scale, arguments.softcap = inputs.scale, inputs.softcap or 0.0
        sink_logits = inputs.sink_logits
        if sink_logits is not None:
            sink_logits = sink_logits.to(torch.float32).contiguous()
        arguments.sink_logits = None if sink_logits is None else sink_logits.data_ptr()
        if self._attend(ctypes.byref(arguments)):
            raise StateError(f"layer {layer_id}: a row that step {step.id} writes or reads has no page")
        return output

    def _prepare(self, arguments: LayerArguments, group_size: int) -> None:
        """Scratch for every thread; it only grows."""
        if arguments.group_size != group_size:
            arguments.group_size = group_size
            floats = self._kernel.kvist_scratch_floats(group_size, arguments.key_size, arguments.value_size)
            arguments.scratch_floats = -(-floats // 16) * 16
        needed = arguments.scratch_floats * self._threads
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.float32)
        arguments.scratch = self._scratch.data_ptr()

    def _output(self, query: torch.Tensor, value_size: int) -> torch.Tensor:
        """``[tokens, query heads, value size]``, the same memory in every call with as many tokens or fewer."""
        kind = (query.shape[1], value_size, query.dtype)
        output = self._outputs.get(kind)
        if output is None:  # once per step, and not once per layer
            tokens = query.shape[0]
            buffer = self._buffers.get(kind)
            if buffer is None or len(buffer) < tokens:
                buffer = self._buffers[kind] = torch.empty(tokens, kind[0], value_size, dtype=query.dtype)
            output = self._outputs[kind] = buffer[:tokens]
        return output
