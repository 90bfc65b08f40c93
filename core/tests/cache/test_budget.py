"""One budget for several managers: exact sums, costs from each model's own shape."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.budget import block_bytes, split_bytes
from kvist.errors import CapacityError, SpecError
from kvist.layout import Layout
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.values import make_spec


def model(heads: int, layers: int = 1) -> CacheSpec:
    """``2 * heads`` bytes per token and layer."""
    row = RowFormat((heads,), "uint8")
    return CacheSpec(
        tuple(Layer(n, (Stream("k", row, History()), Stream("v", row, History()))) for n in range(layers)), 16, "f"
    )


def test_both_models_hold_as_many_tokens() -> None:
    """Scenario 34 (a): 8 and 2 bytes per token."""
    target, draft = model(4), model(1)
    costs = [block_bytes(target), block_bytes(draft)]
    assert costs == [16 * 8, 16 * 2]
    assert split_bytes(1000, costs) == (800, 200)
    assert (800 // 8, 200 // 2) == (100, 100)


def test_the_drafts_cost_comes_from_its_own_shape() -> None:
    """Scenario 34 (b): a draft with twice the heads."""
    target, draft = split_bytes(1000, [block_bytes(model(4)), block_bytes(model(2))])
    assert (target, draft) == (667, 333)
    assert (target // 8, draft // 4) == (83, 83)


def test_ranks_that_split_the_least_plan_the_same() -> None:
    """Scenario 34 (c): ranks report different free memory; from the least of it every rank makes the same layouts."""
    reported = [1000 << 10, 900 << 10]
    specs = [model(64), model(16)]
    made = [
        [
            Layout.build(spec, share)
            for spec, share in zip(specs, split_bytes(min(reported), [block_bytes(spec) for spec in specs]))
        ]
        for _ in reported
    ]
    assert made[0] == made[1]
    assert sum(layout.arena_bytes for layout in made[0]) <= 900 << 10


def test_a_fixed_share_leaves_the_rest_to_the_others() -> None:
    """Scenario 34 (d): three groups, a fixed share for one; what is left over is reported, no group gets nothing."""
    spec = make_spec(4, History(), Window(6), State(), widths=(16, 4, 32))
    layout = Layout.build(spec, 11 * 512)
    window = layout.groups[1].name
    shared = layout.with_floors({window: 12})
    assert shared.shared_bytes + 3 * shared.slab_bytes + shared.slab_bytes == shared.arena_bytes <= 11 * 512
    with pytest.raises(CapacityError) as caught:
        layout.with_floors({window: 37})
    assert "no page is sure for target/History(), target/State()" in str(caught.value)


@pytest.mark.parametrize(
    ("total", "costs", "shares"),
    [
        (0, [8, 2], (0, 0)),
        (1000, [8, 0], (1000, 0)),
        (1000, [0, 8], (0, 1000)),
        (1000, [0, 0], (1000, 0)),
        (7, [5], (7,)),
        (10, [1, 1, 1], (4, 3, 3)),
        # More than a float can tell apart.
        (10**18 + 1, [2, 1], (666666666666666668, 333333333333333333)),
    ],
)
def test_shares_of_special_budgets(total: int, costs: list[int], shares: tuple[int, ...]) -> None:
    assert split_bytes(total, costs) == shares


def test_shares_always_sum_up() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        total, costs = int(rng.integers(0, 1 << 50)), rng.integers(0, 1 << 20, int(rng.integers(1, 6))).tolist()
        shares = split_bytes(total, costs)
        assert sum(shares) == total and min(shares) >= 0
        for share, cost in list(zip(shares, costs))[1:]:
            assert share * sum(costs) <= total * cost


@pytest.mark.parametrize(("total", "costs"), [(10, []), (-1, [1]), (10, [1, -1])])
def test_what_cannot_be_split_is_refused(total: int, costs: list[int]) -> None:
    with pytest.raises(SpecError) as caught:
        split_bytes(total, costs)
    assert str(caught.value) == (
        f"split_bytes({total}, {costs}) needs a budget and costs that are not negative, and at least one cost"
    )


def test_states_cost_nothing_per_token() -> None:
    streams = (Stream("k", RowFormat((8,), "uint8"), History(), tokens_per_row=4),)
    spec = CacheSpec((Layer(0, streams), Layer(1, (Stream("s", RowFormat((999,), "uint8"), State()),))), 16, "f")
    assert block_bytes(spec) == 4 * 8
