"""The kernels in Triton's interpreter, at tiny sizes in float32. ``test_kernels.py`` runs this file in a process of its
own, because the interpreter has to be chosen before triton is imported."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache, tokens
from deepseek_v4_models import model_logits

from kvist.attention.families import Backends
from kvist.errors import SpecError, StateError
from kvist.manager import Run
from kvist.testing.suites import run
from kvist_deepseek_v4 import conformance
from kvist_deepseek_v4.kernels import attend, select
from kvist_deepseek_v4.kernels import backend as kernels
from kvist_deepseek_v4.kernels.backend import TritonBackend
from kvist_deepseek_v4.selection import select as plain_select
from kvist_deepseek_v4.spec import cache_spec
from kvist_deepseek_v4.testing import tiny_spec

#: A layer of each kind.
LAYERS = (0, 1, 2)


def cache(**how) -> Cache:
    return Cache(**{"backend": TritonBackend, "alone": True, "layers": LAYERS, **how})


def test_the_interpreter_is_on():
    assert type(select._select).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("block", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_chunks_and_single_tokens_are_transformers(block):
    """Over closings of both kinds and a border of blocks, with all that nobody needs NaN."""
    with cache(block=block) as made:
        request, other = made.open(34, 1), made.open(5, 2)
        made.step([(request, 14), (other, 3)])
        made.step([(request, 1), (other, 1)])
        made.step([(request, 12), (other, 1)])
        made.step([(request, 7)])


@pytest.mark.parametrize("start", [15, pytest.param(18, marks=pytest.mark.slow)])
def test_drafts_in_a_ring(start):
    with cache(block=64, drafts=3) as made:
        request = made.open(30, 3)
        made.step([(request, start)])
        made.step([(request, 1, 3, 1)])
        made.step([(request, 1, 2, 2)])


@pytest.mark.slow
def test_ragged_batches_of_different_phases():
    random = np.random.default_rng(0)
    with cache(block=32, layers=LAYERS[1:]) as made:
        requests = [made.open(count, count) for count in (35, 11, 5)]
        while left := [each for each in requests if each.sequence.computed < len(each.sequence.tokens)]:
            work = []
            for index in random.permutation(len(left))[: random.integers(1, len(left) + 1)]:
                rest = len(left[index].sequence.tokens) - left[index].sequence.computed
                work.append((left[index], min(rest, int(random.choice([1, 1, 2, 3, 4, 5, 9, 17])))))
            made.step(work)


@pytest.mark.parametrize("block", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_either_backend_goes_on_where_the_other_stopped(block):
    from kvist_deepseek_v4.reference import ReferenceBackend

    with cache(block=block) as made:
        request = made.open(40, 4)
        for count, backend in ((14, ReferenceBackend), (7, TritonBackend), (9, ReferenceBackend), (2, TritonBackend)):
            made.backends = Backends(made.memory, made.adapter.needs, {"deepseek_v4": backend})
            made.adapter.bind(made.backends)
            made.step([(request, count)])


@pytest.mark.slow
@pytest.mark.parametrize(("programs", "scores"), [(1, 1), (1 << 20, 64)])
def test_rows_split_over_programs_and_scores_in_slices(programs, scores, monkeypatch):
    """One program for all rows of a query or one for some; few scores at a time, down to those of one tile."""
    monkeypatch.setattr(attend, "_PROGRAMS", programs)
    monkeypatch.setattr(kernels, "_SCORES", scores)
    with cache(block=32, layers=(1, 2)) as made:
        request = made.open(40, 5)
        made.step([(request, 20)])
        made.step([(request, 11)])
        made.step([(request, 1)])


@pytest.mark.parametrize("tile", [16, 1024])
def test_selection_bit_for_bit(tile, monkeypatch):
    """Few different scores, both zeros and minus infinity among them, so that ties decide; nothing, one and all rows
    visible; and what is not visible holds anything."""
    monkeypatch.setattr(select, "_TILE", tile)
    generator = torch.Generator().manual_seed(tile)
    scores = torch.randint(-2, 3, (7, 50), generator=generator).float() * torch.tensor([1.0, -1.0]).repeat(25)
    scores[1] = -torch.inf
    scores[2, 10:] = torch.nan
    scores[6] = torch.randn(50, generator=generator)
    positions = torch.tensor([199, 41, 39, 2, 3, 150, 199], dtype=torch.int32)
    for topk in (1, 3, 16, 64):
        wanted = plain_select(scores, (positions.long() + 1) // 4, topk)
        assert select.select(scores, positions, 4, topk).tolist() == wanted.tolist()


@pytest.mark.slow
def test_the_selected_scores_are_the_best_of_many():
    """A sort of 100,000 scores, thousands of which are equal."""
    scores = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)).mul(50).round() / 50
    positions = torch.tensor([399_999, 280_003], dtype=torch.int32)
    ids = select.select(scores, positions, 4, 512)
    for row, chosen, count in zip(scores, ids.long(), (100_000, 70_001)):
        assert bool((chosen[1:] > chosen[:-1]).all()) and int(chosen[-1]) < count
        assert torch.equal(row[chosen].sort().values, row[:count].sort().values[-512:])


@pytest.mark.slow
def test_the_same_again_gives_the_same_bits():
    results = []
    for _ in range(2):
        with cache(block=16, layers=(1, 2)) as made:
            request, parts = made.open(30, 6), []
            for count in (12, 9, 1):
                step, _ = made.commit([(request.sequence, count, 0)])
                parts += made.outputs(request, step)
                made.manager.complete(step)
            results.append(torch.cat(parts))
    assert torch.equal(*results)


@pytest.mark.slow
def test_the_whole_model():
    """Logits, in a chunk, a single token and drafts of which one stays."""
    prompt = tokens(24)
    wanted = model_logits(prompt)
    with cache(block=32, drafts=2) as made:
        sequence = made.manager.open(prompt[:19], reuse=False)
        [got] = made.logits([(sequence, prompt[:19], 0)])
        assert float((got - wanted[:19]).abs().max()) < 1e-4
        sequence.extend(prompt[19:20])
        [got] = made.logits([(sequence, [*prompt[19:21], 5], 2)], [2])
        assert float((got[:2] - wanted[19:21]).abs().max()) < 1e-4


def test_a_missing_page_is_named():
    with cache(block=16, layers=(0,)) as made:
        request = made.open(40)
        made.step([(request, 30)])
        plan = made.manager.plan([Run(request.sequence, 1)])
        step = plan.commit()
        group = next(group for group in made.layout.groups if group.sparse)
        table = step.tables[group.index].copy()
        table[step.slots[0], 1] = -1
        tables = tuple(table if index == group.index else each for index, each in enumerate(step.tables))
        with pytest.raises(StateError) as caught:
            made.backends.begin(attrs.evolve(step, tables=tables))
        assert str(caught.value) == f"step {step.id}: block 1 of row 0 is read and has no page in {group.name}"


def test_specs_that_are_refused():
    def refusal(spec) -> str:
        with pytest.raises(SpecError) as caught:
            TritonBackend.page_layout(spec)
        return str(caught.value)

    hint = "\nhint: use the backend 'deepseek-v4-reference'"
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 1, "compress_ratios": [0], "head_dim": 17}
    config["qk_rope_head_dim"] = 4
    odd = cache_spec(config, block_tokens=16)
    assert refusal(odd) == "backend 'deepseek-v4-triton': layer 0 has rows of 17 elements" + hint
    packed = tiny_spec(8, "fp8")
    assert refusal(packed) == "backend 'deepseek-v4-triton': 'kv' is stored as e4m3-ue8m0x64-bf16" + hint


@pytest.mark.slow
@pytest.mark.parametrize("clause", ["AB-02", "AB-11"])
def test_clauses_of_the_contract(clause, monkeypatch):
    """Those that other tests here say nothing of: `kvist conform deepseek-v4` tries all, which takes the interpreter
    the better part of an hour."""
    monkeypatch.setattr(attend, "_PROGRAMS", 1)
    assert run(conformance.TestTriton, clause) == []
