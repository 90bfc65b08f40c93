"""A value oracle without a GPU: every row holds a fold over the tokens it depends on, free pages hold junk."""

from __future__ import annotations

import numpy as np

from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.spec import CacheSpec, Layer, Retention, RowFormat, Scope, Stream, Window
from kvist.step import NO_PAGE, Step

JUNK = -1


def make_spec(block_tokens: int, *retentions: Retention, width: int = 4, **options: object) -> CacheSpec:
    """One layer per retention, with a ``k`` and a ``v`` stream each; equal retentions share a group."""
    row = RowFormat((1, width), "float32")
    layers = [
        Layer(number, (Stream("k", row, retention), Stream("v", row, retention)))
        for number, retention in enumerate(retentions)
    ]
    return CacheSpec(tuple(layers), block_tokens, "test", **options)  # type: ignore[arg-type]


def make_layout(spec: CacheSpec, page_count: int) -> Layout:
    """A layout whose first group can hold exactly ``page_count`` pages when all groups have equal pages."""
    one = Layout.build(spec, 1 << 30)
    return Layout.build(spec, (page_count + 1) * max(group.page_bytes for group in one.groups))


def fold(tokens: np.ndarray, scope: Scope) -> np.ndarray:
    """int64 ``[len]``: at each position a value that depends on the scope and on every token up to it."""
    state = hash(scope) & 0x7FFFFFFF
    out = []
    for token in tokens.tolist():
        state = (state * 1000003 + token + 1) & 0x7FFFFFFFFFFF
        out.append(state)
    return np.array(out, np.int64)


class Values:
    """Plays the owner of the memory: runs copies, writes rows, checks every row a query may read."""

    def __init__(self, manager: PagedCacheManager) -> None:
        self.manager = manager
        self.layout = manager.layout
        block = self.layout.block_tokens
        self.pages = [
            np.full((self.layout.arena_bytes // group.page_bytes, block), JUNK, np.int64)
            for group in self.layout.groups
        ]

    def poison(self) -> None:
        """Overwrite every page that nobody holds or can find, and the reserved ones."""
        for group, pages in enumerate(self.pages):
            pages[self.manager.free_pages(group)] = JUNK
            pages[0] = JUNK

    def run(self, step: Step, sequences: list, tokens: dict) -> None:
        """Execute a step: ``tokens[id(sequence)]`` are all its tokens, the new ones included."""
        self.poison()
        for group, copies in enumerate(step.copies):
            for source, destination in copies:
                self.pages[group][destination] = self.pages[group][source]
        block = self.layout.block_tokens
        for row, sequence in enumerate(sequences):
            end, count = int(step.lengths[row]), int(step.query_lengths[row])
            truth = fold(tokens[id(sequence)][:end], sequence.scope)
            for group in self.layout.groups:
                table = step.tables[group.index][step.slots[row]]
                for position in range(end - count, end):
                    page = table[position // block]
                    assert page > 0, f"{group.name}: no page to write position {position}"
                    self.pages[group.index][page, position % block] = truth[position]
                for position in range(end - count, end):
                    self._read(group, table, position, truth)

    def _read(self, group, table, query: int, truth: np.ndarray) -> None:
        block = self.layout.block_tokens
        retention = group.retention
        positions = np.arange(query + 1)
        if isinstance(retention, Window):
            positions = positions[(positions > query - retention.tokens) | (positions < retention.sinks)]
        pages = table[positions // block]
        assert (pages != NO_PAGE).all(), f"{group.name}: a block that position {query} reads is gone"
        found = self.pages[group.index][pages, positions % block]
        assert np.array_equal(found, truth[positions]), f"{group.name}: position {query} reads wrong rows"
