"""Scenarios of area E, as far as they concern pages and not what is selected or computed from them: all streams of a
block move together, rows that stand for several tokens, rows with inline scales. Checked byte by byte.

Selection (29), and the parts of 25, 27 and 30 that read index keys, quantise or select, belong to the families that do
so; moving to another process or tier (25 (a), (b), 30 (a)) to transfers and tiers.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import SpecError
from kvist.layout import Layout, RowMajor
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Layer, Retention, RowFormat, ScaleFormat, State, Stream, Window
from kvist.testing.byte_values import ByteValues
from kvist.testing.engine import Engine


def engine_of(
    pages: int, block: int, *layers: tuple[Stream, ...], restore: RestorePolicy | None = None, backoff: int = 0
) -> Engine:
    spec = CacheSpec([Layer(3 * n, streams) for n, streams in enumerate(layers)], block, "rows")
    one = Layout.build(spec, 1 << 24)
    layout = Layout.build(spec, (pages * len(one.groups) + 1) * max(group.page_bytes for group in one.groups))
    return Engine(PagedCacheManager(layout, restore, backoff), values=ByteValues)


def sparse_layer(retention: Retention) -> tuple[Stream, ...]:
    """Keys, values, and smaller index keys of another type."""
    kv = RowFormat((2, 8), "bfloat16")
    index = RowFormat((5,), "float8_e4m3fn", ScaleFormat(1))
    return (Stream("k", kv, retention), Stream("v", kv, retention), Stream("index_k", index, retention))


def compressed_layer(*, window: int, pending: bool) -> tuple[Stream, ...]:
    """A row per four tokens and one per eight, a window of raw rows, and what the compressor has not used yet."""
    row = RowFormat((6,), "float32")
    streams = [
        Stream("compressed", row, History(), tokens_per_row=4),
        Stream("coarse", row, History(), tokens_per_row=8),
        Stream("raw", row, Window(window)),
    ]
    return (*streams, Stream("pending", row, State())) if pending else tuple(streams)


def everything(engine: Engine, block: int, unit: int) -> None:
    """Prompts that part at every position, forks, suspended and truncated sequences, drafts."""
    length = 3 * block
    first = engine.open(range(length))
    engine.prefill(first, chunk=5)
    child = engine.fork(first)
    engine.extend(child, range(800, 807))
    engine.prefill(child)
    engine.decode(first, 2)
    engine.suspend(first)
    engine.resume(first)
    engine.prefill(first)
    for accepted in (0, 2, 3):
        if first.known == first.computed:
            engine.learn(first)
        engine.run(Run(first, 1, 2), accepted={first: accepted})
        engine.learn(first, more=0)
    engine.truncate(first, length - 2)
    engine.extend(first, 700)
    engine.prefill(first)
    engine.close(first, child)
    for parting in range(length + 1):
        sequence = engine.open(range(parting), 900 + parting, 5)
        assert sequence.reused <= parting
        assert sequence.reused % unit == 0 or sequence.reused == 0
        engine.prefill(sequence)
        engine.close(sequence)
    engine.drained()


@pytest.mark.parametrize("block", [1, 4, 7])
@pytest.mark.parametrize(
    "layers",
    [
        [sparse_layer(History())],
        [sparse_layer(History()), sparse_layer(Window(5))],
        [sparse_layer(History()), sparse_layer(History()), (Stream("state", RowFormat((11,), "float32"), State()),)],
    ],
    ids=["one layer", "with a window", "with a state"],
)
def test_all_streams_of_a_block_move_together(layers: list, block: int) -> None:
    """25 (c): copies are whole pages, so no stream of any layer can be left behind when a block is shared, copied for
    a branch or a fork, trimmed or taken back."""
    everything(engine_of(150, block, *layers), block, 1)


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("block", [8, 16])
def test_rows_that_stand_for_several_tokens(block: int, pending: bool) -> None:
    """26, 27: rows of 4 and of 8 tokens beside a window; every hit ends where all rows are whole."""
    engine = engine_of(300, block, compressed_layer(window=4, pending=pending), restore=RestorePolicy(every_blocks=1))
    assert engine.manager.layout.reuse_unit == 8
    everything(engine, block, 8)


def test_a_row_is_known_by_all_its_tokens() -> None:
    """26 by hand: a row per 4 tokens, 4 rows per block. Rows inside a block are reused one by one, each only when all
    of its tokens are the same: 8 of the first prompt instead of the 0 that whole pages would give."""
    row = Stream("compressed", RowFormat((4,), "float32"), History(), tokens_per_row=4)
    engine = engine_of(40, 16, (row,))
    engine.turn(range(1, 17))
    assert engine.turn(range(1, 9), range(201, 209), 5) == 8
    assert engine.turn(range(1, 17), 17) == 16
    assert engine.turn(range(1, 16), 90, 91) == 12
    assert engine.turn(range(1, 6), 92) == 4
    assert engine.turn(range(1, 4), 93) == 0
    assert engine.turn(4, range(2, 17)) == 0
    engine.drained()


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_every_parting_position_of_rows_of_a_ratio(ratio: int) -> None:
    """26: for each ratio and each position, the whole rows before it."""
    row = Stream("compressed", RowFormat((4,), "float32"), History(), tokens_per_row=ratio)
    for parting in range(20):
        engine = engine_of(40, 8, (row,))
        engine.turn(range(20))
        whole = parting // ratio * ratio
        assert engine.turn(range(parting), 500, 501) == whole
        engine.drained()


@pytest.mark.parametrize("length", [16, 18, 19, 23, 24])
def test_the_window_and_the_pending_rows_at_the_hit(length: int) -> None:
    """27: a row per 4 tokens, blocks of 8, a window of 4. A finished prompt of 18 is resumed at 16, where no row is
    pending and the window is kept, and tokens 16 and 17 are computed again. X has used the pages in between."""
    row = RowFormat((4,), "float32")
    streams = (Stream("compressed", row, History(), tokens_per_row=4), Stream("raw", row, Window(4)))
    engine = engine_of(30, 8, streams)
    engine.turn(range(1, length + 1))
    stranger = engine.open(range(500, 560))
    engine.prefill(stranger, chunk=8)
    hit = engine.open(range(1, length + 1), 99)
    assert hit.reused == length // 4 * 4
    engine.prefill(hit)
    engine.decode(hit, 5)
    engine.close(hit, stranger)
    engine.drained()


# 30. Bytes of a row


def test_scales_are_part_of_a_row() -> None:
    """30 by hand: 4 tokens, 2 heads of 8 one-byte elements and a 4-byte scale per head, keys and values: 192 bytes."""
    row = RowFormat((2, 8), "float8_e4m3fn", ScaleFormat(2))
    assert row.row_bytes == 24
    streams = (Stream("k", row, History()), Stream("v", row, History()))
    layout = Layout.build(CacheSpec((Layer(0, streams),), 4, "scales"), 1 << 16)
    assert [(part.offset, part.byte_count) for part in layout.groups[0].parts] == [(0, 96), (96, 96)]
    assert layout.groups[0].content_bytes == layout.groups[0].page_bytes == 192
    # Keys alone are half of it.
    layout = Layout.build(CacheSpec((Layer(0, streams[:1]),), 4, "scales"), 1 << 16)
    assert layout.groups[0].content_bytes == 96


@pytest.mark.parametrize("names", [("k",), ("k", "v")])
@pytest.mark.parametrize("block", [4, 6])
def test_only_a_pages_own_bytes_ever_change(names: tuple, block: int) -> None:
    """30 (b): a branch inside a block copies one page; the neighbours' bytes, and the padding, stay as they are."""
    row = RowFormat((3,), "float8_e4m3fn", ScaleFormat(1))
    engine = engine_of(40, block, tuple(Stream(name, row, History()) for name in names))
    first = engine.open(range(3 * block))
    pages = engine.run(Run(first, 3 * block)).tables[0][first.slot, :3].tolist()
    arena = engine.values.pages[0]
    before = arena.copy()
    branch = engine.open(range(block - 1), 70, 71)
    step = engine.run(Run(branch, 2))
    assert step.copies[0].tolist() == [[pages[0], step.tables[0][branch.slot, 0]]]
    own = step.tables[0][branch.slot, :2].tolist()
    assert np.flatnonzero((arena != before).any(axis=1)).tolist() == sorted(own)
    content_bytes = engine.manager.layout.groups[0].content_bytes
    assert np.array_equal(arena[:, content_bytes:], before[:, content_bytes:])
    engine.close(first, branch)
    engine.drained()


def test_another_arrangement_is_another_tag() -> None:
    """30 (c): the core never reorders bytes; tiers and peers compare the tag, and one that loses bytes is refused."""

    class KeysFirst(RowMajor):
        def part_bytes(self, stream: Stream, row_count: int) -> int:
            return row_count * stream.row.row_bytes - 1

    spec = CacheSpec((Layer(0, sparse_layer(History())),), 4, "tags")
    assert Layout.build(spec, 1 << 16).tag == "row-major-1"
    with pytest.raises(SpecError, match=r"gives layer 0 stream 'k' 127 bytes for 4 rows of 32 bytes"):
        Layout.build(spec, 1 << 16, KeysFirst("keys-first-1"))


@pytest.mark.parametrize("ratio", [3, 8])
def test_a_block_holds_whole_rows(ratio: int) -> None:
    """26: a ratio that does not divide the block is refused when the spec is made."""
    row = Stream("compressed", RowFormat((4,), "float32"), History(), tokens_per_row=ratio)
    with pytest.raises(SpecError, match="block_tokens=4 is not a multiple of tokens_per_row"):
        CacheSpec((Layer(0, (row,)),), 4, "ratio")
