"""Copies of a step on real memory: every source before any destination, whatever groups they belong to."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.layout import Layout
from kvist.memory import device
from kvist.spec import History, Window
from kvist.step import Step, overlaps
from kvist.testing.values import make_spec

torch = pytest.importorskip("torch")


def step_of(copies: list, fresh: list) -> Step:
    nothing = np.empty(0, np.int32)
    return Step(
        1,
        nothing,
        nothing,
        nothing,
        0,
        (),
        tuple(np.array(pairs, np.int32).reshape(-1, 2) for pairs in copies),
        tuple(np.array(pages, np.int32) for pages in fresh),
    )


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("seed", range(10))
def test_copies_read_before_they_write(seed: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_COPY_BYTES", chunk)
    layout = Layout.build(make_spec(4, History(), Window(6), widths=(24, 8)), 20 * 768)
    assert [group.page_bytes for group in layout.groups] == [768, 256]
    rng = np.random.default_rng(seed)
    memory = device.DeviceMemory(layout)
    memory.bytes.copy_(torch.tensor(rng.integers(0, 256, layout.arena_bytes).astype(np.uint8)))
    before = memory.bytes.numpy().copy()
    # Slabs are dealt out as destinations of one group or the other; sources lie anywhere.
    slabs = rng.permutation(np.arange(1, 20))
    large, small = slabs[:7], (3 * slabs[7:12, None] + np.arange(3)).ravel()
    copies = [
        np.stack([rng.integers(1, 20, len(large)), large], 1),
        np.stack([rng.integers(3, 60, len(small)), small], 1),
    ]
    memory.apply(step_of(copies, [[], [int(3 * slabs[12])]]))
    expected = before.copy()
    for pairs, size in zip(copies, (768, 256)):
        for source, to in pairs.tolist():
            expected[to * size : (to + 1) * size] = before[source * size : (source + 1) * size]
    expected[slabs[12] * 768 : slabs[12] * 768 + 256] = 0
    assert np.array_equal(memory.bytes.numpy(), expected)


def test_ranges_that_share_a_number() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        begin, other = rng.integers(0, 50, 8), rng.integers(0, 50, int(rng.integers(0, 6)))
        end, other_end = begin + rng.integers(1, 6, 8), other + rng.integers(1, 6, len(other))
        found = overlaps(begin, end, other, other_end)
        for at in range(8):
            assert found[at] == any(begin[at] < last and first < end[at] for first, last in zip(other, other_end))
