"""Hybrid models driven by hand: drafts, suspension, tiers, forks. Every logit is transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
from hybrid_drive import ModelDrive, room
from hybrid_models import FAMILIES, SOME, tokens

from kvist.restore import RestorePolicy


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rejected_drafts_leave_no_trace(model_type):
    """Each number of accepted tokens from none of the drafts to all, beside rows with and without drafts."""
    with ModelDrive(model_type) as drive:
        one, other = drive.open(tokens(60, 1), prompt=9), drive.open(tokens(60, 2), prompt=9)
        drive.step([(one, 9, 0), (other, 5, 0)])
        for accepted in (1, 3, 4, 2, 1, 4):
            drive.step([(one, 1, 3), (other, 2, 0)], [accepted, 2])
            drive.step([(one, 1, 0), (other, 1, 2)], [1, 1 + accepted % 3])
        assert one.sequence.computed == 9 + 15 + 6
        drive.manager.check()


@pytest.mark.parametrize("model_type", SOME)
def test_suspended_sequences_resume_at_a_restore_point(model_type):
    """Somebody else writes to their pages meanwhile."""
    with ModelDrive(model_type, restore=RestorePolicy(every_blocks=2)) as drive:
        first = drive.open(tokens(60, 1), prompt=30)
        drive.compute(first, 30)
        drive.compute(first, 37, chunk=1)
        drive.manager.suspend(first.sequence)
        second = drive.open(tokens(30, 2))
        drive.compute(second, 30)
        # States are kept where a sequence was suspended.
        assert drive.manager.resume(first.sequence) == 37
        drive.compute(first, 50, chunk=5)
        drive.manager.suspend(first.sequence)
        drive.manager.clear()
        assert drive.manager.resume(first.sequence) == 0
        drive.compute(first, 60)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_suspended_sequences_come_back_from_the_host(model_type):
    """Others need the whole device meanwhile."""
    with ModelDrive(model_type, memory_bytes=room(model_type, 80, 3), host=True) as drive:
        first = drive.open(tokens(60, 1), prompt=30)
        drive.compute(first, 30)
        drive.compute(first, 37, chunk=1)
        drive.manager.suspend(first.sequence)
        drive.settle()
        others = []
        while drive.manager.probe(first.tokens[:38]):
            others.append(drive.open(tokens(30, 10 + len(others))))
            drive.compute(others[-1], 30)
            drive.manager.close(others[-1].sequence)
            assert len(others) < 50
        assert others and drive.manager.resume(first.sequence) == 0
        drive.settle()
        assert first.sequence.loadable == 37
        assert drive.manager.load(first.sequence)
        drive.settle()
        assert first.sequence.computed == 37
        drive.compute(first, 60)


@pytest.mark.parametrize("model_type", SOME)
def test_forks_go_their_own_ways(model_type):
    with ModelDrive(model_type) as drive:
        base = tokens(40, 1)
        one = drive.open(base, prompt=21)
        drive.compute(one, 21)
        fork = drive.manager.fork(one.sequence)
        other = type(one)(fork, np.concatenate([base[:21], tokens(19, 2)]))
        drive.step([(one, 3, 0), (other, 1, 2)], [3, 2])
        while one.sequence.computed < 40:
            drive.step([(one, 1, 0), (other, 1, 0)])
        drive.manager.check()
