"""The arena's bytes and views of them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream, Window
from kvist.step import Step


def _memory() -> DeviceMemory:
    key = Stream("k", RowFormat((2, 8), "float32"), History())
    value = Stream("v", RowFormat((2, 4), "bfloat16"), History())
    layers = (Layer(0, (key, value)), Layer(1, (Stream("k", RowFormat((1, 8), "float32"), Window(8)),)))
    return DeviceMemory(Layout.build(CacheSpec(layers, 4, "test"), 1 << 16))


def _step(*copies: list[tuple[int, int]]) -> Step:
    empty = np.zeros(0, np.int32)
    arrays = []
    for pairs in copies:
        array = np.array(pairs, np.int32).reshape(-1, 2)
        array.flags.writeable = False
        arrays.append(array)
    return Step(0, empty, empty, empty, 0, (empty.reshape(0, 0),) * len(copies), tuple(arrays))


def test_memory_starts_with_zeros_and_views_share_it() -> None:
    memory = _memory()
    assert not memory.bytes.any()
    assert memory.bytes.data_ptr() % 64 == 0
    group, part = memory.layout.part(0, "v")
    view = memory.view(0, "v", (4, 2, 4), torch.bfloat16)
    view[3] = 1.5
    page = memory.pages(group.index)[3]
    assert (page[part.offset : part.offset + part.byte_count].view(torch.bfloat16) == 1.5).all()
    assert int(memory.bytes.count_nonzero()) <= part.byte_count


def test_a_view_outlives_its_memory_object() -> None:
    view = _memory().view(0, "k", (4, 2, 8), torch.float32)
    gc.collect()
    view.fill_(2.0)
    assert (view == 2.0).all()


def test_views_that_do_not_fit_are_refused() -> None:
    memory = _memory()
    with pytest.raises(SpecError) as error:
        memory.view(0, "v", (4, 2, 5), torch.bfloat16)
    assert str(error.value) == (
        "layer 0 stream 'v': shape (4, 2, 5) of torch.bfloat16 needs 80 bytes, its part of a page has 64"
    )
    with pytest.raises(SpecError) as error:
        memory.view(0, "q", (1,), torch.uint8)
    assert str(error.value) == "layer 0 has no stream 'q'\nhint: it has ['k', 'v']"


def test_copies_of_one_step_happen_at_once() -> None:
    memory = _memory()
    for page in range(1, 5):
        memory.pages(0)[page] = page
    memory.apply(_step([(1, 2), (2, 3)], []))
    assert [int(memory.pages(0)[page, 0]) for page in range(1, 5)] == [1, 1, 2, 4]
    assert (memory.pages(0)[3] == 2).all()
