"""What goes down to the host's memory and to a disk comes up again, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvist.spec import Retention
from kvist.testing.manager.author import ManagerAuthor
from kvist.testing.outcomes import not_applicable
from kvist.testing.tier_values import Cache, P
from kvist.testing.values import tokens


class TierTests(ManagerAuthor):
    """With tiers below the device, whose copies run when the tests say so."""

    @pytest.mark.clause("CM-31")
    def test_every_group_travels_to_the_host_and_back(self) -> None:
        def scenario(cache: Cache) -> None:
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            _comes_back(cache, range(3 * P))

        self._each_cache(scenario, device_pages=10, host_pages=20)

    @pytest.mark.clause("CM-31")
    def test_every_group_travels_to_the_disk_and_back(self, tmp_path: Path) -> None:
        def scenario(cache: Cache) -> None:
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            _comes_back(cache, range(3 * P))

        self._each_cache(scenario, device_pages=10, folder=tmp_path)

    @pytest.mark.clause("CM-31")
    def test_a_suspended_sequence_comes_back_from_below(self) -> None:
        def scenario(cache: Cache) -> None:
            manager = cache.manager
            sequence = manager.open(tokens(range(3 * P)))
            cache.compute(sequence)
            manager.suspend(sequence)
            cache.flush()
            _leave_the_device(cache)
            sequence.extend(tokens(range(50, 53)))
            assert manager.resume(sequence) == 0
            assert sequence.loadable == 3 * P, f"{sequence.loadable} of {3 * P} suspended tokens are in the tier below"
            cache.load(sequence)
            assert sequence.computed == 3 * P
            cache.compute(sequence)
            manager.close(sequence)
            cache.flush()

        self._each_cache(scenario, device_pages=10, host_pages=20)

    @pytest.mark.clause("CM-32")
    def test_what_did_not_arrive_is_computed(self) -> None:
        def scenario(cache: Cache) -> None:
            manager = cache.manager
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            sequence = manager.open(tokens(range(3 * P), 99))
            assert manager.load(sequence), "nothing to load"
            for ticket in list(cache.copier.queued):
                cache.copier.fail(ticket)
            cache.poll()
            assert not sequence.loading, "a copy failed, and the sequence waits for ever"
            assert sequence.computed == 0, f"{sequence.computed} tokens count as computed, and none has arrived"
            cache.compute(sequence)
            manager.close(sequence)
            cache.flush()

        self._each_cache(scenario, device_pages=10, host_pages=20)

    @pytest.mark.clause("CM-32")
    def test_what_was_not_stored_is_not_promised(self) -> None:
        def scenario(cache: Cache) -> None:
            cache.cached(range(3 * P))
            for _ in range(100):
                cache.poll()
                if not cache.copier.queued:
                    break
                for ticket in list(cache.copier.queued):
                    cache.copier.fail(ticket)
            _leave_the_device(cache)
            sequence = cache.manager.open(tokens(range(3 * P), 99))
            assert sequence.loadable == sequence.computed, "blocks that never arrived below are promised"
            cache.compute(sequence)
            cache.manager.close(sequence)

        self._each_cache(scenario, device_pages=10, host_pages=20)

    @pytest.mark.clause("CM-32")
    @pytest.mark.parametrize("way", ["down", "up"])
    def test_a_block_that_did_not_arrive(self, way: str) -> None:
        def fail_in_the_middle(cache: Cache) -> None:
            for _ in range(100):
                cache.poll()
                if not cache.copier.queued:
                    return
                for ticket, copy in list(cache.copier.queued.items()):
                    cache.copier.fail(ticket, copy.block_count // 2)

        def scenario(cache: Cache) -> None:
            manager = cache.manager
            cache.cached(range(3 * P))
            (fail_in_the_middle if way == "down" else Cache.flush)(cache)
            _leave_the_device(cache)
            sequence = manager.open(tokens(range(3 * P), 99))
            if way == "up":
                manager.load(sequence)
                fail_in_the_middle(cache)
            elif sequence.loadable > sequence.computed:
                cache.load(sequence)
            assert not sequence.loading
            # Whatever it has now is right, and the rest is computed.
            cache.compute(sequence)
            manager.close(sequence)
            cache.flush()

        self._each_cache(scenario, device_pages=10, host_pages=20)

    @pytest.mark.clause("CM-32")
    def test_nobody_finds_what_is_still_on_its_way(self) -> None:
        def scenario(cache: Cache) -> None:
            manager = cache.manager
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            first = manager.open(tokens(range(3 * P), 99))
            assert manager.load(first)
            found = manager.probe(tokens(range(3 * P), 98))
            assert found == 0, f"{found} tokens are found before their content has come up"
            other = manager.open(tokens(range(3 * P), 97))
            cache.compute(other)
            cache.copier.run()
            cache.poll()
            cache.compute(first)
            for sequence in (first, other):
                manager.close(sequence)
            cache.flush()

        self._each_cache(scenario, device_pages=12, host_pages=20)

    def _each_cache(self, scenario: Callable[[Cache], None], *, folder: Path | None = None, **options: Any) -> None:
        self.require(["tiers"])
        for name, retentions in self._plain_mixes().items():
            below = None if folder is None else folder / name.replace(" ", "-")
            cache = Cache(*retentions, factory=self.manager, folder=below, **_scaled(options, len(retentions)))
            try:
                scenario(cache)
            except Exception as error:
                raise AssertionError(f"mix {name!r}: {type(error).__name__}: {error}") from error
            finally:
                cache.copier.close()
                if cache.disk is not None:
                    cache.disk.close()

    def _plain_mixes(self) -> dict[str, tuple[Retention, ...]]:
        """Mixes whose rows are of one token and of one model."""
        found = {
            name: tuple(kind.retention for kind in kinds)
            for name, kinds in self.mixes().items()
            if all(kind.tokens_per_row == 1 and not kind.draft and kind.retention.ring < P for kind in kinds)
        }
        if not found:
            not_applicable("every mix has rows of several tokens, or a draft model")
        return found


def _scaled(options: dict[str, Any], groups: int) -> dict[str, Any]:
    return {name: value * groups if name.endswith("pages") else value for name, value in options.items()}


def _leave_the_device(cache: Cache) -> None:
    """Compute other prompts until ``range(3 * P)`` is not there any more."""
    for number in range(1, 100):
        if not cache.manager.probe(tokens(range(3 * P), 99)):
            return
        cache.cached(range(1000 * number, 1000 * number + 3 * P))
    raise AssertionError("what nobody has asked for in a long time is never evicted")


def _comes_back(cache: Cache, prompt: range) -> None:
    """Open the prompt again: everything is promised from below, arrives, and is right."""
    manager = cache.manager
    sequence = manager.open(tokens(prompt, 99))
    whole = len(prompt) // P * P
    assert sequence.computed == 0
    assert sequence.loadable == whole, f"{sequence.loadable} of {whole} tokens are promised from the tier below"
    cache.load(sequence)
    assert sequence.computed == whole, f"{sequence.computed} of {whole} promised tokens have come up"
    cache.compute(sequence)
    manager.close(sequence)
    cache.flush()
