"""Faults that other implementations reported, by their number in the README's table, where no other test has them."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache

from kvist.manager import RestorePolicy
from kvist_deepseek_v4.config import read_config
from kvist_deepseek_v4.reference import ReferenceBackend
from kvist_deepseek_v4.selection import index_scores, select

EVERY = RestorePolicy(every_blocks=1)
HERE = Path(__file__).parent


def test_the_tests_that_the_readme_names_are_there():
    named = set(re.findall(r"`(test_\w+)`", (HERE.parent / "README.md").read_text(encoding="utf-8")))
    files = [*HERE.glob("*.py"), *(HERE.parents[2] / "core" / "src" / "kvist" / "testing").rglob("*.py")]
    there = set(re.findall(r"def (test_\w+)", "\n".join(path.read_text(encoding="utf-8") for path in files)))
    assert len(named) > 20 and named - there == set()


@pytest.mark.parametrize("drafts", [0, 2])
def test_7_every_boundary_that_is_kept_is_found(drafts):
    with Cache(block=32, blocks=64, drafts=drafts, restore=EVERY) as cache:
        request = cache.open(130, 1)
        cache.step([(request, 20)])
        while request.sequence.computed < 120:
            cache.step([(request, 1, drafts, drafts)] if drafts else [(request, 3)])
        cache.manager.close(request.sequence)
        found = [cache.manager.probe([*request.sequence.tokens[:end], 1, 1]) for end in (32, 64, 96)]
        assert found == [32, 64, 96]


@pytest.mark.parametrize("chunk", [7, 40, 150])
def test_11_what_is_kept_does_not_depend_on_chunks(chunk):
    with Cache(block=16, blocks=64, restore=RestorePolicy(every_blocks=2)) as cache:
        request = cache.open(150, 2)
        cache.finish(request, chunk)
        cache.manager.close(request.sequence)
        ends = (16, 32, 48, 64, 96, 127, 128, 144, 149, 150)
        found = [cache.manager.probe([*request.sequence.tokens[:end], 1, 1]) for end in ends]
        # Inside a block a ring is as the sequence left it, at its very end.
        assert found == [0, 32, 32, 64, 96, 96, 128, 144, 144, 150]


def test_24_the_selected_scores_are_the_best_of_many():
    """A sort of 100,000 scores, thousands of which are equal: any of those may be chosen, the scores may not differ."""
    scores = torch.randn(3, 100_000, generator=torch.Generator().manual_seed(0)).mul(50).round() / 50
    visible = torch.tensor([100_000, 70_001, 600])
    ids = select(scores, visible, 512)
    for row, ids_of_row, count in zip(scores, ids, visible.tolist()):
        assert len(set(ids_of_row.tolist())) == 512 and int(ids_of_row.min()) >= 0 and int(ids_of_row.max()) < count
        assert np.array_equal(np.sort(row[ids_of_row].numpy()), np.sort(row[:count].numpy())[-512:])


def test_25_nothing_behind_a_query_changes_it():
    with Cache(block=16, alone=True) as cache:
        outputs = []
        for changed in (None, 33):
            request = cache.open(48, 3)
            if changed is not None:
                request = attrs.evolve(request, states={id_: each.clone() for id_, each in request.states.items()})
                for each in request.states.values():
                    each[changed:] += 1
            step, _ = cache.commit([(request.sequence, 48, 0)])
            outputs.append(cache.outputs(request, step))
            cache.manager.complete(step)
        for one, other in zip(*outputs):
            assert torch.equal(one[:33], other[:33])
            assert not torch.allclose(one[33], other[33])


def test_29_a_multi_token_prediction_layer_is_no_copy_of_another():
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [128, 128, 0]}
    [layer] = read_config(config).mtp_layers
    assert (layer.ratio, layer.overlap, layer.indexed) == (0, False, False)


def test_35_two_ranks_with_half_of_the_heads_each():
    """Rows are the same on both; query heads and sinks are split, and so are outputs."""

    class Halved(ReferenceBackend):
        def forward(self, layer_id, inputs):
            halves = [
                super(Halved, self).forward(
                    layer_id, attrs.evolve(inputs, query=inputs.query[:, part], sinks=inputs.sinks[part])
                )
                for part in (slice(0, 2), slice(2, 4))
            ]
            return torch.cat(halves, dim=1)

    with Cache(block=16, backend=Halved) as cache:
        request = cache.open(60, 4)
        cache.finish(request, 60)


def test_scores_are_those_of_the_formula():
    """Head by head, in float64; what is negative counts nothing."""
    random = torch.Generator().manual_seed(1)
    query, weights, rows = (torch.randn(*shape, generator=random) for shape in ((5, 4, 8), (5, 4), (9, 8)))
    wanted = np.zeros((5, 9))
    for q in range(5):
        for w in range(9):
            for head in range(4):
                product = float(query[q, head].double() @ rows[w].double())
                wanted[q, w] += float(weights[q, head]) * max(product, 0.0)
    assert np.abs(index_scores(query, weights, rows).numpy() - wanted).max() < 1e-5
