"""Tests of every grouped-query backend: shapes, dtypes and messages beyond what the kit asks (``core/tests/kit``).

A test module imports all of it and has a fixture ``backend``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError, StateError
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, History, Layer, RowFormat, ScaleFormat, Stream, Window
from kvist.step import NO_PAGE, Step

Backend = type[AttentionBackend]

#: Largest difference by compute dtype: float32 sums in another order; 16-bit outputs are rounded (and, by torch,
#: the weights too).
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = [
    {"heads": 2, "group_size": 1, "key_size": 16, "value_size": 16},
    {"heads": 3, "group_size": 3, "key_size": 64, "value_size": 64},
    {"heads": 1, "group_size": 5, "key_size": 80, "value_size": 80},
    {"heads": 2, "group_size": 2, "key_size": 24, "value_size": 40},
    {"heads": 1, "group_size": 9, "key_size": 5, "value_size": 3},
]


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.values())))
def test_ragged_steps_of_any_shape(
    backend: Backend, make_cache: Any, make_case: Any, shape: dict[str, int], block_tokens: int
) -> None:
    make_cache(backend, make_case(block_tokens=block_tokens, **shape), [70, 1, 33], seed=block_tokens).play(1)


@pytest.mark.parametrize("window", [1, 3, 17, 1000])
@pytest.mark.parametrize("sink_tokens", [0, 1, 20])
@pytest.mark.parametrize("block_tokens", [3, 16])
def test_windows_and_sink_tokens(
    backend: Backend, make_cache: Any, make_case: Any, window: int, sink_tokens: int, block_tokens: int
) -> None:
    case = make_case(group_size=2, window=window, sink_tokens=sink_tokens, block_tokens=block_tokens)
    cache = make_cache(backend, case, [90, 40], seed=window)
    cache.play(2)
    if window < 20 and sink_tokens < 20:
        assert (cache.table == NO_PAGE).any(), "nothing left the window: the test tests nothing"


def test_a_long_window_over_chunks(backend: Backend, make_cache: Any, make_case: Any) -> None:
    cache = make_cache(backend, make_case(group_size=3, window=130), [400])
    cache.step([(0, 200)])
    cache.step([(0, 199)])
    cache.step([(0, 1)])


@pytest.mark.parametrize(
    "features",
    [
        {"softcap": 3000.0},
        {"sink_logits": True, "softcap": 0.5, "window": 17, "sink_tokens": 2},
        {"sink_logits": True, "window": 3},
    ],
    ids=str,
)
def test_sink_logits_and_softcap(backend: Backend, make_cache: Any, make_case: Any, features: dict[str, Any]) -> None:
    make_cache(backend, make_case(group_size=2, scale=1.0, **features), [70, 25]).play(3)


def test_scores_of_every_size(backend: Backend, make_cache: Any, make_case: Any) -> None:
    """Weights underflow to zero, all scores of a query are far below zero, the peak moves from chunk to chunk."""
    make_cache(backend, make_case(scale=40.0), [200, 65], tolerance=1e-4).play(4)
    make_cache(backend, make_case(scale=400.0, heads=5), [9, 9, 9], tolerance=1e-3).play(4)


@pytest.mark.parametrize(
    ("compute", "storage"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float16", "bfloat16"),
        ("float64", "float64"),
        ("float64", "float32"),
    ],
)
@pytest.mark.parametrize("block_tokens", [5, 32])
def test_dtypes(
    backend: Backend, make_cache: Any, make_case: Any, compute: str, storage: str, block_tokens: int
) -> None:
    if backend.name == "cpu-native" and compute == "float64":
        pytest.skip("refused, see below")
    case = make_case(group_size=3, key_size=64, value_size=64, scale=0.125, dtype=storage, compute=compute,
                     block_tokens=block_tokens)  # fmt: skip
    tolerance = 1e-5 if storage == "float32" and compute == "float64" else TOLERANCE[compute]
    if backend.name != "torch-reference" and compute == "float64":
        tolerance = 1e-6
    make_cache(backend, case, [70, 33], tolerance=tolerance).play(5)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule(backend: Backend, make_cache: Any, make_case: Any, data: st.DataObject) -> None:
    window = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    case = make_case(
        heads=data.draw(st.integers(1, 3)),
        group_size=data.draw(st.integers(1, 4)),
        key_size=data.draw(st.integers(1, 20)),
        value_size=data.draw(st.integers(1, 20)),
        block_tokens=data.draw(st.sampled_from([1, 2, 7, 16, 48])),
        window=window,
        sink_tokens=data.draw(st.integers(0, 9)) if window else 0,
        sink_logits=data.draw(st.booleans()),
        layers=2,
    )
    totals = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    make_cache(backend, case, totals, seed=data.draw(st.integers(0, 9))).play(data.draw(st.integers(0, 9)))


def _two_groups(backend: Backend) -> tuple[AttentionBackend, Step]:
    """A full layer of 2 heads and a window layer of 1 head; 3 sequences, one of them in decode."""
    row = {"full": RowFormat((2, 16), "float32"), "window": RowFormat((1, 32), "float32")}
    layers = (
        Layer(0, (Stream("k", row["full"], History()), Stream("v", row["full"], History()))),
        Layer(1, (Stream("k", row["window"], Window(20)), Stream("v", row["window"], Window(20)))),
    )
    spec = CacheSpec(layers, 16, "test")
    memory = DeviceMemory(Layout.build(spec, 1 << 20, backend.page_layout(spec)))
    full = np.array([[1, 2, 3], [4, 5, NO_PAGE], [6, 7, 8]], np.int32) + 10
    full[1, 2] = NO_PAGE
    window = full + 100
    window[1, 2] = NO_PAGE
    window[2, 0] = NO_PAGE  # the third sequence has left its first block
    empty = np.zeros((0, 2), np.int32)
    step = Step(1, np.array([1, 0, 2], np.int32), np.array([1, 30, 2], np.int32), np.array([20, 40, 46], np.int32), 1,
                (full, window), (empty, empty))  # fmt: skip
    return backend(BackendContext(memory)), step


def test_missing_pages_are_refused(backend: Backend) -> None:
    attention, step = _two_groups(backend)
    inputs = GQAInputs(torch.zeros(33, 3, 32), torch.zeros(33, 1, 32), torch.zeros(33, 1, 32), 1.0, window=32)
    attention.begin(step)
    with pytest.raises(StateError) as error:
        attention.forward(1, inputs)  # reads further back than the group keeps
    if backend.name == "cpu-native":
        assert str(error.value) == "layer 1: a row that step 1 writes or reads has no page"
    else:
        assert str(error.value).endswith("a query at position 44 or later reads block 0, which has no page")


def test_new_rows_without_a_page(backend: Backend) -> None:
    """The reference leaves them out; the others, which read what they wrote, refuse."""
    attention, step = _two_groups(backend)
    step.tables[0][0, 1] = NO_PAGE  # tokens 16 to 31 of a chunk from 10 to 39
    inputs = GQAInputs(torch.ones(33, 2, 16), torch.ones(33, 2, 16), torch.ones(33, 2, 16), 1.0)
    if backend.name == "torch-reference":
        attention.begin(step)
        assert torch.isfinite(attention.forward(0, inputs)).all()
        return

    def run() -> None:
        attention.begin(step)
        attention.forward(0, inputs)

    with pytest.raises(StateError) as error:
        run()
    assert (
        str(error.value)
        == {
            "cpu-native": "layer 0: a row that step 1 writes or reads has no page",
            "cpu-torch": "step 1: the table of group 0 has no page for a new row",
        }[backend.name]
    )


WRONG_INPUTS = [
    (
        (33, 4, 16),
        (32, 2, 16),
        (33, 2, 16),
        {},
        "keys [32, 2, 16] and values [33, 2, 16], expected [33, 2, 16] and [33, 2, 16]",
    ),
    ((33, 3, 16), (33, 2, 16), (33, 2, 16), {}, "queries [33, 3, 16], expected [33, a multiple of 2, 16]"),
    ((34, 4, 16), (33, 2, 16), (33, 2, 16), {}, "queries [34, 4, 16], expected [33, a multiple of 2, 16]"),
    ((33, 4, 8), (33, 2, 16), (33, 2, 16), {}, "queries [33, 4, 8], expected [33, a multiple of 2, 16]"),
    ((33, 4, 16), (33, 2, 16), (33, 2, 16), {"window": 0}, "window=0 must be at least 1, or None for all"),
    ((33, 4, 16), (33, 2, 16), (33, 2, 16), {"sink_logits": torch.zeros(2)}, "sink logits [2], expected [4]"),
]


@pytest.mark.parametrize(("query", "key", "value", "more", "message"), WRONG_INPUTS)
def test_inputs_that_do_not_fit_are_refused(
    backend: Backend, query: Any, key: Any, value: Any, more: dict[str, Any], message: str
) -> None:
    attention, step = _two_groups(backend)
    attention.begin(step)
    with pytest.raises(SpecError) as error:
        attention.forward(0, GQAInputs(torch.zeros(query), torch.zeros(key), torch.zeros(value), 1.0, **more))
    assert str(error.value) == f"layer 0: {message}"


def test_forward_before_begin_is_refused(backend: Backend) -> None:
    attention, _ = _two_groups(backend)
    with pytest.raises(StateError) as error:
        attention.forward(0, GQAInputs(torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), 1.0))
    assert str(error.value) == "forward() before begin(): the backend has no step"


def _spec(key: RowFormat, value: RowFormat | None = None, **more: Any) -> CacheSpec:
    streams = (Stream("k", key, History(), **more), Stream("v", value or key, History(), **more))
    return CacheSpec((Layer(4, streams),), 16, "test")


REFUSED = [
    (_spec(RowFormat((2, 16), "int8")), "layer 4 stream 'k' is stored as int8\nhint: use one of {dtypes}"),
    (_spec(RowFormat((32,), "float32")), "layer 4 stream 'k' has rows of shape (32,), expected (heads, head size)"),
    (_spec(RowFormat((2, 16), "float32"), RowFormat((4, 16), "float32")), "layer 4 has 2 key heads and 4 value heads"),
    (_spec(RowFormat((2, 16), "float32"), RowFormat((2, 16), "float16")),
     "layer 4 stores keys as float32 and values as float16"),
    (_spec(RowFormat((2, 16), "float32", ScaleFormat(2))), "layer 4 stream 'k' has scales, rows must be plain"),
    (_spec(RowFormat((2, 16), "float32"), tokens_per_row=4), "layer 4 stream 'k' has 4 tokens per row, expected 1"),
    (CacheSpec((Layer(4, (Stream("kv", RowFormat((576,), "float32"), History()),)),), 16, "test"),
     "layer 4 has streams ['kv'], grouped-query attention needs exactly ['k', 'v']"),
    (CacheSpec((Layer(4, (Stream("k", RowFormat((1, 8), "float32"), History()),
                          Stream("v", RowFormat((1, 8), "float32"), Window(8)))),), 16, "test"),
     "layer 4 keeps keys for History() and values for Window(tokens=8, sinks=0)"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=range(len(REFUSED)))
def test_specs_that_are_not_grouped_query_are_refused(backend: Backend, spec: CacheSpec, message: str) -> None:
    native = backend.name == "cpu-native"
    dtypes = "float32, bfloat16, float16" if native else "float64, float32, float16, bfloat16"
    with pytest.raises(SpecError) as error:
        backend.page_layout(spec)
    assert str(error.value) == f"backend {backend.name!r}: " + message.format(dtypes=dtypes)
