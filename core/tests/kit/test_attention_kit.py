"""The attention kit's own parts: do its scenarios happen, and what does it say?"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest
import torch
from kit.toys import DecaySuite, Plain, PlainSuite, PooledSuite, RingSuite

from kvist.errors import SpecError
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.attention import AttentionBackendTests, Case
from kvist.testing.attention.case import boundaries, total_tokens
from kvist.testing.attention.driver import Driver
from kvist.testing.attention.inputs import join, over_tokens, strided, token_fields

SUITES = (PlainSuite, DecaySuite, PooledSuite, RingSuite)


def named(suite: type[AttentionBackendTests], name: str) -> Case:
    return next(case for case in suite.cases if case.name == name)


def driver(suite: type[AttentionBackendTests], name: str, **options: bool) -> Driver:
    return suite().driver(named(suite, name), requests=6, **options)


def test_boundaries_by_hand() -> None:
    row = RowFormat((4,), "float32")
    streams = [
        Stream("a", row, History()),
        Stream("b", row, History(), tokens_per_row=4),
        Stream("c", row, Window(11)),
        Stream("d", row, Window(5, sinks=2)),
        Stream("e", row, Window(6, ring=7)),
        Stream("f", row, State()),
    ]
    # Blocks, rows of 4, the row that leaves a window of n tokens at length n, sinks that never do, the ring.
    expected = {
        0: [16, 32],
        1: [4, 16, 20, 32],
        2: [11, 16, 27, 32],
        3: [7, 16, 23, 32],
        4: [6, 7, 16, 22, 23, 32],
        5: [16, 32],
    }
    for index, stream in enumerate(streams):
        assert boundaries(CacheSpec([Layer(0, [stream])], 16, "test")) == expected[index], stream.name
    assert total_tokens(CacheSpec([Layer(0, streams)], 16, "test")) == 50


@attrs.frozen
class Inputs:
    rows: torch.Tensor
    weight: torch.Tensor
    scale: float = 2.0


def test_inputs_are_cut_and_joined_along_tokens() -> None:
    inputs = Inputs(torch.arange(12.0).view(4, 3), torch.ones(4))
    names = token_fields(inputs, {"weight"}, 4)
    assert names == ["rows"]
    parts = [
        over_tokens(inputs, names, lambda tensor: tensor[2:]),
        over_tokens(inputs, names, lambda tensor: tensor[:1]),
    ]
    joined = join(parts, names)
    assert joined.rows.tolist() == [[6, 7, 8], [9, 10, 11], [0, 1, 2]]
    assert joined.weight is inputs.weight and joined.scale == 2.0
    for tensor in (torch.randn(3, 4, 5), torch.randn(3, 4), torch.randn(3)):
        view = strided(tensor)
        assert torch.equal(view, tensor) and not view.is_contiguous()


def test_inputs_of_another_kind_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        token_fields(Inputs(torch.ones(4, 3), torch.ones(2)), (), 4)
    assert str(error.value) == (
        "Inputs.weight has shape [2], expected 4 tokens in axis 0\n"
        "hint: if it is not per token, add 'weight' to the test class's constants"
    )
    with pytest.raises(SpecError) as error:
        token_fields((1, 2), (), 4)
    assert str(error.value) == (
        "inputs are a tuple, no attrs class\nhint: write the family's inputs as an attrs.frozen class"
    )


@pytest.mark.parametrize(
    ("suite", "name"),
    [(PlainSuite, "full"), (PlainSuite, "window"), (DecaySuite, "states"), (PooledSuite, "compressed")],
)
def test_prefixes_are_shared_copied_and_restored(suite: type[AttentionBackendTests], name: str) -> None:
    """The scenarios of AB-18 and AB-19 do reuse pages, copy some, and come back with other ones."""
    drive = driver(suite, name)
    block, total = drive.layout.block_tokens, total_tokens(drive.case.spec)
    parent = drive.open(total, restore_at=(block, 2 * block))
    drive.prefill(parent, total - 3)
    sharer = drive.open(total, like=parent, shared=2 * block + 3)
    assert sharer.sequence.reused >= 2 * block
    fork = drive.fork(parent)
    # Truncated to whole compressed rows.
    assert fork.sequence.computed == (total - 3) // drive.layout.reuse_unit * drive.layout.reuse_unit
    flight = drive.step([(fork, 1), (sharer, 1)])
    assert sum(map(len, flight.step.copies)) > 0
    assert not torch.equal(*(request.expected[drive.layers[0].id][-1] for request in (parent, fork)))
    drive.manager.suspend(parent.sequence)
    assert 0 < drive.manager.resume(parent.sequence) <= total - 3
    drive.play([parent, sharer, fork])
    drive.manager.check()


def test_states_are_zeroed_and_saved() -> None:
    drive = driver(DecaySuite, "states")
    request = drive.open(40, restore_at=(8,))
    assert [len(pages) for pages in drive.step([(request, 8)]).step.fresh] == [1]
    assert request.sequence.computed == 8
    assert drive.open(40, like=request, shared=40).sequence.reused == 8


def test_free_pages_and_page_zero_are_poisoned() -> None:
    drive = driver(PlainSuite, "full")
    drive.step([(drive.open(20), 20)])
    pages = drive.memory.pages(0)
    assert bool((pages[0] == 0xFF).all())
    assert bool((pages[torch.from_numpy(drive.manager.free_pages(0)).long()] == 0xFF).all())


def test_a_wrong_output_is_described() -> None:
    class Wrong(Plain):
        def attend(self, query, key, value, mask, inputs):
            output = super().attend(query, key, value, mask, inputs)
            if len(query) == 1:
                output += 0.5
            return output

    class Suite(PlainSuite):
        backend = Wrong

    drive = driver(Suite, "full")
    request = drive.open(30)
    drive.step([(request, 20)])
    with pytest.raises(AssertionError) as error:
        drive.step([(request, 1)])
    assert str(error.value) == (
        "case 'full' on cpu: layer 1: the output at position 20 is off by 0.5, allowed is 1e-05; step 2 computed "
        "20..20 of this sequence, in row 0 of 1"
    )


def test_features_that_are_not_declared_are_left_out_or_remarked() -> None:
    class Refuses(Plain):
        def capped(self, scores, inputs):
            if inputs.softcap is not None:
                raise NotImplementedError
            return scores

    class Modest(PlainSuite):
        features = frozenset()

    class Less(Modest):
        backend = Refuses

    assert [each.id for each in Modest.declared()] == [
        "full", "small-blocks", "bfloat16", "float16", "stored-as-bfloat16",
    ]  # fmt: skip
    for suite, reason in (
        (Modest, "works, but is not declared: features softcap"),
        (Less, "not applicable: features softcap"),
    ):
        with pytest.raises(pytest.skip.Exception) as skipped:
            suite().test_declared_features_work_and_others_are_not_declared(named(suite, "softcap"))
        assert str(skipped.value) == reason


def test_devices_that_are_not_here_are_skipped_with_the_reason() -> None:
    class Elsewhere(PlainSuite):
        devices = ("cpu", "cuda:99")

    parameters = Elsewhere.declared()
    skipped = [each for each in parameters if each.marks]
    assert {each.id for each in parameters if not each.marks} == {f"{case.name}-cpu" for case in PlainSuite.cases}
    assert {each.marks[0].kwargs["reason"] for each in skipped} == {
        "not run here: there is no 'cuda:99' device on this machine"
    }


def test_what_an_author_left_out_is_named() -> None:
    class Empty(AttentionBackendTests):
        backend = Plain
        cases = PlainSuite.cases

    with pytest.raises(NotImplementedError) as error:
        driver(Empty, "full").open(3)
    assert str(error.value) == "Empty.inputs: draw a sequence's inputs from the generator"


def test_triton_without_its_interpreter_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Suite(PlainSuite):
        triton = True

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(pytest.skip.Exception) as skipped:
        driver(Suite, "full")
    assert str(skipped.value) == (
        "not run here: Triton kernels run on a CPU in Triton's interpreter only; put os.environ['TRITON_INTERPRET'] = "
        "'1' into the conftest.py, above every import of triton"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    driver(Suite, "full")


TRITON = """
import torch, triton
import triton.language as tl
from kit.toys import Plain, PlainSuite
from kvist.testing.attention.gqa import CASES


@triton.jit
def store(new, view, pages, positions, block, page_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    position = tl.load(positions + token)
    page = tl.load(pages + position // block)
    column = tl.arange(0, WIDTH)
    row = tl.load(new + token * SIZE + column, mask=column < SIZE)
    tl.store(view + page * page_stride + position % block * SIZE + column, row, mask=column < SIZE)


class Stores(Plain):
    def write(self, view, pages, positions, new):
        size = new[0].numel()
        if len(new):
            grid, width = (len(new),), triton.next_power_of_2(size)
            store[grid](new.contiguous(), view, pages, positions, self.block_tokens, view.stride(0), size, width)


class TestStores(PlainSuite):
    backend = Stores
    triton = True
    cases = tuple(case for case in CASES if case.name in ("full", "window"))
"""


@pytest.mark.slow
def test_a_triton_kernel_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "test_stores.py").write_text(textwrap.dedent(TRITON))
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), "-k", "ragged or writes"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 passed" in ran.stdout
