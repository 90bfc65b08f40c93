"""Drafts taken back by computing inputs once more: one page, the same values, and nobody tells the backend a thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mamba_drive import Drive, Request

from kvist.attention.base import BackendContext
from kvist.errors import RequestError, SpecError, StateError
from kvist.layout import Layout
from kvist.manager import Run
from kvist.memory.device import DeviceMemory
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, Heads, Layer, RowFormat, Sections, State, Stream
from kvist_mamba import cache_spec
from kvist_mamba.backend import ReferenceBackend
from kvist_mamba.geometry import recurrent_layers
from kvist_mamba.inputs import STREAMS
from kvist_mamba.reference import turn
from kvist_mamba.reference.replay import Turn
from kvist_mamba.retention import Replay

#: One of each kind of mixer, and one with attention in the same layer.
KINDS = ("mamba", "mamba2", "qwen3_next", "lfm2", "falcon_h1")


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(2, 97, count).astype(np.int32)


def replaying(model_type, history_tokens=16, **options):
    return Drive(model_type, rollback="replay", history_tokens=history_tokens, **options)


def behind(drive, request):
    """Tokens that a sequence is ahead of the checkpoint, the same in every layer."""
    found = {int(drive.memory.view(layer, "checkpoint", (1,), torch.int64)[request.page]) for layer in drive.mixers}
    assert len(found) == 1
    return request.sequence.computed - found.pop()


def test_the_books_of_three_rows():
    """History of 16, steps of 5: 11 and 5 fit, 12 and 5 do not, and a row that is nobody's changes nothing."""
    drive = replaying("mamba2")
    requests = [drive.open(tokens(60, seed), prompt=5) for seed in range(3)]
    drive.step([(request, 5, 0) for request in requests])
    assert [behind(drive, request) for request in requests] == [0, 0, 0]
    drive.step([(request, 1, 4) for request in requests], [5, 5, 5])
    drive.step([(request, 1, 4) for request in requests], [5, 5, 5])
    drive.step([(request, 1, 4) for request in requests], [1, 2, 3])
    assert [behind(drive, request) for request in requests] == [11, 12, 13]
    drive.step([(request, 1, 4) for request in requests[:2]], [2, 3], padding=(5,))
    assert [behind(drive, request) for request in requests] == [13, 3, 13]
    for request in requests:
        drive.check(request)


@pytest.mark.parametrize(
    ("position", "start", "count", "drafts", "expected"),
    [
        (0, 0, 7, 0, Turn(0, 7)),  # a prompt
        (7, 7, 5, 4, Turn(0, 0)),  # its first drafts
        (7, 18, 5, 4, Turn(11, 0)),
        (7, 19, 5, 4, Turn(12, 12)),
        (7, 19, 4, 3, Turn(12, 0)),
        (7, 19, 1, 0, Turn(12, 13)),  # without drafts
        (7, 23, 16, 15, Turn(16, 16)),
        (7, 23, 20, 16, Turn(16, 20)),  # longer than the history: four are sure to stay
        (7, 7, 20, 16, Turn(0, 4)),
    ],
)
def test_where_checkpoints_move(position, start, count, drafts, expected):
    assert turn(position, start, count, drafts, room=16) == expected


@pytest.mark.parametrize(("position", "start"), [(8, 7), (0, 17)])
def test_a_page_of_another_position_is_refused(position, start):
    with pytest.raises(StateError) as error:
        turn(position, start, 1, 0, room=16)
    assert str(error.value) == (
        f"a row that begins at position {start} has a state whose checkpoint is at {position}, with a history of 16 "
        "tokens"
    )


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize(("drafts", "history"), [(1, 1), (3, 4), (6, 16)])
def test_rejected_drafts_leave_no_trace(model_type, drafts, history):
    """Every number of accepted tokens, none too; rows without drafts beside and in between; histories that are full at
    once and ones that are never full."""
    drive = replaying(model_type, history)
    for accepted in range(drafts + 2):
        if drafts + 1 - accepted > history:
            continue
        speculative, plain = drive.open(tokens(80, 1), prompt=5), drive.open(tokens(90, 2), prompt=5)
        drive.step([(speculative, 5, 0), (plain, 3, 0)])
        for _ in range(3):
            drive.step([(speculative, 1, drafts), (plain, 1, 0)], [accepted, 1])
            drive.step([(speculative, 1, drafts), (plain, 2, 0)], [accepted, 2])
            drive.step([(speculative, 1, 0), (plain, 2, 0)])
        drive.check(speculative)
        drive.check(plain)
        drive.manager.close(speculative.sequence)
        drive.manager.close(plain.sequence)


@pytest.mark.parametrize("model_type", KINDS)
def test_any_steps_give_what_snapshots_give(model_type):
    """Random steps of both caches: the same values, and a page where the other has one for each query token."""
    random = np.random.default_rng(7)
    drives = (replaying(model_type, 8), Drive(model_type))
    pairs = [[drive.open(tokens(150, seed), prompt=4) for seed in range(3)] for drive in drives]
    most = [0, 0]
    for _ in range(25):
        shapes = [
            (int(random.integers(1, 6)), int(random.integers(0, 8)) if random.integers(2) else 0) for _ in range(3)
        ]
        kept = [new + int(random.integers(0, drafts + 1)) if drafts else new for new, drafts in shapes]
        for number, (drive, requests) in enumerate(zip(drives, pairs)):
            drive.step([(request, *shape) for request, shape in zip(requests, shapes)], kept)
            most[number] = max(most[number], drive.manager.stats().groups[drive.group].held)
        if min(150 - request.sequence.computed for request in pairs[0]) < 16:
            break
    for drive, requests in zip(drives, pairs):
        for request in requests:
            drive.check(request)
    assert most[0] == 3 < most[1]


@pytest.mark.parametrize("model_type", KINDS)
def test_snapshots_take_the_history_along(model_type):
    """A sequence that ends with a half full history is found, resumed by two, and stays as it is."""
    drive = replaying(model_type, restore=RestorePolicy(every_blocks=1))
    text = tokens(40, 3)
    first = drive.open(text, prompt=9)
    drive.step([(first, 8, 0)])
    drive.step([(first, 1, 4)], [3])
    drive.step([(first, 1, 4)], [2])
    assert behind(drive, first) == 5 and first.sequence.computed == 13
    drive.tell(first)
    drive.manager.close(first.sequence)
    requests = [drive.open(text, prompt=20) for _ in range(2)]
    for request in requests:
        assert request.sequence.computed == 13
        drive.step([(request, 1, 4)], [4])
        assert behind(drive, request) == 9, "the history goes on where the snapshot's ends"
        drive.step([(request, 3, 0)])
        drive.check(request, first=13)
    drive.manager.check()


def test_a_fork_takes_the_history_along():
    drive = replaying("mamba2")
    parent = drive.open(tokens(40, 3), prompt=9)
    drive.step([(parent, 9, 0)])
    drive.step([(parent, 1, 4)], [3])
    drive.tell(parent)
    child = Request(
        drive.manager.fork(parent.sequence), parent.tokens, parent.hidden, {each: {} for each in drive.mixers}
    )
    drive.step([(parent, 1, 4), (child, 1, 2)], [2, 3])
    drive.step([(parent, 2, 0), (child, 5, 0)])
    drive.check(parent)
    drive.check(child, first=12)


def test_more_drafts_than_the_history_has_room_for_are_refused():
    drive = replaying("mamba2", 3)
    request = drive.open(tokens(20), prompt=5)
    drive.step([(request, 5, 0)])
    with pytest.raises(RequestError) as error:
        drive.manager.plan([Run(request.sequence, 1, drafts=4)])
    assert str(error.value) == (
        "Run(drafts=4): what the spec keeps can take back 3 at most\n"
        "hint: draft fewer tokens, or give the spec's ring or history more room"
    )
    # Six tokens, of which the history holds the last three: so many can go.
    for accepted in (3, 4, 6):
        drive.step([(request, 3, 3)], [accepted])
    drive.check(request)


def test_streams_sizes_and_sharding():
    """Nemotron-H: 16 inputs of 10240 channels in bfloat16 and of 128 time steps in float32, 0.3 MiB beside 4."""
    spec = cache_spec(
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, dtype="bfloat16", rollback="replay"
    )
    found = {stream.name: stream for stream in spec.layers[0].streams}
    assert {name: stream.row for name, stream in found.items()} == {
        "conv_state": RowFormat((10240, 3), "bfloat16"),
        "recurrent_state": RowFormat((128, 64, 128), "float32"),
        "conv_history": RowFormat((10240, 16), "bfloat16"),
        "gate_history": RowFormat((128, 16), "float32"),
        "checkpoint": RowFormat((1,), "int64"),
    }
    assert {stream.retention for stream in found.values()} == {Replay(16)}
    assert found["conv_history"].sharding == found["conv_state"].sharding == Sections((8192, 1024, 1024))
    assert found["gate_history"].sharding == Sections((128,))
    assert found["recurrent_state"].sharding == Heads(128)
    two = cache_spec({"model_type": "qwen3_next"}, rollback="replay", history_tokens=4).layers[0].streams
    assert {stream.name: stream.row.shape for stream in two}["gate_history"] == (64, 4)
    for model_type in ("mamba", "lfm2"):
        assert all(
            stream.name != "gate_history"
            for layer in cache_spec({"model_type": model_type, "full_attn_idxs": []}, rollback="replay").layers
            for stream in layer.streams
        )


def test_ways_and_lengths_that_cannot_be_are_refused():
    with pytest.raises(SpecError) as error:
        cache_spec({"model_type": "mamba"}, rollback="recompute")
    assert str(error.value) == "rollback='recompute' is not served\nhint: it is one of snapshots, replay"
    with pytest.raises(SpecError) as error:
        cache_spec({"model_type": "mamba"}, rollback="replay", history_tokens=0)
    assert str(error.value) == "Replay(tokens=0): at least the inputs of one token are kept"
    prints = {cache_spec({"model_type": "mamba"}, rollback="replay", history_tokens=n).fingerprint for n in (4, 5)}
    assert len(prints | {cache_spec({"model_type": "mamba"}).fingerprint}) == 3


def test_backends_that_know_no_replay_refuse_it():
    spec = cache_spec({"model_type": "mamba2", "num_hidden_layers": 1}, rollback="replay")
    for part in (spec.only(STREAMS), spec.only(("conv_state", "recurrent_state"))):
        with pytest.raises(SpecError) as error:
            recurrent_layers(part, "fast")
        assert str(error.value) == (
            "backend 'fast': layer 0 takes drafts back by replay, which this backend does not serve\n"
            "hint: make the spec with rollback='snapshots'"
        )


def test_a_history_that_is_not_whole_is_refused():
    row = RowFormat((6, 3), "float32")
    for streams, found in (
        ([Stream("conv_state", row, Replay(4))], []),
        ([Stream("conv_state", row, Replay(4)), Stream("checkpoint", row, Replay(4))], ["checkpoint"]),
        ([Stream("conv_state", row, State()), Stream("conv_history", row, State())], ["conv_history"]),
    ):
        memory = DeviceMemory(Layout.build(CacheSpec((Layer(2, streams),), 8, "broken"), 1 << 20))
        with pytest.raises(SpecError) as error:
            ReferenceBackend(BackendContext(memory))
        assert str(error.value) == (
            f"backend 'mamba-reference': layer 2 is to take drafts back by replay and has {found} for it"
        )
