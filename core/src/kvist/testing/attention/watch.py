"""What the kit looks at around a backend's calls: bytes written, the step, the inputs."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from kvist.layout import Group, Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import ceil_div
from kvist.step import Step
from kvist.testing.attention.case import Case


def failure(case: Case, what: str) -> AssertionError:
    """What a test raises; the report adds the clause and what to change."""
    return AssertionError(f"{case}: {what}")


class Writes:
    """Which bytes changed during a call? A layer may change its parts of the pages with new tokens, ``begin`` none."""

    def __init__(self, memory: DeviceMemory, case: Case, step: Step) -> None:
        self._memory, self._case, self._step = memory, case, step
        self._layout = memory.layout
        self._before = memory.bytes.clone()

    def check(self, layer_id: int | None) -> None:
        """Raise unless everything that changed since the last check belongs to the layer; ``None`` for ``begin``."""
        changed = (self._memory.bytes != self._before).cpu().numpy()
        if layer_id is not None:
            changed &= ~self._own(layer_id)
        if changed.any():
            where = _describe(self._layout, int(np.flatnonzero(changed)[0]), self._step)
            call = "begin()" if layer_id is None else f"forward() of layer {layer_id}"
            count = int(changed.sum())
            raise failure(self._case, f"{call} changed {count} bytes that are not its own, the first in {where}")
        self._before = self._memory.bytes.clone()

    def _own(self, layer_id: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        own = np.zeros(self._layout.arena_bytes, np.bool_)
        streams = next(layer.streams for layer in self._case.spec.layers if layer.id == layer_id)
        for group in self._layout.groups:
            parts = [part for part in group.parts if part.layer_id == layer_id and part.stream in streams]
            if parts:
                table = self._step.tables[group.index]
                for row in range(self._step.row_count):
                    for page in table[self._step.slots[row]][self._columns(group, row)]:
                        for part in parts:
                            begin = int(page) * group.page_bytes + part.offset
                            own[begin : begin + part.byte_count] = True
        return own

    def _columns(self, group: Group, row: int) -> slice:
        """The columns of the row's table whose pages it writes."""
        step, block = self._step, self._layout.block_tokens
        count, length = int(step.query_lengths[row]), int(step.lengths[row])
        if group.exact:
            apart = group.retention.draft_pages and len(step.drafts) and step.drafts[row]
            return slice(1, count + 1) if apart else slice(0, 1)
        return slice((length - count) // block, ceil_div(length, block))


def _describe(layout: Layout, offset: int, step: Step) -> str:
    """Where a byte of the arena lies, as far as the step's tables tell."""
    for group in layout.groups:
        page, inside = divmod(offset, group.page_bytes)
        if page == 0 or (step.tables[group.index] == page).any():
            parts = [part for part in group.parts if part.offset <= inside < part.offset + part.byte_count]
            part = f"layer {parts[0].layer_id} stream {parts[0].stream.name!r}" if parts else "the padding"
            reserved = ", the reserved one" if page == 0 else ""
            return f"{part} of page {page}{reserved}, group {group.name}"
    return f"a page that no table names (byte {offset} of the arena)"


class StepCopy:
    """A step's arrays as they were, to compare with."""

    def __init__(self, case: Case, step: Step) -> None:
        self._case, self._step = case, step
        self._copies = {name: _copies(getattr(step, name)) for name in _array_fields()}

    def check(self) -> None:
        """Raise when an array changed."""
        for name, copies in self._copies.items():
            for index, (now, then) in enumerate(zip(_arrays(getattr(self._step, name)), copies)):
                if not np.array_equal(now, then):
                    which = f"{name}[{index}]" if name in ("tables", "copies", "fresh", "saves") else name
                    raise failure(self._case, f"step.{which} changed while the step ran")


def _array_fields() -> list[str]:
    return [field.name for field in attrs.fields(Step) if field.name not in ("id", "decode_rows")]


def _arrays(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _copies(value: Any) -> tuple[Any, ...]:
    return tuple(array.copy() for array in _arrays(value))


class InputsCopy:
    """A layer's inputs as they were, to compare with."""

    def __init__(self, case: Case, inputs: Any) -> None:
        self._case, self._inputs = case, inputs
        self._copies = {
            field.name: value.clone()
            for field in attrs.fields(type(inputs))
            if isinstance(value := getattr(inputs, field.name), torch.Tensor)
        }

    def check(self, layer_id: int) -> None:
        """Raise when a tensor changed."""
        for name, copy in self._copies.items():
            if not torch.equal(getattr(self._inputs, name), copy):
                raise failure(self._case, f"forward() of layer {layer_id} changed inputs.{name}")
