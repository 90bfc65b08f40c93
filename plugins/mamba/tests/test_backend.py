"""Recurrent layers over pages put out what transformers' layers do, however the tokens are cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
from mamba_drive import Drive

from kvist.restore import RestorePolicy
from kvist_mamba.tiny import CONFIGS

FAMILIES = sorted(CONFIGS)
#: One of each kind of mixer.
KINDS = ("mamba", "mamba2", "qwen3_next", "lfm2")


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(2, 97, count).astype(np.int32)


def cuts(count, seed):
    """``count`` tokens in chunks of 1 to 9, some shorter than a convolution."""
    random = np.random.default_rng(seed)
    while count:
        chunk = min(count, int(random.integers(1, 10)))
        yield chunk
        count -= chunk


@pytest.mark.parametrize("model_type", FAMILIES)
def test_any_cut_of_a_sequence_gives_the_whole(model_type):
    drive = Drive(model_type)
    for seed in range(3):
        request = drive.open(tokens(29, seed), reuse=False)
        for chunk in cuts(29, seed):
            drive.step([(request, chunk, 0)])
        drive.check(request)
        drive.manager.close(request.sequence)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ragged_batches_give_what_each_sequence_gives_alone(model_type):
    drive = Drive(model_type)
    requests = [drive.open(tokens(20 + 3 * seed, seed), prompt=9 + seed) for seed in range(4)]
    chunks = [list(cuts(len(request.tokens), seed)) for seed, request in enumerate(requests)]
    while any(chunks):
        drive.step([(request, left.pop(0), 0) for request, left in zip(requests, chunks) if left])
    for request in requests:
        drive.check(request)


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_rejected_drafts_leave_no_trace(model_type, drafts):
    """Every number of accepted tokens, batches of rows with and without drafts, steps without any in between."""
    drive = Drive(model_type)
    for accepted in range(1, drafts + 2):
        speculative, plain = drive.open(tokens(40, 1), prompt=5), drive.open(tokens(90, 2), prompt=5)
        drive.step([(speculative, 5, 0), (plain, 3, 0)])
        while speculative.sequence.computed + drafts < 36:
            drive.step([(speculative, 1, drafts), (plain, 1, 0)], [accepted, 1])
            drive.step([(speculative, 1, 0), (plain, 2, 0)])
        drive.check(speculative)
        drive.check(plain)
        drive.manager.close(speculative.sequence)
        drive.manager.close(plain.sequence)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sequences_resume_at_snapshots_and_leave_them_as_they_are(model_type):
    drive = Drive(model_type, restore=RestorePolicy(every_blocks=1))
    prompt = tokens(29, 3)
    first = drive.open(prompt)
    while first.sequence.computed < 29:
        end = first.sequence.next_end(29)
        drive.step([(first, end - first.sequence.computed, 0)])
    drive.check(first)
    drive.manager.close(first.sequence)
    for other in (prompt, np.concatenate([prompt[:20], tokens(12, 4)]), prompt):
        request = drive.open(other)
        reused = request.sequence.computed
        assert reused == (24 if other is prompt else 16)
        for chunk in (1, 2, len(other) - reused - 3):
            drive.step([(request, chunk, 0)])
        drive.check(request, first=reused)
        drive.manager.close(request.sequence)
    drive.manager.check()
