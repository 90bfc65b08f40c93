"""What other backends do not have: threads of its own, and conversions of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError
from kvist.step import Step
from kvist_attention_cpu.backend import NativeCpuBackend
from kvist_attention_cpu.native import why_not


@pytest.fixture(autouse=True)
def _needs_the_kernel() -> None:
    if reason := why_not():
        pytest.skip(f"no kernel: {reason}")


def test_threads_do_not_change_the_result(make_cache: Any, make_case: Any) -> None:
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        cache = make_cache(NativeCpuBackend, make_case(heads=3, group_size=3), [300, 200, 80])
        cache.step([(0, 299), (1, 199), (2, 79)])
        results.append(cache.step([(0, 1), (1, 1), (2, 1)])[0])
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_kernel_rounds_as_torch_does(make_cache: Any, make_case: Any) -> None:
    """Between any two dtypes: ties, subnormals, overflow, infinities and NaN."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    for source in ("float32", "float16", "bfloat16"):
        if source == "float32":
            halves = torch.from_numpy(patterns)
            exact = torch.cat([halves.view(torch.float16).float(), halves.view(torch.bfloat16).float()])
            bits = exact.view(torch.int32)
            # Every 16-bit value, its neighbours, the tie above it, and the neighbours of that.
            steps = [0, 1, -1, 1 << 12, (1 << 12) + 1, (1 << 12) - 1, 1 << 15, (1 << 15) + 1, (1 << 15) - 1]
            values = torch.cat([bits + step for step in steps]).view(torch.float32)
        else:
            values = torch.from_numpy(patterns).view(getattr(torch, source))
        for storage in ("float32", "float16", "bfloat16"):
            width = 1 << 12
            rows = values.view(-1, 1, width)
            case = make_case(heads=1, key_size=1, value_size=width, dtype=storage, compute=source)
            cache = make_cache(NativeCpuBackend, case, [1])
            view = cache.memory.view(0, "v", (1, 16, width), getattr(torch, storage))
            for first in range(0, len(rows), 16):
                new = rows[first : first + 16]
                cache.backend.begin(_one_row(len(new)))
                zero = torch.zeros(len(new), 1, 1, dtype=new.dtype)
                cache.backend.forward(0, GQAInputs(zero, zero, new, 1.0))
                expected = new[:, 0].to(view.dtype)
                torch.testing.assert_close(view[2, 0, : len(new)], expected, rtol=0, atol=0, equal_nan=True)


def _one_row(tokens: int) -> Step:
    arrays = [np.array([value], np.int32) for value in (0, tokens, tokens)]
    return Step(0, *arrays, int(tokens == 1), (np.array([[2]], np.int32),), (np.zeros((0, 2), np.int32),))


def test_the_kernel_refuses_double_inputs(make_cache: Any, make_case: Any) -> None:
    cache = make_cache(NativeCpuBackend, make_case(compute="float64"), [4])
    with pytest.raises(SpecError) as error:
        cache.step([(0, 4)])
    expected = "backend 'cpu-native': inputs are torch.float64\nhint: use one of float32, bfloat16, float16"
    assert str(error.value) == expected
