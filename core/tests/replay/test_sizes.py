"""Memory sizes as people write them."""

from __future__ import annotations

import pytest
from toy_traces import toy_spec

from kvist.errors import CapacityError, SpecError
from kvist.replay.sizes import MemorySize


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("40GiB", 40 << 30, "bytes"),
        ("1.5 kib", 1536, "bytes"),
        ("512MB", 512_000_000, "bytes"),
        ("7b", 7, "bytes"),
        ("1Mtok", 1_000_000, "tokens"),
        (" 250k tokens ", 250_000, "tokens"),
        ("1Kitok", 1024, "tokens"),
    ],
)
def test_sizes_are_read(text, amount, unit):
    size = MemorySize.parse(text)
    assert (size.amount, size.unit) == (amount, unit)


@pytest.mark.parametrize("text", ["", "40", "GiB", "-1GiB", "1 Pib", "1e9B", "1M blocks"])
def test_other_texts_are_refused(text):
    with pytest.raises(SpecError) as raised:
        MemorySize.parse(text)
    assert str(raised.value) == (
        f"{text!r} is not a memory size\n"
        "hint: give bytes such as 40GiB or 512MB, or tokens such as 1Mtok or '250k tokens'"
    )


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("tokens", [48, 1000, 12_345])
def test_tokens_fit_into_every_group_at_once(block_tokens, tokens):
    one = MemorySize.parse(f"{tokens} tokens").layout(toy_spec({}, block_tokens=block_tokens))
    assert one.page_capacity(one.groups[0]) == tokens // block_tokens
    both = MemorySize.parse(f"{tokens} tokens").layout(toy_spec({"window": 8}, block_tokens=block_tokens))
    slabs = sum(-(-(tokens // block_tokens) // (both.slab_bytes // group.page_bytes)) for group in both.groups)
    assert slabs <= both.slab_count - 1


def test_less_than_a_block_is_refused():
    with pytest.raises(CapacityError) as raised:
        MemorySize.parse("15 tokens").layout(toy_spec({}))
    assert str(raised.value) == (
        "'15 tokens' is less than one block of 16 tokens\nhint: give the cache more memory or use smaller blocks"
    )
