"""What has gone wrong in caches of recurrent models, each as the smallest case that shows it: see docs/bugs.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mamba_drive import Drive

from kvist.errors import CapacityError
from kvist.manager import Run
from kvist.restore import RestorePolicy

BLOCK = 8
HYBRIDS = ("bamba", "qwen3_next", "jamba", "lfm2")


def tokens(*parts):
    """``(seed, count)`` each."""
    return np.concatenate([np.random.default_rng(seed).integers(2, 97, count) for seed, count in parts]).astype(
        np.int32
    )


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_block_is_no_hit_before_a_state_was_taken_at_its_end(model_type):
    """Chunks of 5 and 7: no step ended at 8, where the block of keys and values is full."""
    drive = Drive(model_type, restore=RestorePolicy(every_blocks=1))
    first = drive.open(tokens((1, 12)))
    drive.step([(first, 5, 0)])
    drive.step([(first, 7, 0)])
    other = drive.open(tokens((1, 8), (2, 6)))
    assert other.sequence.computed == 0
    drive.prefill(other)
    drive.check(other)
    third = drive.open(tokens((1, 8), (3, 6)))
    assert third.sequence.computed == 8, "the second one ended a chunk there"
    drive.prefill(third)
    drive.check(third, first=8)


@pytest.mark.parametrize(("backoff", "reused"), [(0, 32), (1, 24), (8, 24), (9, 16)])
def test_what_drafts_must_compute_again_is_dropped_before_the_state_is_chosen(backoff, reused):
    """Keys and values of four blocks are known, states at the end of each; all groups resume at the same place."""
    drive = Drive("bamba", restore=RestorePolicy(every_blocks=1), backoff_tokens=backoff)
    first = drive.open(tokens((1, 33)))
    drive.prefill(first)
    drive.manager.close(first.sequence)
    second = drive.open(tokens((1, 32), (2, 10)))
    assert second.sequence.computed == reused
    drive.prefill(second)
    drive.check(second, first=reused)


@pytest.mark.parametrize("model_type", HYBRIDS)
@pytest.mark.parametrize("rollback", ["snapshots", "replay"])
def test_accepted_drafts_that_end_with_a_block(model_type, rollback):
    """The state after the block is the one that goes on, and the next row has no drafts, or other ones."""
    drive = Drive(model_type, rollback=rollback, restore=RestorePolicy(every_blocks=1))
    request = drive.open(tokens((1, 60)), prompt=5)
    drive.step([(request, 5, 0)])
    for drafts, accepted in ((4, 3), (0, 1), (5, 6), (3, 1), (6, 7), (1, 1)):
        drive.step([(request, 1, drafts)], [accepted])
        drive.tell(request)
    assert request.sequence.computed == 24
    drive.check(request)
    drive.manager.close(request.sequence)
    again = drive.open(tokens((1, 60)), prompt=40)
    assert again.sequence.computed == 24
    drive.prefill(again)
    drive.check(again, first=24)


def test_misses_for_want_of_a_state_are_counted():
    """36 tokens of keys and values are there, 32 in whole blocks; the state of nobody at their ends."""
    drive = Drive("bamba")
    first = drive.open(tokens((1, 36), (2, 20)))
    drive.prefill(first)
    drive.manager.close(first.sequence)
    second = drive.open(tokens((1, 36), (3, 20)))
    assert second.sequence.computed == 0
    drive.prefill(second)
    groups = drive.manager.stats().groups
    assert {group.exact: stats.lost_tokens for group, stats in zip(drive.memory.layout.groups, groups)} == {
        True: 36,
        False: 0,
    }
    # It left a state where it branched off.
    assert drive.open(tokens((1, 36), (4, 20))).sequence.computed == 32


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_states_of_prompts_computed_side_by_side_are_those_of_each_alone(model_type):
    """First lengths that end in no chunk of a kernel, a decoding row between them; then others resume from all."""
    drive = Drive(model_type, restore=RestorePolicy(every_blocks=1))
    decoding = drive.open(tokens((9, 40)), prompt=3)
    drive.step([(decoding, 3, 0)])
    requests = [drive.open(tokens((seed, count))) for seed, count in ((1, 21), (2, 35), (3, 17))]
    while any(request.sequence.computed < request.sequence.known for request in requests):
        runs = [(decoding, 1, 0)]
        for request in requests:
            sequence = request.sequence
            if sequence.computed < sequence.known:
                end = sequence.next_end(min(sequence.known, sequence.computed + 11))
                runs.append((request, end - sequence.computed, 0))
        drive.step(runs)
    for seed, count, reused in ((1, 21, 16), (2, 35, 32), (3, 17, 16)):
        other = drive.open(tokens((seed, count - 1), (7, 9)))
        assert other.sequence.computed == reused
        drive.prefill(other)
        drive.check(other, first=reused)
    drive.check(decoding)


def test_a_batch_that_needs_more_states_than_there_are_is_refused_before_it_runs():
    """With a page per draft, eleven rows of seven tokens need 88 pages."""
    drive = Drive("mamba2", memory_bytes=1 << 20)
    pages = drive.manager.stats().groups[drive.group].capacity
    assert 24 < pages < 88
    requests = [drive.open(tokens((seed, 30)), prompt=5) for seed in range(11)]
    drive.step([(request, 5, 0) for request in requests])
    before = [drive.state(request) for request in requests]
    plan = drive.manager.plan([Run(request.sequence, 1, 6) for request in requests])
    assert not plan.fits
    with pytest.raises(CapacityError) as error:
        plan.commit()
    assert str(error.value) == (
        f"the plan does not fit: target/State() needs 77 pages and can get {pages - 11}\n"
        "hint: plan fewer tokens, or close a sequence first"
    )
    assert all(torch.equal(drive.state(request), state) for request, state in zip(requests, before))
    for request in requests:
        drive.step([(request, 1, 0)])
        drive.check(request)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_snapshots_do_not_change_while_their_sequence_goes_on(model_type):
    drive = Drive(model_type, restore=RestorePolicy(every_blocks=1))
    first = drive.open(tokens((1, 60)), prompt=17)
    drive.prefill(first)
    for _ in range(3):
        drive.step([(first, 9, 0)])
        other = drive.open(tokens((1, 16), (2, 9)))
        assert other.sequence.computed == 16
        drive.step([(other, 2, 0)])
        drive.step([(other, 7, 0)])
        drive.check(other, first=16)
        drive.manager.close(other.sequence)
    drive.check(first)


def test_states_are_few_beside_the_blocks_of_a_conversation():
    """Twenty turns of 40 tokens in blocks of 8: a hundred blocks, and two states for each turn at most."""
    drive = Drive("bamba", memory_bytes=4 << 20)
    parts = []
    for turn in range(20):
        parts.append((turn, 40))
        request = drive.open(tokens(*parts))
        assert request.sequence.computed == 40 * turn
        drive.prefill(request)
        drive.manager.close(request.sequence)
    cached = {group.exact: each.cached for group, each in zip(drive.memory.layout.groups, drive.manager.stats().groups)}
    assert cached[False] == 100 and 20 <= cached[True] <= 40


def test_the_table_of_bugs_names_tests_that_are_there():
    tests = Path(__file__).parent
    rows = (tests.parent / "docs" / "bugs.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.startswith("| E")]
    assert [row.split("|")[1].strip() for row in rows] == [f"E{number}" for number in range(1, 21)]
    named = [name for row in rows for name in re.findall(r"(\w+\.py)::(\w+)", row)]
    assert len(named) > 15
    for file, name in named:
        assert f"\ndef {name}(" in (tests / file).read_text(encoding="utf-8"), f"{file} has no {name}"
