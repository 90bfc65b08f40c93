"""Groups, offsets and slabs: pages tile the arena for every group, padding is small and reported."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import CapacityError, SpecError
from kvist.layout import Layout
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window


def layer(number: int, heads: int, retention: object, **options: object) -> Layer:
    row = RowFormat((heads, 64), "bfloat16")
    return Layer(number, (Stream("k", row, retention, **options), Stream("v", row, retention, **options)))


def test_equal_retentions_share_a_group_whatever_their_rows() -> None:
    spec = CacheSpec((layer(0, 3, History()), layer(1, 1, Window(512)), layer(2, 3, History())), 16, "f")
    layout = Layout.build(spec, 64 << 20)
    assert [group.name for group in layout.groups] == ["target/History()", "target/Window(tokens=512, sinks=0)"]
    # 16 rows of 3 x 64 two-byte elements, two streams, two layers.
    assert layout.groups[0].content_bytes == 16 * 3 * 64 * 2 * 2 * 2
    assert layout.groups[1].content_bytes == 16 * 1 * 64 * 2 * 2
    group, part = layout.part(2, "v")
    assert group.index == 0
    assert (part.offset, part.byte_count, part.row_count) == (3 * 16 * 384, 16 * 384, 16)


def test_rows_that_stand_for_several_tokens_need_fewer_bytes() -> None:
    stream = Stream("compressed", RowFormat((512,), "bfloat16"), History(), tokens_per_row=4)
    layout = Layout.build(CacheSpec((Layer(0, (stream,)),), 16, "f"), 1 << 20)
    assert layout.groups[0].content_bytes == 4 * 1024
    assert layout.part(0, "compressed")[1].row_count == 4
    assert layout.reuse_unit == 4


@pytest.mark.parametrize("seed", range(20))
def test_every_group_tiles_the_slab(seed: int) -> None:
    rng = np.random.default_rng(seed)
    retentions = [History(), Window(100), Window(1000, 4)]
    layers = tuple(
        layer(number, int(rng.integers(1, 9)), retentions[number % int(rng.integers(1, 4))])
        for number in range(int(rng.integers(1, 12)))
    )
    memory = int(rng.integers(32 << 20, 1 << 30))
    layout = Layout.build(CacheSpec(layers, int(rng.integers(1, 33)), "f"), memory)
    assert layout.arena_bytes <= memory
    for group in layout.groups:
        assert group.page_bytes >= group.content_bytes
        assert group.page_bytes % 64 == 0
        assert layout.slab_bytes % group.page_bytes == 0
        ends = 0
        for part in group.parts:
            assert part.offset >= ends
            ends = part.offset + part.byte_count
        assert ends == group.content_bytes
    assert layout.padding_fraction < 0.06
    assert layout.slab_bytes <= memory // 16


def test_memory_too_small_is_refused_with_the_least_that_works() -> None:
    spec = CacheSpec((layer(0, 1, History()), layer(1, 1, Window(8))), 16, "f")
    page = 16 * 64 * 2 * 2
    with pytest.raises(CapacityError) as caught:
        Layout.build(spec, 3 * page - 1)
    assert str(caught.value) == (
        f"{3 * page - 1} bytes cannot hold one page of each of the 2 group(s) beside the reserved page: {3 * page} "
        "bytes are the least\nhint: give the cache more memory or use smaller blocks"
    )
    assert Layout.build(spec, 3 * page).slab_count == 3


def test_a_request_that_can_never_fit_is_named_with_its_bytes() -> None:
    spec = CacheSpec((layer(0, 1, History()),), 16, "f")
    layout = Layout.build(spec, 11 * 4096)
    layout.require_fit(160)
    with pytest.raises(CapacityError) as caught:
        layout.require_fit(161)
    assert str(caught.value) == (
        "161 tokens never fit: they need 45056 bytes (11 pages of group target/History()) and the cache has 40960\n"
        "hint: shorten the request or give the cache more memory"
    )


def test_windows_make_long_requests_fit() -> None:
    spec = CacheSpec((layer(0, 1, Window(64)),), 16, "f")
    Layout.build(spec, 11 * 4096).require_fit(100_000)


def test_unknown_stream_is_named() -> None:
    layout = Layout.build(CacheSpec((layer(0, 1, History()),), 16, "f"), 1 << 20)
    with pytest.raises(SpecError) as caught:
        layout.part(0, "index_k")
    assert str(caught.value) == "layer 0 has no stream 'index_k'\nhint: it has ['k', 'v']"
    with pytest.raises(SpecError, match="it has no streams"):
        layout.part(7, "k")


def test_a_page_layout_that_is_too_small_is_refused() -> None:
    class Thrifty:
        tag = "thrifty"

        def part_bytes(self, stream: Stream, row_count: int) -> int:
            return row_count

    with pytest.raises(SpecError) as caught:
        Layout.build(CacheSpec((layer(0, 1, History()),), 16, "f"), 1 << 20, Thrifty())
    assert str(caught.value) == ("page layout 'thrifty' gives layer 0 stream 'k' 16 bytes for 16 rows of 128 bytes")


def test_a_ring_costs_its_rows_only_and_is_kept_where_others_resume() -> None:
    row = RowFormat((4,), "float32")
    streams = (Stream("k", row, History()), Stream("tail", row, Window(8, ring=12)))
    layout = Layout.build(CacheSpec((Layer(0, streams),), 128, "test"), 1 << 20)
    assert [group.content_bytes for group in layout.groups] == [128 * 16, 12 * 16]
    assert [group.sparse for group in layout.groups] == [False, True]
    assert layout.has_rings and layout.most_drafts == 4
    with pytest.raises(SpecError) as caught:
        Layout.build(CacheSpec((Layer(0, streams),), 8, "test"), 1 << 20)
    assert str(caught.value) == (
        "layer 0 stream 'tail': a ring of 12 tokens does not fit blocks of 8 tokens with 1 token(s) per row\n"
        "hint: leave the ring out: whole blocks are as small"
    )


def test_reuse_ends_inside_rows_that_can_be_continued() -> None:
    row = RowFormat((4,), "float32")
    streams = [Stream("a", row, History(), 4), Stream("b", row, History(), 16, continued=True)]
    assert Layout.build(CacheSpec((Layer(0, streams),), 16, "test"), 1 << 20).reuse_unit == 4
    assert Layout.build(CacheSpec((Layer(0, streams[1:]),), 16, "test"), 1 << 20).reuse_unit == 1


def test_a_state_has_one_row_of_each_stream_per_page() -> None:
    streams = (
        Stream("conv", RowFormat((3, 16), "float32"), State()),
        Stream("ssm", RowFormat((8, 16), "float32"), State()),
    )
    layout = Layout.build(CacheSpec((Layer(0, streams),), 128, "test"), 1 << 20)
    assert [part.row_count for part in layout.groups[0].parts] == [1, 1]
    assert layout.groups[0].content_bytes == 3 * 16 * 4 + 8 * 16 * 4


def page_of(units: int, retention: object, number: int) -> Layer:
    """A page of ``64 * units`` bytes in blocks of one token."""
    return Layer(number, (Stream("rows", RowFormat((64 * units,), "uint8"), retention),))


def test_padding_is_reported_by_group() -> None:
    # 31 and 29 units of 64 bytes in 93 units: three slabs of 31, so the second page gets two units more.
    spec = CacheSpec((page_of(31, History(), 0), page_of(29, Window(8), 1)), 1, "f")
    layout = Layout.build(spec, 93 * 64)
    assert [group.page_bytes for group in layout.groups] == [31 * 64, 31 * 64]
    assert [group.padding_bytes for group in layout.groups] == [0, 128]
    assert [group.padding_fraction for group in layout.groups] == [0, 2 / 31]
    assert layout.padding_fraction == 2 / 31
    # 3000 bytes end at a multiple of 64, and beside 3008 bytes of padding a page of 4096 is the closest to fit.
    state = Layer(1, (Stream("state", RowFormat((3000,), "uint8"), State()),))
    layout = Layout.build(CacheSpec((page_of(64, History(), 0), state), 1, "f"), 1 << 20)
    for group, content in zip(layout.groups, (4096, 3000)):
        assert group.content_bytes == content
        assert group.padding_bytes == group.page_bytes - content < content / 10


@pytest.mark.parametrize(
    ("units", "memory"),
    [
        # 64 KiB of rows and a few bytes, beside states of 20 MiB: none divides another.
        ((1024, 20 * 16384), 4 << 30),
        ((1025, 20 * 16384), 4 << 30),
        ((1025, 20 * 16384), 1 << 30),
        ((1025, 513, 20 * 16384 + 64), 80 << 30),
        ((1025, 513, 20 * 16384 + 64), 4 << 30),
        # States of 97 MiB, more than a slab aims at, as a large hybrid has.
        ((4096, 97 * 16384), 80 << 30),
        ((4096, 97 * 16384 + 1), 4 << 30),
        # Primes.
        ((1009, 499, 20011), 2 << 30),
        ((1, 3, 5), 64 << 20),
    ],
)
def test_slabs_suit_huge_pages_beside_small_ones(units: tuple[int, ...], memory: int) -> None:
    retentions = [History(), Window(8), Window(9)]
    spec = CacheSpec(tuple(page_of(n, r, i) for i, (n, r) in enumerate(zip(units, retentions))), 1, "f")
    layout = Layout.build(spec, memory)
    assert layout.padding_fraction < 0.05
    # The reserved slab, and what the last slab of each group leaves.
    assert (len(units) + 1) * layout.slab_bytes < 0.09 * memory
    assert layout.slab_bytes < 8 * max(group.page_bytes for group in layout.groups) + (1 << 20)
