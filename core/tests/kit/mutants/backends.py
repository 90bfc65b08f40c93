"""Attention backends with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from kit.mutants.base import Mutant
from kit.toys import Decay, DecaySuite, Plain, PlainSuite, Pooled, PooledSuite, Ring, RingSuite

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError
from kvist.layout import PageLayout, RowMajor
from kvist.spec import CacheSpec, Layer
from kvist.step import NO_PAGE, Step
from kvist.testing.attention import AttentionBackendTests

SUITES: dict[type[AttentionBackend], type[AttentionBackendTests]] = {
    Plain: PlainSuite,
    Decay: DecaySuite,
    Pooled: PooledSuite,
    Ring: RingSuite,
}


def _place(view: torch.Tensor) -> tuple[int, int]:
    """Tells the streams of a cache apart."""
    return view.storage_offset(), view.stride(0)


# Before the first step.


class CountsItsLayouts(Plain):
    asked = 0

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        cls.asked += 1
        return RowMajor(f"row-major-{cls.asked}")


class AcceptsAnything(Plain):
    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        return RowMajor()


class MissesAStream(Plain):
    """Looks at the streams that are there."""

    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        for layer in spec.layers:
            if unknown := {stream.name for stream in layer.streams} - {"k", "v"}:
                raise SpecError(f"layer {layer.id}: {unknown}")
        return RowMajor()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        for layer in self.layers.values():
            self.geometry(layer)


class RaisesAnything(Plain):
    @classmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        for layer in spec.layers:
            assert [stream.name for stream in layer.streams] == ["k", "v"]
        return RowMajor()


class ClearsTheMemory(Plain):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        context.memory.bytes.zero_()


class AnswersWithoutAStep(Plain):
    def forward(self, layer_id: int, inputs: GQAInputs) -> torch.Tensor:
        if self.step is None:
            return torch.zeros_like(inputs.query)
        return super().forward(layer_id, inputs)


# Values.


class ForgetsTheScale(Plain):
    def attend(self, query: torch.Tensor, key: Any, value: Any, mask: Any, inputs: GQAInputs) -> torch.Tensor:
        return super().attend(query, key, value, mask, attrs.evolve(inputs, scale=1.0))


class InterleavesHeads(Plain):
    def of_query_heads(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        return rows.repeat(1, count // rows.shape[1], 1)


class WindowTooLong(Plain):
    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        if inputs.window is not None:
            inputs = attrs.evolve(inputs, window=inputs.window + 1)
        return super().mask(queries, keys, inputs)


class WindowTooShort(Plain):
    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        if inputs.window is not None:
            inputs = attrs.evolve(inputs, window=inputs.window - 1)
        return super().mask(queries, keys, inputs)


class WindowOfTheFirstQuery(Plain):
    """One mask for the whole chunk."""

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        mask = super().mask(queries, keys, inputs)
        if inputs.window is not None:
            mask &= (keys > queries[0] - inputs.window) & (keys <= queries[:, None])
            mask |= super().mask(queries, keys, attrs.evolve(inputs, window=None)) & (keys > queries[0] - inputs.window)
        return mask


class IgnoresSinkTokens(Plain):
    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        return super().mask(queries, keys, attrs.evolve(inputs, sink_tokens=0))


class IgnoresSinkLogits(Plain):
    def weights(self, scores: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        return torch.softmax(scores, -1)


class CapsSinksToo(Plain):
    def weights(self, scores: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        if inputs.sink_logits is not None:
            inputs = attrs.evolve(inputs, sink_logits=torch.tanh(inputs.sink_logits))
        return super().weights(scores, inputs)


class IgnoresTheSoftcap(Plain):
    def capped(self, scores: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        return scores


class RefusesTheSoftcap(Plain):
    def capped(self, scores: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        if inputs.softcap is not None:
            raise NotImplementedError("softcap")
        return scores


class RoundsAfterAttending(Plain):
    """Attends over the step's own rows as they come in, and rounds what it stores."""

    def row(self, layer: Layer, inputs: GQAInputs, row: int, tokens: slice, positions: Any, output: Any) -> None:
        self.own = {"k": inputs.key[tokens], "v": inputs.value[tokens]}
        self.first = int(positions[0])
        self.order = iter(("k", "v"))
        super().row(layer, inputs, row, tokens, positions, output)

    def read(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = super().read(view, pages, positions).float()
        own = positions >= self.first
        rows[own] = self.own[next(self.order)][positions[own] - self.first].float()
        return rows


class StartsEveryChunkAnew(Plain):
    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        return super().mask(queries, keys, inputs) & (keys >= queries[0] // 8 * 8)


class OneLengthForTheBatch(Plain):
    """Every row's first position is that of the first row."""

    def row(self, layer: Layer, inputs: GQAInputs, row: int, tokens: slice, positions: Any, output: Any) -> None:
        assert self.step is not None
        if row and len(positions) > 1:
            positions = positions - positions[0] + int(self.step.lengths[0] - self.step.query_lengths[0])
        super().row(layer, inputs, row, tokens, positions, output)


class RowsForSlots(Plain):
    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        group, _ = self.memory.layout.part(layer.id, name)
        assert self.step is not None
        return torch.from_numpy(self.step.tables[group.index][row].astype("int64"))


class PagesInARow(Plain):
    """Takes a sequence's pages to be neighbours."""

    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        pages = super().pages(layer, name, row)
        return pages[0] + torch.arange(len(pages))


class FirstGroupsTable(Plain):
    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        assert self.step is not None
        return torch.from_numpy(self.step.tables[0][self.step.slots[row]].astype("int64"))


class AllLayersAreTheFirst(Plain):
    def stream(self, layer: Layer, name: str) -> torch.Tensor:
        view = super().stream(layer, name)
        twins = [other for other in self.layers.values() if other.streams == layer.streams]
        return super().stream(twins[0], name) if len(twins) > 1 else view


class NeverTheSame(Plain):
    def attend(self, query: Any, key: Any, value: Any, mask: Any, inputs: GQAInputs) -> torch.Tensor:
        output = super().attend(query, key, value, mask, inputs)
        return output + 1e-7 * torch.rand_like(output)


# Pages.


class ReadsOneRowTooMany(Plain):
    """The row after the last, at a weight of zero."""

    def readable(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(int(positions[-1]) + 2)

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        mask = super().mask(queries, keys, inputs)
        self.beyond = torch.nonzero(keys > queries[-1])[:, 0]
        mask[0, self.beyond] = (keys[self.beyond] // self.block_tokens) == queries[-1] // self.block_tokens
        return mask


class ReadsWholeBlocks(Plain):
    """And masks scores, but not values."""

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        self.real = super().mask(queries, keys, inputs)
        read = self.real.any(0)
        blocks = torch.unique(keys[read] // self.block_tokens)
        return (torch.isin(keys // self.block_tokens, blocks))[None, :].expand(len(queries), -1)

    def readable(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(-(-(int(positions[-1]) + 1) // self.block_tokens) * self.block_tokens)

    def attend(self, query: Any, key: Any, value: Any, mask: Any, inputs: GQAInputs) -> torch.Tensor:
        read = torch.nonzero(torch.isin(torch.arange(self.real.shape[1]), self.kept(mask)))[:, 0]
        return super().attend(query, key, value, self.real[:, read], inputs)

    def row(self, layer: Layer, inputs: GQAInputs, row: int, tokens: slice, positions: Any, output: Any) -> None:
        self.width = len(self.readable(positions))
        super().row(layer, inputs, row, tokens, positions, output)

    def kept(self, mask: torch.Tensor) -> torch.Tensor:
        blocks = torch.unique(torch.nonzero(self.real.any(0))[:, 0] // self.block_tokens)
        return torch.cat([torch.arange(b * self.block_tokens, (b + 1) * self.block_tokens) for b in blocks.tolist()])


class GathersEverySlot(Plain):
    """Gathers the pages of the whole table, of which it then needs a few."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        for group, table in zip(self.memory.layout.groups, step.tables):
            self.memory.pages(group.index)[
                torch.from_numpy(table[: int(step.slots.max(initial=0)) + 1].astype("int64"))
            ]


class LastPageForNone(Plain):
    """Sums over the table's whole row with -1 for the last page of the arena."""

    def attend(self, query: Any, key: Any, value: Any, mask: Any, inputs: GQAInputs) -> torch.Tensor:
        return super().attend(query, key, value, mask, inputs) + 0 * self.stray

    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        pages = super().pages(layer, name, row)
        unused = pages[-1:]
        self.stray = self.stream(layer, name)[unused].float().sum() if len(pages) else 0.0
        return pages


class WritesPageZero(Plain):
    """Drops what it does not need in the reserved page."""

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        super().write(view, pages, positions, new)
        view[0, 0] = 0.0


class ClearsTheRestOfTheTable(Plain):
    """Zeroes the blocks behind the new rows; no page is the last page."""

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        super().write(view, pages, positions, new)
        behind = pages[int(positions[-1]) // self.block_tokens + 1 :]
        view[behind[behind == NO_PAGE]] = 0.0


class ChangesWhatItReads(Plain):
    """The last bit of the rows that it reads, where they lie, also in shared pages."""

    def read(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        where = (pages[positions // self.block_tokens], positions % self.block_tokens)
        rows = view[where]
        view[where] = torch.nextafter(rows, torch.zeros_like(rows))
        return rows


class WritesTheNextLayer(Plain):
    """A part's size taken to be the row's in float64."""

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        super().write(view, pages, positions, new)
        size = view[0].numel() * view.element_size()
        group = next(
            group for group in self.memory.layout.groups if group.page_bytes == view.stride(0) * view.element_size()
        )
        end = (view.storage_offset() * view.element_size()) % group.page_bytes + size
        if end < group.page_bytes:
            self.memory.pages(group.index)[pages[positions // self.block_tokens], end] = 0


class OnePeakForTheBatch(Plain):
    """One maximum for all rows, so that NaN of a padding row is everybody's."""

    def forward(self, layer_id: int, inputs: GQAInputs) -> torch.Tensor:
        output = super().forward(layer_id, inputs)
        return output + 0 * output.amax() if len(output) else output


class PaddingIsAnError(Plain):
    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        pages = super().pages(layer, name, row)
        assert pages[0] != 0, "no such page"
        return pages


class KeepsRowsPerSlot(Plain):
    """Gathers a sequence once, and then adds what each step brings."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.gathered: dict[Any, torch.Tensor] = {}

    def row(self, layer: Layer, inputs: GQAInputs, row: int, tokens: slice, positions: Any, output: Any) -> None:
        assert self.step is not None
        self.who = int(self.step.slots[row])
        super().row(layer, inputs, row, tokens, positions, output)

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        super().write(view, pages, positions, new)
        key, first = (self.who, *_place(view)), int(positions[0])
        old = self.gathered.get(key)
        if first == 0 or old is None or len(old) < first:
            old = super().read(view, pages, torch.arange(first))
        self.gathered[key] = torch.cat([old[:first], new.to(view.dtype)])

    def read(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.gathered[self.who, *_place(view)][positions]


class RowsOutsideThePages(Plain):
    """Keeps rows by page id in a dictionary, and writes pages only for show: copies pass it by."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.shadow: dict[Any, torch.Tensor] = {}

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        super().write(view, pages, positions, new)
        for page, position, row in zip(pages[positions // self.block_tokens].tolist(), positions.tolist(), new):
            self.shadow[*_place(view), page, position % self.block_tokens] = row.to(view.dtype).clone()

    def read(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found = super().read(view, pages, positions).clone()
        for index, position in enumerate(positions.tolist()):
            key = (*_place(view), int(pages[position // self.block_tokens]), position % self.block_tokens)
            found[index] = self.shadow.get(key, found.new_zeros(found.shape[1:]))
        return found


class TakesItAllForItsOwn(Plain):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.layers = {layer.id: layer for layer in context.memory.layout.spec.layers}
        for layer in self.layers.values():
            self.geometry(layer)


class TablesOfItsOwnSpec(Plain):
    """Numbers the groups of what it serves, not the cache's."""

    def pages(self, layer: Layer, name: str, row: int) -> torch.Tensor:
        retentions: list[Any] = []
        for other in self.layers.values():
            retentions += [other.streams[0].retention] if other.streams[0].retention not in retentions else []
        assert self.step is not None
        table = self.step.tables[retentions.index(layer.streams[0].retention)]
        return torch.from_numpy(table[self.step.slots[row]].astype("int64"))


# Steps, inputs, results.


class PatchesTables(Plain):
    """Puts page 0 where there is none."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        for table in step.tables:
            table.flags.writeable = True
            table[table == NO_PAGE] = 0


class CorrectsTheStep(Plain):
    """Lengths as a kernel wants them, in the step itself."""

    def begin(self, step: Step) -> None:
        super().begin(attrs.evolve(step))
        step.__dict__["lengths"] = step.lengths - 1


class ScalesTheQuery(Plain):
    """In place."""

    def attend(self, query: torch.Tensor, key: Any, value: Any, mask: Any, inputs: GQAInputs) -> torch.Tensor:
        query *= inputs.scale
        return super().attend(query, key, value, mask, attrs.evolve(inputs, scale=1.0))


class WritesLater(Plain):
    """Stores a step's rows when the next one begins."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.later: list[Any] = []

    def begin(self, step: Step) -> None:
        for view, pages, positions, new in self.later:
            super().write(view, pages, positions, new)
        self.later = []
        super().begin(step)

    def write(self, view: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
        super().write(view, pages, positions, new)
        self.later.append((view, pages, positions, new))


class TakesInputsForContiguous(Plain):
    def forward(self, layer_id: int, inputs: GQAInputs) -> torch.Tensor:
        def flat(tensor: torch.Tensor) -> torch.Tensor:
            strides = torch.empty(tensor.shape, device="meta").stride()
            return tensor.as_strided(tensor.shape, strides) if tensor.numel() else tensor

        flattened = attrs.evolve(inputs, query=flat(inputs.query), key=flat(inputs.key), value=flat(inputs.value))
        return super().forward(layer_id, flattened)


class OneOutputForAll(Plain):
    """Scratch of the class, which every cache shares."""

    scratch: dict[Any, torch.Tensor] = {}  # noqa: RUF012 - the fault

    def new_output(self, layer: Layer, inputs: GQAInputs) -> torch.Tensor:
        key = (inputs.query.dtype, inputs.query.shape[1], self.geometry(layer).value_size)
        output = self.scratch.get(key)
        if output is None or len(output) < len(inputs.query):
            output = self.scratch[key] = inputs.query.new_empty(256, *key[1:])
        return output[: len(inputs.query)]


class AlwaysFloat(Plain):
    def forward(self, layer_id: int, inputs: GQAInputs) -> torch.Tensor:
        return super().forward(layer_id, inputs).float()


class OneRowPerLayer(Plain):
    """Tokens flattened into one axis with the heads."""

    def forward(self, layer_id: int, inputs: GQAInputs) -> torch.Tensor:
        return super().forward(layer_id, inputs).flatten(1)


class CachesTables(Plain):
    """Gathers the tables when the batch changes: as long as the slots are the same, so are the pages."""

    kept: tuple[Any, Any] = (None, None)

    def begin(self, step: Step) -> None:
        slots = step.slots.tolist()
        if self.kept[0] != slots:
            self.kept = (slots, step.compact())
        self.step = attrs.evolve(step, tables=self.kept[1].tables, slots=self.kept[1].slots)


class TellsBatchesByTheirSlots(Plain):
    """The same array of slots: nobody came or went, so the rows of the tables are those of the step before."""

    kept: tuple[Any, Any] = (None, None)

    def begin(self, step: Step) -> None:
        if self.kept[0] is not step.slots:
            self.kept = (step.slots, step.compact())
        self.step = attrs.evolve(step, tables=self.kept[1].tables, slots=self.kept[1].slots)


class StaleLengths(Plain):
    """Decode metadata is counted on, not looked up."""

    kept: tuple[Any, Any] = (None, None)

    def begin(self, step: Step) -> None:
        shape = step.query_lengths.tolist()
        if self.kept[0] == shape and set(shape) == {1}:
            step = attrs.evolve(step, lengths=self.kept[1] + 1)
        self.kept = (shape, step.lengths)
        super().begin(step)


class LooksAtTheLatestStep(Plain):
    """Keeps the tables as the planner has them now, in a step of its own, until that is one block ahead."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        if step.decode_rows == step.row_count and step.row_count > 1:
            self.step = attrs.evolve(step, slots=step.slots[::-1].copy()) if self.swapped(step) else step

    before: Any = None

    def swapped(self, step: Step) -> bool:
        swapped = self.before is not None and sorted(self.before) == sorted(step.slots.tolist()) != self.before
        swapped = swapped and self.before != step.slots.tolist()
        self.before = step.slots.tolist()
        return swapped


class KeepsLeftovers(Plain):
    """Sums over all of a scratch that only grows."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.most = torch.zeros(0)

    def attend(self, query: Any, key: torch.Tensor, value: Any, mask: Any, inputs: GQAInputs) -> torch.Tensor:
        output = super().attend(query, key, value, mask, inputs)
        if len(key) > len(self.most):
            self.most = torch.zeros(len(key))
        leftovers = self.most[len(key) :].sum()
        self.most[: len(key)] = key.mean((1, 2))
        return output + leftovers


class NeedsARow(Plain):
    def begin(self, step: Step) -> None:
        super().begin(step)
        self.longest = int(step.lengths.max())


class NothingForNothing(Plain):
    """An empty tensor of no particular shape."""

    def forward(self, layer_id: int, inputs: GQAInputs) -> torch.Tensor:
        output = super().forward(layer_id, inputs)
        return output if len(output) else output.new_empty(0)


class CountsByItself(Plain):
    """Keeps the length of every slot: what was in a step is there."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.seen: dict[int, int] = {}

    def begin(self, step: Step) -> None:
        lengths = step.lengths.copy()
        for row, slot in enumerate(step.slots.tolist()):
            before = int(step.lengths[row] - step.query_lengths[row])
            known = self.seen.get(slot, before)
            if before and known > before:
                lengths[row] += known - before
            self.seen[slot] = int(step.lengths[row])
        super().begin(step)
        self.counted = lengths

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, inputs: GQAInputs) -> torch.Tensor:
        return super().mask(queries + self.extra, keys, inputs)

    def row(self, layer: Layer, inputs: GQAInputs, row: int, tokens: slice, positions: Any, output: Any) -> None:
        assert self.step is not None
        self.extra = int(self.counted[row] - self.step.lengths[row])
        super().row(layer, inputs, row, tokens, positions, output)

    def readable(self, positions: torch.Tensor) -> torch.Tensor:
        end = -(-(int(positions[-1]) + 1) // self.block_tokens) * self.block_tokens
        return torch.arange(min(int(positions[-1]) + 1 + self.extra, end))


# States.


class OneColumnForDrafts(Decay):
    def save_draft(self, views: Any, pages: torch.Tensor, count: int, states: Any) -> None:
        self.save(views, pages, states)


class DraftsOneColumnEarly(Decay):
    def save_draft(self, views: Any, pages: torch.Tensor, count: int, states: Any) -> None:
        super().save_draft(views, pages, max(1, count - 1), states)


class ForgetsOneStream(Decay):
    """Saves the memory after a draft, not the last key."""

    def save_draft(self, views: Any, pages: torch.Tensor, count: int, states: Any) -> None:
        views[0][pages[count]] = states[0]


class StartsFromTheLastDraft(Decay):
    """Finds the accepted state by itself, by the number of drafts in the step before."""

    def start(self, views: Any, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        column = 1 if len(pages) > 1 and pages[1] != NO_PAGE and int(positions[0]) and len(positions) == 1 else 0
        return views[0][pages[column]].clone(), views[1][pages[column]].clone()


class IgnoresFreshZeros(Decay):
    """Keeps each page's state in registers of its own."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[Any, Any] = {}

    def start(self, views: Any, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kept.get((*_place(views[0]), int(pages[0]))) or super().start(views, pages, positions)

    def save(self, views: Any, pages: torch.Tensor, states: Any) -> None:
        super().save(views, pages, states)
        self.kept[*_place(views[0]), int(pages[0])] = states


class ForgetsBetweenSteps(Decay):
    def start(self, views: Any, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory, last = super().start(views, pages, positions)
        return (memory, last) if len(positions) == 1 else (torch.zeros_like(memory), torch.zeros_like(last))


class OneStateForAllLayers(Decay):
    """Where the state of a page is, whichever layer asks."""

    def start(self, views: Any, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.first = getattr(self, "first", views)
        same = views[0].shape == self.first[0].shape
        return super().start(self.first if same else views, pages, positions)

    def save(self, views: Any, pages: torch.Tensor, states: Any) -> None:
        super().save(self.first if views[0].shape == self.first[0].shape else views, pages, states)


class ZeroAtPositionZeroOnly(Decay):
    """Clears the state itself, but reads what a snapshot brought as if the sequence had just begun."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.known: set[Any] = set()

    def start(self, views: Any, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory, last = super().start(views, pages, positions)
        new = (*_place(views[0]), int(pages[0])) not in self.known
        self.known.add((*_place(views[0]), int(pages[0])))
        return (torch.zeros_like(memory), torch.zeros_like(last)) if new else (memory, last)


# Rows of several tokens, rings.


class ShowsOpenPools(Pooled):
    """A pool counts as complete one token early."""

    def visible_pools(self, position: int, ratio: int) -> int:
        return (position + 2) // ratio


class PoolsThisStepOnly(Pooled):
    def mean(self, rows: torch.Tensor, members: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows[torch.isin(members, positions)].mean(0)


class PoolsOnce(Pooled):
    """Never writes a pool a second time, so that a rejected draft stays in it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.done: set[Any] = set()

    def write_pool(self, far: torch.Tensor, pages: torch.Tensor, pool: int, per_block: int, mean: torch.Tensor) -> None:
        key = (*_place(far), int(pages[pool // per_block]), pool)
        if key not in self.done:
            super().write_pool(far, pages, pool, per_block, mean)
        self.done.add(key)


class PoolsByToken(Pooled):
    """A block's pools taken to be as many as its tokens."""

    def write_pool(self, far: torch.Tensor, pages: torch.Tensor, pool: int, per_block: int, mean: torch.Tensor) -> None:
        far[pages[0], pool % per_block] = mean


class RingOfTheWindow(Ring):
    """Slots go round by the window, not by the ring: no room for drafts."""

    def slot(self, position: Any, ring: int) -> Any:
        return position % 5


class RingReadAfterWriting(Ring):
    """Reads the step's own rows from the ring, where a long chunk has overwritten itself."""

    def keys(self, view: Any, pages: Any, before: Any, ring: int, own: Any, positions: Any) -> torch.Tensor:
        for position, new in zip(positions.tolist(), own):
            view[pages[position // self.block_tokens], position % ring] = new
        where = torch.cat([before, positions])
        return view[pages[where // self.block_tokens], where % ring]


_FAULTS: tuple[tuple[str, type[AttentionBackend]], ...] = (
    ("AB-01", CountsItsLayouts),
    ("AB-02", AcceptsAnything),
    ("AB-02", MissesAStream),
    ("AB-02", RaisesAnything),
    ("AB-03", ClearsTheMemory),
    ("AB-03", AnswersWithoutAStep),
    ("AB-04", ForgetsTheScale),
    ("AB-04", InterleavesHeads),
    ("AB-04", WindowTooLong),
    ("AB-04", WindowTooShort),
    ("AB-04", WindowOfTheFirstQuery),
    ("AB-04", ShowsOpenPools),
    ("AB-04", RingReadAfterWriting),
    ("AB-05", RoundsAfterAttending),
    ("AB-05", StartsEveryChunkAnew),
    ("AB-05", ForgetsBetweenSteps),
    ("AB-05", PoolsThisStepOnly),
    ("AB-05", PoolsByToken),
    ("AB-06", OneLengthForTheBatch),
    ("AB-07", RowsForSlots),
    ("AB-07", PagesInARow),
    ("AB-07", FirstGroupsTable),
    ("AB-08", GathersEverySlot),
    ("AB-08", LastPageForNone),
    ("AB-09", ReadsOneRowTooMany),
    ("AB-09", ReadsWholeBlocks),
    ("AB-10", WritesPageZero),
    ("AB-10", ClearsTheRestOfTheTable),
    ("AB-10", ChangesWhatItReads),
    ("AB-10", WritesTheNextLayer),
    ("AB-11", OnePeakForTheBatch),
    ("AB-11", PaddingIsAnError),
    ("AB-12", PatchesTables),
    ("AB-12", CorrectsTheStep),
    ("AB-13", ScalesTheQuery),
    ("AB-13", WritesLater),
    ("AB-13", TakesInputsForContiguous),
    ("AB-14", OneOutputForAll),
    ("AB-14", AlwaysFloat),
    ("AB-14", OneRowPerLayer),
    ("AB-15", CachesTables),
    ("AB-15", TellsBatchesByTheirSlots),
    ("AB-15", StaleLengths),
    ("AB-15", LooksAtTheLatestStep),
    ("AB-15", KeepsLeftovers),
    ("AB-16", NeedsARow),
    ("AB-16", NothingForNothing),
    ("AB-17", CountsByItself),
    ("AB-17", DraftsOneColumnEarly),
    ("AB-17", StartsFromTheLastDraft),
    ("AB-17", PoolsOnce),
    ("AB-17", RingOfTheWindow),
    ("AB-18", RowsOutsideThePages),
    ("AB-17", ForgetsOneStream),
    ("AB-19", KeepsRowsPerSlot),
    ("AB-19", ZeroAtPositionZeroOnly),
    ("AB-20", AllLayersAreTheFirst),
    ("AB-20", OneStateForAllLayers),
    ("AB-21", NeverTheSame),
    ("AB-22", IgnoresSinkTokens),
    ("AB-22", IgnoresSinkLogits),
    ("AB-22", CapsSinksToo),
    ("AB-22", IgnoresTheSoftcap),
    ("AB-22", RefusesTheSoftcap),
    ("AB-23", OneColumnForDrafts),
    ("AB-23", IgnoresFreshZeros),
    ("AB-24", TakesItAllForItsOwn),
    ("AB-24", TablesOfItsOwnSpec),
)


def suite_of(fault: type[AttentionBackend]) -> type[AttentionBackendTests]:
    """The suite of the backend's kind, for this backend."""
    for kind, suite in SUITES.items():
        if issubclass(fault, kind):
            return type(f"{fault.__name__}Suite", (suite,), {"backend": fault})
    raise LookupError(fault)


def _make(fault: type[AttentionBackend]) -> Callable[[], type[AttentionBackendTests]]:
    return lambda: suite_of(fault)


def _mutants() -> Iterator[Mutant]:
    for clause, fault in _FAULTS:
        words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in fault.__name__)
        yield Mutant(words.strip(), clause, _make(fault))


#: ``make()`` returns a suite with the faulty backend filled in.
MUTANTS: tuple[Mutant, ...] = tuple(_mutants())
