"""A value oracle without a GPU: every row holds a fold over the tokens it depends on, free pages hold junk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.layout import Group, Layout
from kvist.sequence import Sequence as CachedSequence
from kvist.spec import CacheSpec, Layer, Retention, RowFormat, Scope, Stream
from kvist.step import NO_PAGE, IntArray, Step
from kvist.testing.reads import reads
from kvist.testing.under_test import ManagerUnderTest

JUNK = -1

#: The oracle's own numbers and bytes, of any element type.
Array = npt.NDArray[Any]


def make_spec(
    block_tokens: int, *retentions: Retention, width: int = 4, widths: Sequence[int] = (), **options: object
) -> CacheSpec:
    """One layer per retention, with a ``k`` and a ``v`` stream each; equal retentions share a group.

    widths: elements of a row in each layer, where they differ.
    """
    rows = [RowFormat((1, each), "float32") for each in widths or [width] * len(retentions)]
    layers = [
        Layer(number, (Stream("k", row, retention), Stream("v", row, retention)))
        for number, (row, retention) in enumerate(zip(rows, retentions, strict=True))
    ]
    return CacheSpec(tuple(layers), block_tokens, "test", **options)  # type: ignore[arg-type]


def make_layout(spec: CacheSpec, page_count: int) -> Layout:
    """A layout whose first group can hold exactly ``page_count`` pages when all groups have equal pages."""
    one = Layout.build(spec, 1 << 30)
    return Layout.build(spec, (page_count + 1) * max(group.page_bytes for group in one.groups))


def tokens(*parts: int | range) -> IntArray:
    """int32 ids, from single ids and ranges."""
    return np.concatenate([[part] if isinstance(part, int) else list(part) for part in parts]).astype(np.int32)


def fold(tokens: Array, scope: Scope) -> Array:
    """int64 ``[len]``: at each position a value that depends on the scope and on every token up to it."""
    state = hash(scope) & 0x7FFFFFFF
    out = []
    for token in tokens.tolist():
        state = (state * 1000003 + token + 1) & 0x7FFFFFFFFFFF
        out.append(state)
    return np.array(out, np.int64)


class Values:
    """Plays the owner of the memory: runs copies, writes rows, checks every row a query may read."""

    junk = JUNK

    def __init__(self, manager: ManagerUnderTest) -> None:
        self.manager = manager
        self.layout = manager.layout
        self.allocate()

    def allocate(self) -> None:
        """One memory for all groups, as on a device: a page that two groups use at once cannot go unnoticed."""
        memory = np.full(self.layout.arena_bytes // 8, JUNK, np.int64)
        #: Per group, whole pages and the part of them that has one value per row.
        self.whole: list[Array] = [
            memory[: len(memory) // (g.page_bytes // 8) * (g.page_bytes // 8)].reshape(-1, g.page_bytes // 8)
            for g in self.layout.groups
        ]
        self.pages: list[Array] = []
        for group, pages in zip(self.layout.groups, self.whole):
            rows = state_rows(group.retention) if group.exact else group.retention.ring or self.layout.block_tokens
            assert rows * 8 <= group.page_bytes, "rows of this spec are too narrow for a value"
            self.pages.append(pages[:, :rows])

    def poison(self, copies: Sequence[IntArray] = ()) -> None:
        """Overwrite every page that nobody holds or can find, and the reserved ones. Sources of the step's ``copies``
        stay: should it be cancelled, it is as if nobody had written to them."""
        kept = []
        for group, pairs in enumerate(copies):
            sources = np.intersect1d(pairs[:, 0], self.manager.free_pages(group))
            kept.append((sources, self.whole[group][sources]))
        for group, pages in enumerate(self.whole):
            pages[self.manager.free_pages(group)] = self.junk
            pages[0] = self.junk
        for pages, (sources, content) in zip(self.whole, kept):
            pages[sources] = content

    def run(
        self,
        step: Step,
        sequences: Sequence[CachedSequence],
        tokens: Mapping[int, Array],
        accepted: Sequence[int] | None = None,
    ) -> None:
        """Execute a step: ``tokens[id(sequence)]`` are all its tokens, the new ones included.

        accepted: query tokens of each row that will stay; what the others write is junk.
        """
        # What is free may still be the source of a copy, until something is written to it.
        self._copy(step.copies)
        self.poison(step.copies)
        for zeroed, pages, pairs in zip(self.pages, step.fresh, step.copies):
            assert not np.isin(pages, pairs[:, 1]).any(), "a page is to be both copied to and filled with zeros"
            zeroed[pages] = 0
        for row, sequence in enumerate(sequences):
            end, count = int(step.lengths[row]), int(step.query_lengths[row])
            kept = count if accepted is None else accepted[row]
            truth = fold(tokens[id(sequence)][:end], sequence.scope)
            written = truth.copy()
            written[end - count + kept :] = JUNK - 1
            for group in self.layout.groups:
                table = step.tables[group.index][step.slots[row]]
                if group.retention.ring:
                    self._turn_ring(group, table, end - count, truth, written)
                elif group.exact:
                    start = end - count
                    before = int(truth[start - 1]) if start else 0
                    self._advance(
                        group, table, start, before, written[start:], int(step.drafts[row]) if len(step.drafts) else 0
                    )
                else:
                    self._write(group, table, end - count, written)
                    for position in range(end - count, end - count + kept):
                        self._read(group, table, position, truth)
        self._copy(step.saves)

    def _copy(self, copies: Sequence[IntArray]) -> None:
        for pairs in copies:
            assert len(set(pairs[:, 1].tolist())) == len(pairs), "two copies to one page"
        # Every source of every group before any destination.
        contents = [pages[pairs[:, 0]] for pages, pairs in zip(self.whole, copies)]
        for pages, pairs, content in zip(self.whole, copies, contents):
            pages[pairs[:, 1]] = content

    def _write(self, group: Group, table: IntArray, start: int, values: Array) -> None:
        positions = np.arange(start, len(values))
        pages = table[positions // self.layout.block_tokens]
        assert (pages > 0).all(), f"{group.name}: no page to write positions {start}.."
        self.pages[group.index][pages, positions % self.layout.block_tokens] = values[start:]

    def _turn_ring(self, group: Group, table: IntArray, start: int, truth: Array, written: Array) -> None:
        """The step's own rows come from its inputs; what is read from pages are the rows before them."""
        ring, block, pages = group.retention.ring, self.layout.block_tokens, self.pages[group.index]
        for position in range(reads(group.retention, start)[-1][0], start):
            found = pages[table[position // block], position % ring]
            assert found == truth[position], f"{group.name}: the ring has lost position {position}"
        for position in range(start, len(written)):
            assert table[position // block] > 0, f"{group.name}: no page to write position {position}"
            pages[table[position // block], position % ring] = written[position]

    def _advance(self, group: Group, table: IntArray, start: int, before: int, values: Array, drafts: int) -> None:
        """A state is the fold over all tokens so far, and nothing before the first one."""
        states = self.pages[group.index]
        assert table[0] > 0, f"{group.name}: no page for the state"
        if not group.retention.draft_pages:
            return self._replay(group, states[table[0]], start, before, values, drafts)
        assert states[table[0], 0] == before, f"{group.name}: the state before position {start} is wrong"
        if drafts:
            assert (table[: len(values) + 1] > 0).all(), f"{group.name}: no page for the state after a draft"
            states[table[1 : len(values) + 1], 0] = values
        else:
            states[table[0], 0] = values[-1]

    def _replay(self, group: Group, page: Array, start: int, before: int, values: Array, drafts: int) -> None:
        """A page has a checkpoint's position, its state, and the states after each of the tokens since."""
        valid, room = start - int(page[0]), len(page) - 2
        assert 0 <= valid <= room, f"{group.name}: {valid} inputs of {room} are valid before position {start}"
        assert page[1 + valid] == before, f"{group.name}: the state before position {start} is wrong"
        states = np.concatenate([page[1 : 2 + valid], values])
        # Without drafts all stays. Otherwise what was accepted goes into the checkpoint when the inputs do not fit, and
        # with it those of the new ones that are sure to stay.
        done = len(values) + valid
        if drafts:
            done = 0 if done <= room else valid + max(0, len(values) - room)
        left = states[done:]
        page[0], page[1:] = page[0] + done, JUNK
        page[1 : 1 + len(left)] = left

    def _read(self, group: Group, table: IntArray, query: int, truth: Array) -> None:
        block = self.layout.block_tokens
        positions = np.concatenate([np.arange(low, high) for low, high in reads(group.retention, query)])
        pages = table[positions // block]
        assert (pages != NO_PAGE).all(), f"{group.name}: a block that position {query} reads is gone"
        found = self.pages[group.index][pages, positions % block]
        assert np.array_equal(found, truth[positions]), f"{group.name}: position {query} reads wrong rows"


def state_rows(retention: Retention) -> int:
    """Values in the page of a state: one, or a checkpoint's two and one for each draft that can be taken back."""
    return 1 if retention.draft_pages else 2 + (retention.most_drafts or 0)
