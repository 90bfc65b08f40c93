"""The suite for cache managers passes Kvist's own, and names the clause of what is wrong with others."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
from kit.mutants import further, specs
from kit.mutants.base import find
from kit.mutants.managers import MUTANTS
from kit.mutants.planted import listed, names, planted

from kvist import claim
from kvist.manager import PagedCacheManager
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream, Window
from kvist.testing.builtin import TestPagedCacheManager
from kvist.testing.manager import CacheManagerTests
from kvist.testing.mixes import MIXES, Chunk, Kind
from kvist.testing.suites import run

__all__ = ["TestPagedCacheManager"]


def each_mutant():
    """Those of test_spec_kit.py left out; the first one of each clause in the quick set."""
    seen = set()
    for mutant in MUTANTS[len(specs.MUTANTS) :]:
        marks = [pytest.mark.slow] if mutant.clause in seen else []
        seen.add(mutant.clause)
        yield pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.parametrize("mutant", list(each_mutant()))
def test_a_mutant_is_found_by_its_clause(mutant) -> None:
    failures = find("managers", mutant)
    assert failures
    assert f"\n{mutant.clause} " in str(failures[0]) and "\nchange: " in str(failures[0])
    assert isinstance(failures[0].error, AssertionError), failures


def test_a_manager_for_one_family_names_what_it_serves() -> None:
    """Few options, one mix, and a spec of its own."""

    class Plain(CacheManagerTests):
        options = ()
        seeds, examples = 3, 3
        asked: ClassVar[set[tuple[str, ...]]] = set()

        def manager(self, layout, **options):
            self.asked.add(tuple(options))
            return PagedCacheManager(layout)

        def mixes(self):
            return {"mine": (Kind(Window(5)), Kind(History(), width=2))}

        def spec(self):
            rows = [Stream(name, RowFormat((2, 8), "bfloat16"), History()) for name in ("k", "v")]
            return CacheSpec([Layer(0, rows), Layer(3, rows)], 4, "mine", vocab_size=300, max_tokens=500)

    assert run(Plain) == []
    assert Plain.asked == {()}
    assert {name for name, _ in Plain().layouts(4)} == {"mine", "spec()"}
    for test, why in (
        (Plain().test_every_group_travels_to_the_host_and_back, "not applicable: the manager does not take tiers"),
        (Plain().test_states_begin_with_zeros, "not applicable: no mix has states"),
    ):
        with pytest.raises(pytest.skip.Exception) as caught:
            test()
        assert str(caught.value) == why


class Alone(CacheManagerTests):
    """A spec and no mixes; pages of one group are 128 times as large as the other's."""

    seeds, examples = 2, 1
    small: ClassVar[History | Window] = History()
    large: ClassVar[State | Window | History] = State()

    def manager(self, layout, **options):
        return PagedCacheManager(layout, **options)

    def mixes(self):
        return {}

    def spec(self):
        rows = tuple(Stream(name, RowFormat((1, 8), "bfloat16"), self.small) for name in ("k", "v"))
        row = RowFormat((64, 64) if self.large.exact else (16, 64), "float32")
        return CacheSpec([Layer(0, rows), Layer(1, (Stream("large", row, self.large),))], 4, "mine", max_tokens=500)


@pytest.mark.parametrize(("small", "large"), [(History(), State()), (Window(6), History()), (History(), Window(6))])
def test_a_spec_alone_is_enough_however_unequal_its_pages(small, large) -> None:
    kit = type("Kit", (Alone,), {"small": small, "large": large})()
    sizes = [group.page_bytes for group in next(kit.layouts(1))[1].groups]
    assert max(sizes) == 128 * min(sizes)
    assert {name: {kind.retention for kind in kinds} for name, kinds in kit.streams().items()} == {
        "spec()": {small, large}
    }
    kit.test_anything_in_any_order()
    kit.test_anything_in_any_order_in_its_shortest_form()
    kit.test_what_somebody_holds_is_never_evicted()
    kit.test_nobody_finds_what_is_still_on_its_way()


@attrs.frozen
class ChunkRing(Chunk):
    """A plugin's own retention whose pages keep the last rows of their block only."""

    kept: int

    @property
    def ring(self) -> int:
        return self.kept

    @property
    def most_drafts(self) -> int | None:
        return self.kept - self.tokens


class RingKit(CacheManagerTests):
    seeds, examples = 6, 6
    mix: ClassVar[tuple[Kind, ...]] = (Kind(ChunkRing(3, kept=5)), Kind(History(), width=3))

    def manager(self, layout, **options):
        return PagedCacheManager(layout, **options)

    def mixes(self):
        return {"own ring": self.mix}


def test_a_ring_of_a_plugin_s_own_is_served() -> None:
    """The kit asks the retention for its ring, and reads() for what a query needs of it."""
    assert run(RingKit) == []


def test_a_ring_that_is_too_short_is_found() -> None:
    """Chunks of four tokens, of which pages have the last two rows; and more drafts than there is room for."""

    @attrs.frozen
    class Short(ChunkRing):
        @property
        def most_drafts(self) -> int | None:
            return 2

    for short, clause, why in (
        (Short(4, kept=2), "CM-07", "has lost position"),
        (Short(2, kept=2), "CM-20", "has lost position"),
    ):
        failures = run(type("Kit", (RingKit,), {"mix": (Kind(short),)}), clause, first=True)
        assert failures and why in str(failures[0])


def test_without_mixes_and_without_a_spec_nothing_is_tried() -> None:
    class Nothing(Alone):
        def spec(self):
            return None

    with pytest.raises(
        AssertionError, match=r"^Nothing: mixes\(\) names none and spec\(\) is None: nothing can be tried"
    ):
        Nothing().test_anything_in_any_order()


def test_a_fault_lasts_as_long_as_it_is_planted() -> None:
    before = claim.Claims.claim
    with listed("claim: no hold"):
        assert claim.Claims.claim is not before
    assert claim.Claims.claim is before
    for old, why in (
        ("no such text", "the text 'no such text' occurs 0 times in claim.py, not once"),
        ("from kvist.sequence import Sequence, Sources", "line 12 is in no function"),
    ):
        with pytest.raises(LookupError) as caught, planted("claim.py", old, ""):
            pass
        assert str(caught.value) == why


def test_the_benchmark_tries_faults_that_are_there() -> None:
    tried = [mutant.name for mutant in further.MUTANTS]
    assert len(set(tried)) == len(tried) > 50
    assert {*tried, *further.NO_MANAGER_S} <= {*names()}
    assert not {*tried} & {mutant.name for mutant in MUTANTS}
    assert set(further.untried()) <= {*names()} - {*tried}


def test_mixes_have_every_kind_of_retention() -> None:
    kinds = [kind for mix in MIXES.values() for kind in mix]
    assert {type(kind.retention).__name__ for kind in kinds} == {"History", "Window", "State", "Checkpoint", "Chunk"}
    assert any(kind.draft for kind in kinds) and any(kind.tokens_per_row > 1 for kind in kinds)
    assert any(kind.retention.ring for kind in kinds)
