"""What a backend of recurrent layers promises beside its values: padding, neighbours, dtypes, and refusals by name."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from mamba_drive import Drive
from mamba_models import prepare

from kvist.attention.base import BackendContext
from kvist.errors import SpecError, StateError
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Layer, RowFormat, ScaleFormat, State, Stream
from kvist.step import Step
from kvist_mamba.backend import ReferenceBackend, StateRow, state_rows

#: One of each kind of mixer.
KINDS = ("mamba", "mamba2", "qwen3_next", "lfm2")


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(2, 97, count).astype(np.int32)


def step(table, query_lengths, drafts=()):
    """A step of rows that stand in the table's order; tables as the manager makes them."""
    counts = np.array(query_lengths, np.int32)
    table = np.array(table, np.int32)
    return Step(
        id=1,
        slots=np.arange(len(counts), dtype=np.int32),
        query_lengths=counts,
        lengths=counts + 5,
        decode_rows=0,
        tables=(table,),
        copies=(np.empty((0, 2), np.int32),),
        drafts=np.array(drafts, np.int32),
    )


def test_where_rows_read_and_write():
    """A plain row over its own state, a row with drafts to a page per token, padding rows nowhere."""
    found = state_rows(step([[3, -1, -1], [0, 0, 0], [5, 6, 7]], [4, 1, 2], [0, 0, 1]), 0)
    assert found == [
        StateRow(slice(0, 4), source=3, after=(4,), targets=(3,)),
        StateRow(slice(5, 7), source=5, after=(1, 2), targets=(6, 7)),
    ]


@pytest.mark.parametrize("row", [[-1, 2, 3], [4, 2, -1]])
def test_a_row_without_a_page_is_refused(row):
    with pytest.raises(StateError) as error:
        state_rows(step([row], [2], [1]), 0)
    assert str(error.value) == "row 0 of the step has no page for its state"


@pytest.mark.parametrize("model_type", KINDS)
def test_padding_rows_change_nothing(model_type):
    """A batch of three rows padded to eight with NaN, while another sequence is parked."""
    states = []
    for padding in ((), (1, 1, 1, 1), (4, 1, 2, 1)):
        drive = Drive(model_type)
        requests = [drive.open(tokens(20, seed), prompt=5) for seed in range(4)]
        drive.step([(request, 5, 0) for request in requests])
        parked = drive.state(requests[3])
        for _ in range(3):
            drive.step([(request, 1, 0) for request in requests[:3]], padding=padding)
        drive.step([(requests[0], 1, 2), (requests[1], 3, 0), (requests[2], 1, 0)], [2, 3, 1], padding)
        assert torch.equal(drive.state(requests[3]), parked)
        assert (drive.memory.pages(drive.group)[0] == 0xFF).all(), "page 0 is nobody's"
        for request in requests[:3]:
            drive.check(request)
        states.append(torch.stack([drive.state(request) for request in requests]))
    # Not bit by bit: torch rounds functions of a vector's last elements in another way.
    for other in states[1:]:
        assert torch.allclose(other.view(torch.float32), states[0].view(torch.float32), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model_type", KINDS)
def test_neighbours_leave_no_trace_in_states(model_type):
    """Rows begin anywhere in the flattened batch, with states of their own: each ends as it does alone."""
    batch, alone = Drive(model_type), Drive(model_type)
    lengths, chunk = (7, 13, 5, 22), (3, 9, 1, 17)
    together = [batch.open(tokens(count, count)) for count in lengths]
    batch.step([(request, first, 0) for request, first in zip(together, chunk)])
    batch.step([(request, count - first, 0) for request, count, first in zip(together, lengths, chunk)])
    for request, count, first in zip(together, lengths, chunk):
        single = alone.open(tokens(count, count), reuse=False)
        alone.step([(single, first, 0)])
        alone.step([(single, count - first, 0)])
        found, wanted = (drive.state(each).view(torch.float32) for drive, each in ((batch, request), (alone, single)))
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert wanted.abs().max() > 0.01


@pytest.mark.parametrize("model_type", KINDS)
def test_a_step_of_which_nothing_stays_has_not_happened(model_type):
    drive = Drive(model_type)
    request = drive.open(tokens(30), prompt=6)
    drive.step([(request, 6, 0)])
    before = drive.state(request)
    for _ in range(3):
        drive.step([(request, 1, 3)], [0])
        assert request.sequence.computed == 6
        assert torch.equal(drive.state(request), before)
    drive.step([(request, 1, 3)], [4])
    drive.step([(request, 1, 0)])
    drive.check(request)


@pytest.mark.parametrize(
    ("model_type", "tolerance"), [("mamba", 1e-13), ("mamba2", 1e-13), ("qwen3_next", 1e-7), ("lfm2", 1e-13)]
)
def test_states_in_double_precision(model_type, tolerance):
    """Then the cut into steps is nothing at all, beyond the order of sums; Qwen3-Next's gates are in float32."""
    outputs = []
    for cut in ((29,), (1,) * 29, (9, 1, 19)):
        drive = Drive(model_type, dtype=torch.float64, state_dtype="float64")
        request = drive.open(tokens(29))
        for count in cut:
            drive.step([(request, count, 0)])
        drive.check(request)
        outputs.append(torch.cat([request.output(layer)[1] for layer in drive.mixers]))
    assert outputs[0].dtype == torch.float64
    for other in outputs[1:]:
        assert ((other - outputs[0]).abs().max() / outputs[0].abs().max()) < tolerance


def bfloat16_error(model_type, count):
    """Of the last tenth of ``count`` tokens, computed one by one with states stored in bfloat16 after each."""
    drive = Drive(model_type, state_dtype="bfloat16")
    request = drive.open(tokens(count))
    for _ in range(count):
        drive.step([(request, 1, 0)])
    return drive.error(request)


@pytest.mark.parametrize(("model_type", "most"), [("mamba", 0.02), ("mamba2", 0.02), ("qwen3_next", 0.02)])
def test_states_in_bfloat16_lose_what_the_readme_says(model_type, most):
    assert 1e-5 < bfloat16_error(model_type, 60) < most


def test_models_in_bfloat16():
    """Convolution states and values in the model's dtype, recurrent states in float32."""
    for model_type in KINDS:
        drive = Drive(model_type, dtype=torch.bfloat16)
        request = drive.open(tokens(29))
        for count in (9, 1, 2, 17):
            drive.step([(request, count, 0)])
        assert request.output(min(drive.mixers))[1].dtype == torch.bfloat16
        drive.check(request, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_two_thousand_tokens_one_by_one_do_not_drift(model_type):
    drive = Drive(model_type)
    request = drive.open(tokens(2000))
    drive.step([(request, 17, 0)])
    while request.sequence.computed < 2000:
        drive.step([(request, 1, 0)])
    drive.check(request)


def recurrent_spec(conv=None, *others, layer=4):
    return CacheSpec((Layer(layer, (*((conv,) if conv else ()), *others)),), 8, "contract")


CONV = Stream("conv_state", RowFormat((6, 3), "float32"), State())
STATE = Stream("recurrent_state", RowFormat((6, 2), "float32"), State())


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            recurrent_spec(CONV, Stream("k", RowFormat((2, 8), "float32"), History())),
            "backend 'mamba-reference': layer 4 has streams ['conv_state', 'k'], a recurrent layer has 'conv_state' "
            "and perhaps 'recurrent_state'\n"
            "hint: keys and values beside them are served by another backend: give this one spec.only(...)",
        ),
        (
            recurrent_spec(None, STATE),
            "backend 'mamba-reference': layer 4 has streams ['recurrent_state'], a recurrent layer has 'conv_state' "
            "and perhaps 'recurrent_state'\n"
            "hint: keys and values beside them are served by another backend: give this one spec.only(...)",
        ),
        (
            recurrent_spec(attrs.evolve(CONV, retention=History())),
            "backend 'mamba-reference': layer 4 stream 'conv_state' is kept for History(), "
            "a state has one row per sequence",
        ),
        (
            recurrent_spec(attrs.evolve(CONV, row=RowFormat((6, 3), "int8"))),
            "backend 'mamba-reference': layer 4 stream 'conv_state' is stored as int8\n"
            "hint: use one of float64, float32, float16, bfloat16",
        ),
        (
            recurrent_spec(CONV, attrs.evolve(STATE, row=RowFormat((6, 2), "float32", ScaleFormat(1)))),
            "backend 'mamba-reference': layer 4 stream 'recurrent_state' has scales, rows must be plain",
        ),
        (
            recurrent_spec(attrs.evolve(CONV, row=RowFormat((6,), "float32"))),
            "backend 'mamba-reference': layer 4 stream 'conv_state' has rows of shape (6,), "
            "expected (channels, columns)",
        ),
        (
            recurrent_spec(CONV, attrs.evolve(STATE, row=RowFormat((6,), "float32"))),
            "backend 'mamba-reference': layer 4 stream 'recurrent_state' has rows of shape (6,), "
            "expected two or three axes",
        ),
    ],
)
def test_a_spec_that_cannot_be_served_is_refused_by_name(spec, text):
    with pytest.raises(SpecError) as error:
        ReferenceBackend.page_layout(spec)
    assert str(error.value) == text


@pytest.fixture
def served():
    """A backend of one Mamba-2 layer in its second step, the layer's id, and inputs that fit."""
    drive = Drive("mamba2", restore=RestorePolicy())
    request = drive.open(tokens(9))
    drive.step([(request, 5, 0)])
    drive.backend.begin(step([[1]], [4]))
    layer, mixer = next(iter(drive.mixers.items()))
    inputs, _ = prepare(mixer, request.hidden[layer][:4])
    return drive.backend, layer, inputs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda i: {"conv_inputs": i.conv_inputs[:3]}, "layer 0: conv_inputs [3, 128], expected [4, 128]"),
        (lambda i: {"conv_weight": i.conv_weight[:, :3]}, "layer 0: conv_weight [128, 3], expected [128, 4]"),
        (lambda i: {"conv_bias": i.conv_bias[:9]}, "layer 0: conv_bias [9], expected [128]"),
        (lambda i: {"dt": i.dt.T}, "layer 0: dt [8, 4], expected [4, 8]"),
        (lambda i: {"a": i.a[:1]}, "layer 0: a [1], expected [8]"),
        (lambda i: {"d": i.d[:, None]}, "layer 0: d [8, 1], expected [8]"),
        (lambda i: {"dt_bias": i.dt_bias[:2]}, "layer 0: dt_bias [2], expected [8]"),
    ],
)
def test_inputs_of_other_shapes_are_refused_by_name(served, change, text):
    backend, layer, inputs = served
    backend.forward(layer, inputs)
    with pytest.raises(SpecError) as error:
        backend.forward(layer, attrs.evolve(inputs, **change(inputs)))
    assert str(error.value) == text


@pytest.mark.parametrize("other", sorted({*KINDS} - {"mamba2"}))
def test_inputs_of_another_kind_are_refused_by_name(served, other):
    backend, layer, _ = served
    foreign = Drive(other)
    number, mixer = next(iter(foreign.mixers.items()))
    inputs, _ = prepare(mixer, foreign.hidden_of(tokens(4))[number])
    inputs = attrs.evolve(
        inputs, conv_inputs=torch.zeros(4, 128), conv_weight=torch.zeros(128, 4), conv_bias=torch.zeros(128)
    )
    with pytest.raises(SpecError) as error:
        backend.forward(layer, inputs)
    text = f"layer 0: {type(inputs).__name__} do not fit 128 channels and a state of shape (8, 8, 16)"
    assert str(error.value) == text


def test_forward_before_the_first_step_is_refused():
    drive = Drive("mamba2")
    layer, mixer = next(iter(drive.mixers.items()))
    inputs, _ = prepare(mixer, drive.hidden_of(tokens(4))[layer])
    with pytest.raises(StateError) as error:
        drive.backend.forward(layer, inputs)
    assert str(error.value) == "forward() before begin(): the backend has no step"


def test_two_retentions_of_one_layer_are_refused():
    @attrs.frozen
    class Other(State):
        pass

    spec = recurrent_spec(CONV, attrs.evolve(STATE, retention=Other()))
    memory = DeviceMemory(Layout.build(spec, 1 << 20))
    with pytest.raises(SpecError) as error:
        ReferenceBackend(BackendContext(memory))
    assert str(error.value) == "backend 'mamba-reference': layer 4 keeps its two states for State() and Other()"
