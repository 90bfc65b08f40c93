"""The kernels in Triton's interpreter, at tiny sizes in float32. ``test_kernels.py`` runs this file in a process of its
own, because the interpreter has to be chosen before triton is imported."""

from __future__ import annotations

import attrs
import pytest
import torch

from kvist.errors import SpecError
from kvist.testing.attention import Case
from kvist_minimax_m3.batch import Batch
from kvist_minimax_m3.blocks import block_scores, select_blocks
from kvist_minimax_m3.kernels import score, select, split, transposed
from kvist_minimax_m3.kernels.backend import TritonBackend
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.testing import SparseBackendTests, sparse_spec

FP8 = "float8_e4m3fn"
#: Blocks of 16 keys, which is the narrowest tile.
RULE = Selection(16, 2, 1)


def sizes(case, **fields):
    return case(**{"query_heads": 4, "page": 16, "selection": RULE, **fields})


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)])
def test_ragged_steps_against_the_brute_force(page, paged, case):
    cache = paged(TritonBackend, sizes(case, page=page), [75, 60, 20], seed=page)
    for chunks in ([(0, 21), (1, 5)], [(0, 30), (1, 40), (2, 17)], [(0, 1), (1, 1), (2, 1)], [(1, 1), (0, 5)]):
        cache.step(chunks)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Selection(16, 1, 0), marks=pytest.mark.slow),
        Selection(16, 4, 2, 1),
        pytest.param(Selection(32, 2, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("index_dtype", [pytest.param("float32", marks=pytest.mark.slow), FP8])
def test_rules_and_index_dtypes(rule, index_dtype, paged, case):
    fields = {"index_dtype": index_dtype, "selection": rule, "kv_heads": 1, "index_heads": 1, "query_heads": 6}
    cache = paged(TritonBackend, sizes(case, **fields), [80], seed=1)
    for count in (70, 1, 8, 1):
        cache.step([(0, count)])


@pytest.mark.slow
def test_sizes_may_differ(paged, case):
    cache = paged(
        TritonBackend, sizes(case, head_dim=32, index_size=64, kv_heads=3, index_heads=3, query_heads=3), [70]
    )
    for count in (50, 1, 19):
        cache.step([(0, count)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_are_written_by_torch_and_only_read_here(dtype, paged, case):
    cache = paged(TritonBackend, sizes(case, dtype=dtype, index_dtype=dtype), [90], seed=2)
    for count in (60, 1, 29):
        cache.step([(0, count)])


@pytest.mark.slow
def test_both_backends_arrange_pages_alike(paged, case):
    """What one has written, the other reads: bytes and outputs agree."""
    one = paged(TritonBackend, sizes(case), [70], seed=3)
    other = paged(ReferenceBackend, sizes(case), [70], seed=3)
    for cache in (one, other):
        cache.step([(0, 64)])
    assert torch.equal(one.memory.bytes, other.memory.bytes)


def staged(paged, case, totals, counts, **fields):
    """A reference cache with rows in it, a step staged, and layer 4's inputs and pages."""
    cache = paged(ReferenceBackend, sizes(case, **fields), totals, seed=5)
    cache.step([(n, total - count) for n, (total, count) in enumerate(zip(totals, counts)) if total > count])
    chunks = sorted(enumerate(counts), key=lambda chunk: chunk[1] != 1)
    step, inputs = cache.make_step(chunks), cache.inputs(4, chunks)
    cache.backend.begin(step)
    cache.backend.forward(4, inputs)
    batch = Batch(torch.device("cpu"), 0, cache.case.page)
    batch.stage(step)
    return cache, inputs, cache.backend._rows[4], batch


@pytest.mark.parametrize(
    "queries", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(64, marks=pytest.mark.slow)]
)
def test_scores(queries, monkeypatch, paged, case):
    monkeypatch.setattr(score, "_TILE_ROWS", 2 * queries)
    _, inputs, rows, batch = staged(paged, case, [90, 40], [1, 9], page=4)
    got = score.block_scores(inputs.index_query, rows.index_key, batch, 16)
    assert got.shape == (10, 2, 6)
    for row, length in enumerate(batch.lengths):
        tokens = slice(batch.starts[row], batch.starts[row + 1])
        key = rows.index_key[batch.pages[row].long()].flatten(0, 1)[:length]
        want = block_scores(inputs.index_query[tokens], key, batch.positions[tokens], 16)
        torch.testing.assert_close(got[tokens, :, : want.shape[2]], want, rtol=1e-5, atol=1e-5)
        assert (got[tokens, :, want.shape[2] :] == -torch.inf).all()


@pytest.mark.parametrize(
    "rule",
    [Selection(4, 3, 1), Selection(4, 1, 0), Selection(4, 5, 2, 2), Selection(4, 4, 3), Selection(4, 20, 0, 1)],
    ids=str,
)
def test_selection_bit_for_bit(rule):
    """Few different scores, so that ties decide often; some blocks are behind the query."""
    generator = torch.Generator().manual_seed(rule.topk)
    scores = torch.randint(-2, 3, (12, 2, 12), generator=generator).float()
    positions = torch.arange(12) * 4
    scores.masked_fill_(torch.arange(12) > (positions // 4)[:, None, None], -torch.inf)
    assert torch.equal(select.select_blocks(scores, positions, rule), select_blocks(scores, positions, rule))


def test_a_selection_turned_round():
    """By hand: tokens 0 and 1 of row 0, token 2 of row 1; two heads, three blocks."""
    blocks = torch.tensor([[[0, 2], [0, -1]], [[2, -1], [0, 1]], [[1, 2], [1, -1]]], dtype=torch.int32)
    starts, entries = transposed.readers(blocks, torch.tensor([0, 0, 1]), 2, 3)
    found = {}
    for row in range(2):
        for block in range(3):
            for head in range(2):
                at = (row * 3 + block) * 2 + head
                found[row, block, head] = entries[starts[at] : starts[at + 1]].tolist()
    # An entry is (token * 2 + head) * 2 + slot.
    assert {place: entry for place, entry in found.items() if entry} == {
        (0, 0, 0): [0],
        (0, 0, 1): [2, 6],
        (0, 1, 1): [7],
        (0, 2, 0): [1, 4],
        (1, 1, 0): [8],
        (1, 1, 1): [10],
        (1, 2, 0): [9],
    }


@pytest.mark.slow
def test_prefill_in_slices(monkeypatch, paged, case):
    monkeypatch.setattr(transposed, "_PART_ELEMENTS", 40 * 4 * 2 * 16)
    cache = paged(TritonBackend, sizes(case), [70], seed=6)
    cache.step([(0, 70)])


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 8, 512])
def test_decode_split_over_blocks(programs, monkeypatch, paged, case):
    """One program for all blocks of a query, some, or one each; also dense layers, which have many parts."""
    monkeypatch.setattr(split, "_PROGRAMS", programs)
    cache = paged(TritonBackend, sizes(case), [120, 20], seed=7)
    cache.step([(0, 119), (1, 19)])
    cache.step([(0, 1), (1, 1)])


@pytest.mark.slow
def test_each_block_is_loaded_once_for_all_queries(monkeypatch, paged, case):
    """S7: ids are ascending and distinct, also where the last block is a partial one that every query selects."""
    cache = paged(TritonBackend, sizes(case), [75], seed=8)
    cache.step([(0, 70)])
    step = cache.make_step([(0, 5)])
    cache.backend.begin(step)
    inputs = cache.inputs(4, [(0, 5)])
    cache.backend.forward(4, inputs)
    ids = cache.backend.select(4, inputs)
    assert ids.shape == (5, 2, 2)
    assert (ids[..., 1:] > ids[..., :-1]).all()
    assert (ids[..., -1] == 4).all()


def refusal(call, *arguments):
    with pytest.raises(SpecError) as caught:
        call(*arguments)
    return str(caught.value)


def test_refusals(paged, case):
    hint = "hint: use the backend 'minimax-m3-reference'"
    tiles = "the kernels have tiles of 16, 32, 64, 128, 256"
    name = "backend 'minimax-m3-triton'"

    def layout_refusal(**fields):
        return refusal(TritonBackend.page_layout, sizes(case, **fields).spec())

    assert layout_refusal(head_dim=24) == f"{name}: layer 1 has head size 24; {tiles}\n{hint}"
    assert layout_refusal(index_size=8) == f"{name}: layer 4 has index size 8; {tiles}\n{hint}"
    assert layout_refusal(dtype="float64") == (
        f"{name}: layer 1 stores rows as float64\nhint: use float32, bfloat16 or float16"
    )
    several = paged(TritonBackend, sizes(case, index_heads=4), [9])
    several.backend.begin(several.make_step([(0, 2)]))
    assert refusal(several.backend.forward, 4, several.inputs(4, [(0, 2)])) == (
        f"{name}: layer 4 has 4 index heads for 2 key heads\n{hint}"
    )
    narrow = paged(TritonBackend, sizes(case, page=4, selection=Selection(8, 3)), [9])
    narrow.backend.begin(narrow.make_step([(0, 2)]))
    assert refusal(narrow.backend.forward, 4, narrow.inputs(4, [(0, 2)])) == (
        f"{name}: sparse blocks have 8 tokens; {tiles}\n{hint}"
    )
    capped = attrs.evolve(narrow.inputs(1, [(0, 2)]), softcap=1.0)
    assert refusal(narrow.backend.forward, 1, capped) == (
        f"{name}: layer 1 asks for a window, sinks or a softcap\n"
        "hint: MiniMax-M3's dense layers have none; use a backend of the family 'gqa'"
    )


def test_a_step_without_rows(paged, case):
    cache = paged(TritonBackend, sizes(case), [9])
    assert [tuple(output.shape) for output in cache.step([])] == [(0, 4, 16)] * 3


@pytest.mark.slow
def test_whole_model(tiny, logits, tokens, machine):
    """The four-layer path end to end: transformers' logits through the kernels, with a draft taken back."""
    model, prompt = tiny("equal heads", block=16), tokens(120)
    expected = logits(model, prompt)
    with machine(model, page=8, pages=40, backend=TritonBackend) as cache:
        sequence = cache.manager.open(prompt, reuse=False)
        cache.compute([(sequence, 90)], lambda _: expected)
        cache.compute([(sequence, 1)], lambda _: expected)
        cache.step([(sequence, [*prompt[91:92], 5, 6], 2)], accepted=[1])
        cache.compute([(sequence, 28)], lambda _: expected)


@pytest.mark.slow
class TestContract(SparseBackendTests):
    """The contract's tests, in float32: blocks of 16 tokens, of which a query reads two."""

    backend = TritonBackend
    features = frozenset({"fp8_index"})
    cases = (Case(name="float32", spec=sparse_spec(8)),)
    rule = Selection(16, 2, 1)
    triton = True


def test_the_interpreter_is_on():
    assert type(score._score).__name__ == "InterpretedFunction"
