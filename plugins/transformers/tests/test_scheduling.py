"""Whom the scheduler runs, and whom it lets wait for a prefix."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvist.spec import Scope
from kvist_transformers import Request
from kvist_transformers.scheduling import Job, Scheduler


def job(arrival, tokens, computed=None, scope=None):
    request = Request(tokens, scope=scope or Scope())
    sequence = None if computed is None else SimpleNamespace(computed=computed, next_end=lambda limit: limit)
    return Job(arrival, request, 0, request.tokens, sequence=sequence)


LONG = list(range(1, 33))


@pytest.mark.parametrize(
    ("computed", "tokens", "held"),
    [
        (0, LONG, True),
        (0, [*LONG[:9], 90], True),
        # Eight tokens more are shared, but the last token of a prompt is always computed.
        (0, LONG[:8], False),
        (0, LONG[:9], True),
        (0, [*LONG[:7], 90, 91], False),
        (16, [*LONG[:23], 90, 91], False),
        (16, [*LONG[:24], 90, 91], True),
        # Nothing that a whole block is left of.
        (25, [*LONG, 90], False),
    ],
)
def test_waiting_for_a_prefix(computed, tokens, held):
    scheduler = Scheduler(8)
    scheduler.prefill.append(job(0, LONG, computed))
    assert scheduler.held_back(job(1, tokens)) is held


def test_only_older_requests_of_the_same_scope_are_waited_for():
    scheduler = Scheduler(8)
    scheduler.prefill.append(job(5, LONG, 0))
    assert scheduler.held_back(job(6, LONG))
    assert not scheduler.held_back(job(4, LONG))
    assert not scheduler.held_back(job(6, LONG, scope=Scope(salt="other")))


def test_chunks_share_the_budget_in_order_of_arrival():
    scheduler = Scheduler(8)
    scheduler.decode += [job(0, [1], 1), job(1, [1], 1)]
    jobs = [job(2, LONG, 30), job(3, LONG, 0), job(4, LONG, 0)]
    scheduler.prefill += jobs
    assert scheduler.runs(40) == [(jobs[0], 2), (jobs[1], 32), (jobs[2], 4)]
    assert scheduler.runs(10) == [(jobs[0], 2), (jobs[1], 6)]
    assert scheduler.runs(2) == []
    assert scheduler.youngest() is jobs[2]


def test_a_paused_job_waits_in_its_old_place():
    scheduler = Scheduler(8)
    first, second, third, fourth = (job(arrival, [1]) for arrival in range(4))
    scheduler.waiting += [first, third]
    scheduler.requeue(second)
    scheduler.requeue(fourth)
    assert list(scheduler.waiting) == [first, second, third, fourth]
    scheduler.crowded = True
    assert scheduler.candidates() == [first, second, third, fourth]
    scheduler.decode.append(job(9, np.array([1]), 1))
    assert scheduler.candidates() == []
