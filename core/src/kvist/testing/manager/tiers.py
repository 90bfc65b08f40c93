"""What goes down to the host's memory and to a disk comes up again, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import StateError
from kvist.manager import Run
from kvist.spec import Retention
from kvist.step import IntArray
from kvist.testing.bookkeeping import refused
from kvist.testing.follower import Follower
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

    @pytest.mark.clause("CM-31")
    @pytest.mark.parametrize("backoff_tokens", [0, 2])
    def test_what_is_promised_comes_up(self, backoff_tokens: int) -> None:
        def scenario(cache: Cache) -> None:
            # Prompts that end inside a block and at the end of one; others that part there, and before, and the same.
            cases = [
                (length, cut, more)
                for length in (2 * P, 3 * P - 1)
                for cut in (length, length - 1)
                for more in ((97, 98), ())
            ]
            for number, (length, _, _) in enumerate(cases):
                cache.cached(range(1000 * number, 1000 * number + length))
                cache.flush()
            for number, (length, _, _) in enumerate(cases):
                _leave_the_device(cache, range(1000 * number, 1000 * number + length))
            for number, (_, cut, more) in enumerate(cases):
                _is_kept(cache, tokens(range(1000 * number, 1000 * number + cut), *more))

        options: dict[str, Any] = {"backoff_tokens": backoff_tokens} if backoff_tokens else {}
        self.require(options)
        self._each_cache(scenario, device_pages=10, host_pages=60, **options)

    @pytest.mark.clause("CM-31")
    def test_what_grows_while_it_is_copied_goes_down(self) -> None:
        def scenario(cache: Cache) -> None:
            cache.cached(range(P))
            cache.poll()
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            _comes_back(cache, range(3 * P))

        self._each_cache(scenario, device_pages=12, host_pages=20)

    @pytest.mark.clause("CM-31")
    def test_whoever_goes_does_not_wait(self) -> None:
        def scenario(cache: Cache) -> None:
            manager = cache.manager
            for leave in (manager.suspend, lambda sequence: manager.truncate(sequence, P + 1)):
                cache.cached(range(3 * P))
                cache.flush()
                _leave_the_device(cache)
                sequence = manager.open(tokens(range(3 * P), 99))
                assert manager.load(sequence) and sequence.loading
                refused(StateError, partial(manager.plan, [Run(sequence, 1)]))
                leave(sequence)
                assert not sequence.loading, "a sequence that has left waits for what it was to load"
                if sequence.suspended:
                    manager.resume(sequence)
                again = sequence.loadable > sequence.computed and manager.load(sequence)
                first = next(iter(cache.copier.queued), None)
                if first is not None:
                    cache.copier.run(first)
                    cache.poll()
                assert sequence.loading == (again and bool(cache.copier.queued)), (
                    "what a sequence has given up has ended its next wait"
                )
                cache.flush()
                cache.compute(sequence)
                manager.close(sequence)
                cache.flush()

        self._each_cache(scenario, device_pages=16, host_pages=30)

    @pytest.mark.clause("CM-27")
    def test_nothing_is_known_below_a_cleared_cache(self, tmp_path: Path) -> None:
        def scenario(cache: Cache) -> None:
            manager, prompt = cache.manager, tokens(range(3 * P), 99)

            def nothing() -> None:
                cache.flush()
                sequence = manager.open(prompt)
                assert sequence.loadable == sequence.computed == 0, "what was cleared is found again"
                manager.close(sequence)

            # Kept below; on its way down; on its way up.
            cache.cached(range(3 * P))
            cache.flush()
            manager.clear()
            nothing()
            cache.cached(range(3 * P))
            cache.poll()
            manager.clear()
            nothing()
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            sequence = manager.open(prompt)
            assert manager.load(sequence)
            manager.clear()
            cache.flush()
            assert not sequence.loading and sequence.computed == 0, "what was cleared has come up"
            cache.compute(sequence)
            manager.close(sequence)
            nothing()

        for options in ({"host_pages": 20}, {"folder": tmp_path}):
            self._each_cache(scenario, device_pages=10, **options)

    @pytest.mark.clause("CM-28")
    def test_events_tell_of_every_tier(self, tmp_path: Path) -> None:
        def scenario(cache: Cache) -> None:
            follower = Follower(cache.manager)
            tiers = {tier.name for tier in cache.manager.stats().tiers}
            for number in range(4):
                cache.cached(range(1000 * number, 1000 * number + 3 * P))
                follower.follow()
                cache.flush()
                follower.follow()
            assert {tier for _, _, tier in follower.index} >= tiers, "events are silent about a tier below the device"
            _leave_the_device(cache)
            follower.follow()
            _is_kept(cache, tokens(range(3 * P), 97))
            follower.follow()
            cache.manager.clear()
            follower.follow()
            assert not follower.index, "entries are left after clear()"

        for options in ({"host_pages": 20}, {"folder": tmp_path}):
            self._each_cache(scenario, device_pages=10, **options)

    @pytest.mark.clause("CM-32")
    def test_pages_are_copied_once_they_are_written(self) -> None:
        def scenario(cache: Cache) -> None:
            manager = cache.manager
            parent = manager.open(tokens(range(2 * P + 2)))
            cache.compute(parent)
            # What the first one leaves behind is still to be copied to where it belongs.
            for _ in range(2):
                manager.close(manager.fork(parent))
            for _ in range(3):
                cache.poll()
                cache.copier.run()
            cache.check()
            parent.extend(tokens(50, 51))
            cache.compute(parent)
            manager.close(parent)
            cache.flush()
            _leave_the_device(cache, range(2 * P + 2))
            _is_kept(cache, tokens(range(2 * P + 2), 97))

        self._each_cache(scenario, device_pages=12, host_pages=30)

    @pytest.mark.clause("CM-32")
    @pytest.mark.parametrize("taken", [4, 7])
    def test_what_comes_up_spares_steps_in_flight(self, taken: int) -> None:
        def scenario(cache: Cache) -> None:
            manager = cache.manager
            cache.cached(range(3 * P))
            cache.flush()
            _leave_the_device(cache)
            cache.cached(range(5000, 5000 + P + 2))
            sequence = manager.open(tokens(range(5000, 5000 + P + 2), 50, 51))
            holders = [manager.open(tokens(range(7000 + 10 * n, 7000 + 10 * n + P)), reuse=False) for n in range(taken)]
            for holder in holders:
                if manager.plan([Run(holder, P)]).fits:
                    cache.compute(holder)
            plan = manager.plan([Run(sequence, 1)])
            if plan.fits:
                # It is to copy what it shares of a block, and states.
                step = plan.commit()
                other = manager.open(tokens(range(3 * P), 99))
                if manager.load(other):
                    cache.copier.run()
                cache.values.run(step, [sequence], {id(sequence): sequence.tokens})
                manager.complete(step)
                cache.flush()
                manager.close(other)
            for each in (sequence, *holders):
                manager.close(each)
            cache.flush()

        self._each_cache(scenario, device_pages=9, host_pages=30)

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
    def test_a_block_that_did_not_arrive(self, way: str, tmp_path: Path) -> None:
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
                promised = sequence.loadable
                cache.load(sequence)
                assert sequence.computed >= promised, f"{sequence.computed} of {promised} promised tokens have come up"
            assert not sequence.loading
            # Whatever it has now is right, and the rest is computed.
            cache.compute(sequence)
            manager.close(sequence)
            cache.flush()

        self._each_cache(scenario, device_pages=10, host_pages=20)
        self._each_cache(scenario, device_pages=10, folder=tmp_path)

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
            for name, kinds in self.streams().items()
            if all(kind.tokens_per_row == 1 and not kind.draft and kind.retention.ring < P for kind in kinds)
        }
        if not found:
            not_applicable("every mix has rows of several tokens, or a draft model")
        return found


def _scaled(options: dict[str, Any], groups: int) -> dict[str, Any]:
    return {name: value * groups if name.endswith("pages") else value for name, value in options.items()}


def _leave_the_device(cache: Cache, prompt: range = range(3 * P)) -> None:
    """Compute other prompts until this one is not there any more."""
    for number in range(101, 200):
        if not cache.manager.probe(tokens(prompt, 99)):
            return
        cache.cached(range(1000 * number, 1000 * number + 3 * P))
    raise AssertionError("what nobody has asked for in a long time is never evicted")


def _is_kept(cache: Cache, prompt: IntArray) -> None:
    """Open a prompt: what is promised from below is not all of it, arrives, and is right."""
    manager = cache.manager
    sequence = manager.open(prompt)
    promised = sequence.loadable
    assert promised < len(prompt), f"{promised} tokens are promised, and the last of {len(prompt)} is always computed"
    if promised > sequence.computed:
        cache.load(sequence)
        assert sequence.computed >= promised, f"{sequence.computed} of {promised} promised tokens have come up"
    cache.compute(sequence)
    manager.close(sequence)
    cache.flush()


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
