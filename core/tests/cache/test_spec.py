"""Retentions answer by hand arithmetic; bad specs are refused in words."""

from __future__ import annotations

import pytest

from kvist.errors import SpecError
from kvist.spec import CacheSpec, History, Layer, Retention, RowFormat, ScaleFormat, Scope, Stream, Window


def blocks(spans: tuple[tuple[int, int], ...]) -> set[int]:
    return {block for low, high in spans for block in range(low, high)}


def test_history_needs_every_block_and_drops_none() -> None:
    assert History().live(0, 4) == ()
    assert History().live(9, 4) == ((0, 3),)
    assert History().required(8, 4) == ((0, 2),)
    assert History().droppable(1000, 0, 4) == ()


@pytest.mark.parametrize(
    ("tokens", "sinks", "length", "live"),
    [
        # Block 4, window 8: the query at position 8 reads positions 1..8, so rows 1..7 of blocks 0 and 1.
        (8, 0, 8, {0, 1}),
        # The query at 16 reads 9..16: blocks 2 and 3.
        (8, 0, 16, {2, 3}),
        (8, 0, 11, {1, 2}),
        # A window of one reads only the query's own row, which is not written yet.
        (1, 0, 8, set()),
        # ... but a block in the middle must go on being filled.
        (1, 0, 9, {2}),
        # The first three tokens lie in block 0 and stay.
        (8, 3, 100, {0, 23, 24}),
        (100, 3, 50, set(range(13))),
    ],
)
def test_window_keeps_what_the_next_query_reads(tokens: int, sinks: int, length: int, live: set[int]) -> None:
    window = Window(tokens, sinks)
    assert blocks(window.live(length, 4)) == live
    assert blocks(window.required(length, 4)) == live


@pytest.mark.parametrize("block", [1, 3, 4, 16])
@pytest.mark.parametrize("retention", [Window(1), Window(5), Window(16), Window(5, sinks=2), Window(3, sinks=40)])
def test_window_against_the_definition(retention: Window, block: int) -> None:
    for length in range(80):
        read = {
            position // block
            for query in range(length, length + 100)
            for position in range(length)
            if position > query - retention.tokens or position < retention.sinks
        }
        live = blocks(retention.live(length, block))
        dropped = blocks(retention.droppable(length, 0, block))
        assert read <= live
        # What is live beyond the reads is at most the block being filled.
        assert live - read <= {length // block}
        assert not dropped & live
        assert dropped | live == set(range(-(-length // block)))


def test_rollback_keeps_what_a_shorter_sequence_reads() -> None:
    assert blocks(Window(8).droppable(16, 0, 4)) == {0, 1}
    # After taking three tokens back the query at 13 reads 6..13: block 1 must still be there.
    assert blocks(Window(8).droppable(16, 3, 4)) == {0}
    assert Window(8).droppable(2, 5, 4) == ()


def test_retentions_are_values_and_satisfy_the_protocol() -> None:
    assert Window(4) == Window(4) != Window(5)
    assert len({History(), History(), Window(4), Window(4)}) == 2
    assert isinstance(History(), Retention)
    assert isinstance(Window(4), Retention)


def test_row_bytes_include_scales() -> None:
    # Two heads of eight one-byte elements and two four-byte scales.
    assert RowFormat((2, 8), "float8_e4m3fn", ScaleFormat(2)).row_bytes == 24
    assert RowFormat((3, 64), "bfloat16").row_bytes == 384


def test_scope_digest_depends_on_every_part_and_is_stable() -> None:
    scopes = [Scope(), Scope(adapter="a"), Scope(salt="a"), Scope(media=((0, "a"),)), Scope(media=((1, "a"),))]
    digests = {scope.digest() for scope in scopes}
    assert len(digests) == len(scopes)
    assert all(len(digest) == 32 for digest in digests)
    # A value, so that the digest cannot change between processes or versions unnoticed.
    assert Scope().digest().hex().startswith("374708fff7719dd5")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Window(0), "Window(tokens=0): a window holds at least the query's own token"),
        (lambda: Window(4, -1), "Window(sinks=-1): the number of sink tokens cannot be negative"),
        (lambda: RowFormat((0, 4), "float32"), "RowFormat(shape=(0, 4)): every axis needs at least one element"),
        (
            lambda: RowFormat((4,), "fp32"),
            "unknown row dtype 'fp32'\nhint: use one of bfloat16, float16, float32, float64, float8_e4m3fn, "
            "float8_e5m2, int16, int32, int64, int8, uint8",
        ),
        (lambda: _stream(tokens_per_row=0), "stream 'k': tokens_per_row=0 must be at least 1"),
        (lambda: Layer(3, ()), "layer 3 has no streams\nhint: leave layers that keep nothing out of the spec"),
        (lambda: Layer(3, (_stream(), _stream())), "layer 3 names a stream twice: ['k', 'k']"),
        (lambda: CacheSpec((), 4, "f"), "a cache spec needs at least one layer"),
        (lambda: CacheSpec((Layer(0, (_stream(),)),), 0, "f"), "block_tokens=0 must be at least 1"),
        (
            lambda: CacheSpec((Layer(0, (_stream(),)), Layer(0, (_stream(),))), 4, "f"),
            "layer ids are not unique: [0, 0]",
        ),
        (
            lambda: CacheSpec((Layer(0, (_stream(tokens_per_row=4),)),), 6, "f"),
            "layer 0 stream 'k': block_tokens=6 is not a multiple of tokens_per_row=4\nhint: use a multiple of 4",
        ),
    ],
)
def test_bad_specs_are_refused(make, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert str(caught.value) == text


def _stream(**options: object) -> Stream:
    return Stream("k", RowFormat((2, 8), "float32"), History(), **options)  # type: ignore[arg-type]


def test_a_ring_holds_at_least_the_window_and_fits_a_block() -> None:
    for ring, sinks in ((7, 0), (8, 1)):
        with pytest.raises(SpecError) as caught:
            Window(8, sinks, ring=ring)
        assert str(caught.value) == (
            f"Window(tokens=8, sinks={sinks}, ring={ring}): a ring holds at least the window, and no sinks\n"
            "hint: make the ring as long as the window and the drafts of a step"
        )
    assert (Window(8).most_drafts, Window(8, ring=8).most_drafts, Window(8, ring=11).most_drafts) == (None, 0, 3)
    assert repr(Window(8, ring=11)) == "Window(tokens=8, sinks=0, ring=11)"
