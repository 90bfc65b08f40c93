"""The reference backend against a brute force without pages, and what it refuses."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from kvist.attention.base import BackendContext
from kvist.errors import KvistError
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, History, Layer, RowFormat, ScaleFormat, Stream, Window
from kvist.step import NO_PAGE
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.rows import store
from kvist_minimax_m3.selection import Selection

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("reduce", ["per_index_head", "union", "max"])
@pytest.mark.parametrize("index_heads", [1, 2, 4])
def test_several_index_heads(index_heads, reduce, page, paged, case):
    sizes = case(kv_heads=1, index_heads=index_heads, page=page, selection=Selection(4, 3, 1, 0, reduce))
    paged(ReferenceBackend, sizes, [53, 20, 1], seed=index_heads).play(seed=page)


def test_index_heads_of_several_key_heads(paged, case):
    paged(ReferenceBackend, case(kv_heads=2, index_heads=4, page=2), [53, 20], seed=1).play(seed=1)


@pytest.mark.parametrize(
    "rule",
    [Selection(4, 1, 0), Selection(4, 4, 2), Selection(4, 3, 1, 2), Selection(8, 2, 1), Selection(12, 2, 0, 1)],
    ids=str,
)
def test_rules(rule, paged, case):
    paged(ReferenceBackend, case(selection=rule), [61, 33], seed=3).play(seed=3)


@pytest.mark.parametrize("index_dtype", ["float32", "bfloat16", "float16", FP8])
def test_dtypes_of_index_keys(index_dtype, paged, case):
    paged(ReferenceBackend, case(index_dtype=index_dtype), [61, 33], seed=4).play(seed=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_rounded_before_they_take_part(dtype, paged, case):
    paged(ReferenceBackend, case(dtype=dtype), [40, 21], seed=5).play(seed=5)


def test_queries_and_keys_in_parts_are_the_same(monkeypatch, paged, case):
    monkeypatch.setattr("kvist_minimax_m3.reference._GATHERED", 3000)
    monkeypatch.setattr("kvist_minimax_m3.reference._SCORED", 9)
    paged(ReferenceBackend, case(), [61, 33], seed=6).play(seed=6)


def test_a_step_without_rows(paged, case):
    cache = paged(ReferenceBackend, case(), [9])
    outputs = cache.step([])
    assert [tuple(output.shape) for output in outputs] == [(0, 8, 16)] * 3


def test_fp8_selects_as_its_values_in_bf16_do(paged, case):
    """Bit for bit: 8-bit keys, and a bf16 cache that is given what the 8 bits say."""
    one = paged(ReferenceBackend, case(index_dtype=FP8), [200], seed=7)
    other = paged(ReferenceBackend, case(index_dtype="bfloat16"), [200], seed=7)
    for layer in (4, 7):
        rows = other.content[layer, 0]
        rows[4] = rows[4].to(torch.float8_e4m3fn).float()
    for count in (130, 1, 1, 68):
        ids = []
        for cache in (one, other):
            cache.backend.begin(cache.make_step([(0, count)]))
            outputs = [cache.backend.forward(layer, cache.inputs(layer, [(0, count)])) for layer in (1, 4, 7)]
            ids.append([cache.backend.select(layer, cache.inputs(layer, [(0, count)])) for layer in (4, 7)] + outputs)
            cache.computed[0] += count
        for a, b in zip(*ids):
            assert torch.equal(a, b)
    exact = paged(ReferenceBackend, case(), [200], seed=7)
    kept = [
        len({*a} & {*b}) / len(a)
        for position in range(12, 200)
        for a, b in zip(exact.selected(4, 0, position), one.selected(4, 0, position))
    ]
    # It is another selection than that of float32 keys, but nearly so.
    assert 0.9 < np.mean(kept) < 1.0


def test_rounding_of_8_bits():
    """To the nearest, ties to even, once; the largest value is 448. Codes worked by hand."""
    values = torch.tensor([1.99, 1.0625, 1.1875, 0.0009765625, 449.0, 480.0, 1e9, -1e9, float("inf"), float("nan")])
    view = torch.zeros(1, 10, 1, dtype=torch.float8_e4m3fn)
    store(view, torch.zeros(10, dtype=torch.int64), torch.arange(10), values[:, None])
    want = [2.0, 1.0, 1.25, 0.0, 448.0, 448.0, 448.0, -448.0, 448.0]
    assert view[0, :9, 0].float().tolist() == want
    assert view[0, 9, 0].float().isnan()
    # 1.06251 is nearest to 1.125; rounded to bf16 first it would be a tie and become 1.
    store(view, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.tensor([[1.06251]]))
    assert view[0, 0, 0].float() == 1.125


def refusal(call, *arguments):
    with pytest.raises(KvistError) as caught:
        call(*arguments)
    return str(caught.value)


ROW = RowFormat((2, 16), "float32")
K, V = Stream("k", ROW, History()), Stream("v", ROW, History())
INDEX = Stream("index_k", RowFormat((16,), "float32"), History())


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (
            [K, INDEX],
            "layer 3 has streams ['k'], grouped-query attention needs exactly ['k', 'v']",
        ),
        (
            [INDEX],
            "layer 3 has streams ['index_k'], grouped-query attention needs exactly ['k', 'v']",
        ),
        (
            [K, attrs.evolve(V, row=RowFormat((1, 16), "float32")), INDEX],
            "layer 3 has 2 key heads and 1 value heads",
        ),
        (
            [attrs.evolve(each, retention=Window(64)) for each in (K, V, INDEX)],
            "layer 3 keeps 'k' for Window(tokens=64, sinks=0)\n"
            "hint: any block may be selected later, so rows are kept for History()",
        ),
        (
            [K, V, attrs.evolve(INDEX, retention=Window(64))],
            "layer 3 keeps 'index_k' for Window(tokens=64, sinks=0)\n"
            "hint: any block may be selected later, so rows are kept for History()",
        ),
        (
            [K, V, attrs.evolve(INDEX, row=RowFormat((2, 16), "float32"))],
            "layer 3 stream 'index_k' has rows of shape (2, 16), expected (index size,)",
        ),
        (
            [K, V, attrs.evolve(INDEX, row=RowFormat((16,), "uint8"))],
            "layer 3 stream 'index_k' is stored as uint8\n"
            "hint: use one of bfloat16, float16, float32, float64, float8_e4m3fn",
        ),
        (
            [K, V, attrs.evolve(INDEX, row=RowFormat((16,), FP8, ScaleFormat(1)))],
            "layer 3 stream 'index_k' has scales, rows must be plain",
        ),
        (
            [K, V, attrs.evolve(INDEX, tokens_per_row=4)],
            "layer 3 stream 'index_k' has 4 tokens per row, expected 1",
        ),
    ],
)
def test_specs_that_are_refused(streams, message):
    spec = CacheSpec([Layer(3, streams)], 4, "test")
    assert refusal(ReferenceBackend.page_layout, spec) == f"backend 'minimax-m3-reference': {message}"


def test_all_layers_may_be_sparse_or_dense():
    for layer in (Layer(0, [K, V]), Layer(0, [K, V, INDEX])):
        spec = CacheSpec([layer], 4, "test")
        layout = Layout.build(spec, 1 << 16, ReferenceBackend.page_layout(spec))
        ReferenceBackend(BackendContext(DeviceMemory(layout)))


def test_inputs_that_do_not_fit(paged, case):
    cache = paged(ReferenceBackend, case(), [9])
    inputs = cache.inputs(4, [(0, 3)])
    assert refusal(cache.backend.forward, 4, inputs) == "forward() before begin(): the backend has no step"
    cache.backend.begin(cache.make_step([(0, 3)]))

    def refused(**fields):
        return refusal(cache.backend.forward, 4, attrs.evolve(inputs, **fields))

    assert refused(key=inputs.key[:2]).startswith("layer 4: keys [2, 2, 16] and values [3, 2, 16], expected")
    assert refused(query=inputs.query[:, :3]).startswith("layer 4: queries [3, 3, 16], expected")
    assert refused(index_key=inputs.index_key[:, None]) == "layer 4: index keys [3, 1, 16], expected [3, 16]"
    assert refused(index_query=inputs.index_query.transpose(0, 1)) == (
        "layer 4: index queries [2, 3, 16], expected [3, index heads, 16]"
    )
    three = inputs.index_query[:, :1].expand(-1, 3, -1)
    assert refused(index_query=three) == (
        "layer 4: 3 index heads, expected a multiple of 2 key heads that divides 8 query heads"
    )
    assert refused(selection=Selection(6)) == (
        "pages of 4 tokens do not divide sparse blocks of 6\nhint: use block_tokens=6, or a divisor of it"
    )


def test_a_block_without_a_page(paged, case):
    cache = paged(ReferenceBackend, case(), [30])
    cache.step([(0, 20)])
    cache.table[cache.slots[0], 2] = NO_PAGE
    step = cache.make_step([(0, 5)])
    assert refusal(cache.backend.begin, step) == f"step {step.id}: row 0 has no page for block 2 of 7"
