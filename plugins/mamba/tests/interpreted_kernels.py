"""The kernels in Triton's interpreter, at tiny sizes. ``test_kernels.py`` runs this file in a process of its own,
because the interpreter has to be chosen before triton is imported."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mamba_drive import Drive
from mamba_models import CONFIGS

from kvist.errors import SpecError, StateError
from kvist.restore import RestorePolicy
from kvist.step import Step
from kvist_mamba import cache_spec, reference
from kvist_mamba.backend import ReferenceBackend, state_rows
from kvist_mamba.inputs import KINDS, STREAMS
from kvist_mamba.kernels import conv, delta_net, elementwise, mamba1, mamba2
from kvist_mamba.kernels.replay import ReplayRows
from kvist_mamba.kernels.rows import Rows
from kvist_mamba.testing import RecurrentBackendTests, recurrent_case
from kvist_mamba.triton_backend import TritonBackend

#: Models whose layers the interpreter computes in a few seconds.
QUICK = ("lfm2", "mamba")
DOUBLE = torch.float64


class Batch:
    """Rows of a flattened batch over pages in a shuffled order, NaN in all that is not theirs.

    lengths: tokens per row. after: by row, numbers of tokens after which the state is written, each to a page of its
    own but the last, which overwrites the row's; a row in ``padding`` is nobody's.
    """

    def __init__(self, lengths, after=None, padding=(), seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths, self.padding = lengths, padding
        self.after = [([count] if count else []) if after is None else after[n] for n, count in enumerate(lengths)]
        self.page_count = len(lengths) + sum(map(len, self.after)) + 3
        pages = iter((torch.randperm(self.page_count - 1, generator=self.generator) + 1).tolist())
        self.sources = [0 if n in padding or not count else next(pages) for n, count in enumerate(lengths)]
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.pages, targets = [], np.full(sum(lengths), -1)
        for n, wanted in enumerate(self.after):
            mine = [self.sources[n] if count == lengths[n] else next(pages) for count in wanted]
            self.pages.append(mine)
            for count, page in zip(wanted, mine):
                targets[self.starts[n] + count - 1] = -1 if n in padding else page
        written = np.zeros(sum(lengths), bool)
        for n, wanted in enumerate(self.after):
            written[[self.starts[n] + count - 1 for count in wanted]] = True
        self.rows = Rows(torch.device("cpu"))
        self.rows.put(self.starts, np.array(self.sources), targets, written)
        self.real = [n for n, count in enumerate(lengths) if count and n not in padding]

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def tokens(self, *shape):
        """Values per token, NaN in rows that are nobody's."""
        values = self.draw(sum(self.lengths), *shape)
        for n in self.padding:
            values[self.part(n)] = torch.nan
        return values

    def part(self, n):
        return slice(int(self.starts[n]), int(self.starts[n + 1]))

    def states(self, *shape, dtype=torch.float32):
        """Pages with gaps between them; only the rows' own hold anything. What lies before the first page and between
        them is another stream's."""
        self.foreign = torch.full((self.page_count + 1, 2, *shape), 777.0, dtype=dtype)
        states = self.foreign[1:, 0]
        states.fill_(torch.nan)
        for n in self.real:
            states[self.sources[n]] = self.draw(*shape).to(dtype)
        return states

    def check(self, before, states, values, oracle, tolerance=1e-5):
        """``oracle(row's tokens, state, after)`` in float64, of every row; other pages are as they were."""
        untouched = torch.ones(self.page_count, dtype=torch.bool)
        for n in self.real:
            part = self.part(n)
            want, after = oracle(part, before[self.sources[n]].double(), self.after[n])
            torch.testing.assert_close(values[part].double(), want, rtol=tolerance, atol=tolerance)
            for page, state in zip(self.pages[n], after):
                torch.testing.assert_close(states[page].double(), state, rtol=tolerance, atol=tolerance)
            untouched[self.pages[n]] = False
        assert torch.equal(states[untouched].nan_to_num(9), before[untouched].nan_to_num(9))
        assert (self.foreign[:, 1] == 777).all() and (self.foreign[0] == 777).all()
        for n in self.padding:
            assert not values[self.part(n)].any()


#: Rows that begin anywhere in the batch, none of them, padding among them; a state after every token of one; long rows
#: with states in the middle of chunks, and one whose last chunk has a single token.
BATCHES = {
    "decode": {"lengths": [1, 1, 1, 1, 1], "padding": (1, 4)},
    "ragged": {"lengths": [1, 5, 0, 3, 2, 7], "padding": (4,)},
    "drafts": {"lengths": [4, 1, 3], "after": [[1, 2, 3, 4], [1], [1, 2, 3]]},
    "long": {
        "lengths": [3, 40, 19, 65],
        "after": [[3], [24, 40], [19], [17, 64]],
        "padding": (2,),
    },
    "empty": {"lengths": []},
}


@pytest.fixture(params=BATCHES)
def batch(request):
    return Batch(**BATCHES[request.param])


@pytest.mark.parametrize(
    ("channels", "columns", "activation"),
    [(12, 3, True), (130, 2, False), pytest.param(5, 1, True, marks=pytest.mark.slow)],
)
def test_convolution(batch, channels, columns, activation):
    inputs, states = batch.tokens(channels), batch.states(channels, columns)
    weight, bias = batch.draw(channels, columns + 1), batch.draw(channels) if activation else None
    before = states.clone()
    sums = conv.convolve(inputs, weight, bias, states, batch.rows, activation=activation)

    def oracle(part, state, after):
        own_bias = None if bias is None else bias.double()
        want, history = reference.causal_conv(inputs[part].double(), weight.double(), own_bias, state)
        return F.silu(want) if activation else want, reference.conv_states(history, columns, after)

    batch.check(before, states, sums, oracle)


def test_inputs_of_16_bits_are_kept_as_they_are():
    batch = Batch([3, 1, 6])
    inputs, states = batch.tokens(8).bfloat16(), batch.states(8, 3, dtype=torch.bfloat16)
    weight, before = batch.draw(8, 4).bfloat16(), states.clone()
    sums = conv.convolve(inputs, weight, None, states, batch.rows, activation=False)

    def oracle(part, state, after):
        want, history = reference.causal_conv(inputs[part].double(), weight.double(), None, state)
        return want, reference.conv_states(history, 3, after)

    batch.check(before, states, sums, oracle)


def test_mamba1(batch):
    channels, columns = 6, 3
    u, dt, states = batch.tokens(channels), batch.tokens(channels), batch.states(channels, columns)
    # Not contiguous, as parts of one projection.
    b, c = batch.tokens(2 * columns + 1).split([columns, columns + 1], dim=1)
    c = c[:, 1:]
    a, d, bias = -batch.draw(channels, columns).exp(), batch.draw(channels), batch.draw(channels)
    values, before = torch.zeros(len(u), channels), states.clone()
    mamba1.mamba1_scan(u, dt, b, c, a, d, bias, states, batch.rows, values)

    def oracle(part, state, after):
        step = F.softplus(dt[part].double() + bias.double())
        return reference.mamba1_scan(
            u[part].double(), step, b[part].double(), c[part].double(), a.double(), d.double(), state, after
        )

    batch.check(before, states, values, oracle)


@pytest.mark.parametrize(
    ("heads", "size", "groups", "columns"),
    [(4, 5, 2, 3), pytest.param(2, 40, 1, 20, marks=pytest.mark.slow)],
)
def test_mamba2(batch, heads, size, groups, columns):
    """The second shape has a tile for each half of a head; the decay of some heads over a chunk is beyond float32."""
    mixed = batch.tokens(heads * size + 2 * groups * columns)
    dt, states = 3 * batch.tokens(heads + 2)[:, 1:-1], batch.states(heads, size, columns)
    a, d, bias = -(3 * batch.draw(heads)).exp(), batch.draw(heads), batch.draw(heads)
    limits, values, before = (0.01, 4.0), torch.zeros(len(mixed), heads * size), states.clone()
    mamba2.mamba2_scan(mixed, dt, a, d, bias, limits, states, batch.rows, values)

    def oracle(part, state, after):
        x, b, c = reference.split_mamba2(mixed[part].double(), heads, size, columns)
        step = F.softplus(dt[part].double() + bias.double()).clamp(*limits)
        want, left = reference.mamba2_scan(x, step, b, c, a.double(), d.double(), state, after)
        return want.flatten(1), left

    batch.check(before, states, values, oracle)


@pytest.mark.parametrize(
    ("heads", "key_heads", "key_size", "value_size"),
    [(4, 2, 3, 5), pytest.param(2, 1, 20, 40, marks=pytest.mark.slow)],
)
def test_delta_net(batch, heads, key_heads, key_size, value_size):
    """The decay of some heads over a chunk is beyond float32."""
    mixed = batch.tokens(2 * key_heads * key_size + heads * value_size)
    states, decay = batch.states(heads, key_size, value_size), -F.softplus(6 * batch.tokens(heads) - 1)
    beta = batch.tokens(heads).sigmoid()
    values, before = torch.zeros(len(mixed), heads * value_size), states.clone()
    delta_net.delta_net_scan(mixed, decay, beta, states, batch.rows, values)

    def oracle(part, state, after):
        q, k, v = reference.split_delta_net(mixed[part].double(), heads, key_size, value_size)
        want, left = reference.delta_net_scan(q, k, v, decay[part].double(), beta[part].double(), state, after)
        return want.flatten(1), left

    batch.check(before, states, values, oracle)


def test_one_key_again_and_again():
    """What a token adds then depends the most on all that others have added."""
    batch = Batch([48])
    keys, values = batch.draw(1, 6).expand(48, 6), torch.zeros(48, 10)
    mixed = torch.cat([batch.draw(48, 6), keys, batch.draw(48, 10)], dim=1)
    states, decay, beta = batch.states(2, 6, 5), torch.zeros(48, 2), torch.full((48, 2), 0.999)
    before = states.clone()
    delta_net.delta_net_scan(mixed, decay, beta, states, batch.rows, values)

    def oracle(part, state, after):
        q, k, v = reference.split_delta_net(mixed[part].double(), 2, 6, 5)
        want, left = reference.delta_net_scan(q, k, v, decay[part].double(), beta[part].double(), state, after)
        return want.flatten(1), left

    batch.check(before, states, values, oracle)


def test_states_of_16_bits():
    """float16: the interpreter cuts bfloat16 off where a GPU rounds."""
    batch = Batch([2, 40, 1])
    mixed, dt, states = batch.tokens(20), batch.tokens(2), batch.states(2, 4, 6, dtype=torch.float16)
    a, d, bias = -batch.draw(2).exp(), batch.draw(2), batch.draw(2)
    values, before = torch.zeros(len(mixed), 8), states.clone()
    mamba2.mamba2_scan(mixed, dt, a, d, bias, (0.0, 9.0), states, batch.rows, values)

    def oracle(part, state, after):
        x, b, c = reference.split_mamba2(mixed[part].double(), 2, 4, 6)
        step = F.softplus(dt[part].double() + bias.double())
        want, left = reference.mamba2_scan(x, step, b, c, a.double(), d.double(), state, after)
        return want.flatten(1), left

    batch.check(before, states, values, oracle, 2e-3)


def test_small_steps_of_time_are_not_lost():
    """1 + exp(-12) has three digits of exp(-12) in float32."""
    batch = Batch([1])
    u, states = torch.ones(1, 4), batch.states(4, 1)
    states[batch.sources[0]] = 0
    dt = torch.tensor([[-12.0, -5.0, 0.5, 30.0]])
    ones, zeros = torch.ones(1, 1), torch.zeros(4)
    values = torch.zeros(1, 4)
    mamba1.mamba1_scan(u, dt, ones, ones, -torch.ones(4, 1), zeros, zeros, states, batch.rows, values)
    torch.testing.assert_close(values.double(), F.softplus(dt.double()), rtol=1e-6, atol=0)


def step(table, query_lengths, drafts=()):
    counts = np.array(query_lengths, np.int32)
    return Step(
        id=1,
        slots=np.arange(len(counts), dtype=np.int32)[::-1],
        query_lengths=counts,
        lengths=counts + 5,
        decode_rows=0,
        tables=(np.array(table, np.int32)[::-1],),
        copies=(np.empty((0, 2), np.int32),),
        drafts=np.array(drafts, np.int32),
    )


def test_rows_are_those_of_the_reference():
    made = step([[3, -1, -1], [0, 0, 0], [5, 6, 7], [9, 9, 9], [8, 1, 2]], [4, 1, 2, 0, 40], [0, 0, 1, 0, 0])
    rows = Rows(torch.device("cpu"))
    rows.stage(made, 0)
    found = {token: page for token, page in enumerate(rows.targets.tolist()) if page != -1}
    wanted = {row.tokens.start + n - 1: page for row in state_rows(made, 0) for n, page in zip(row.after, row.targets)}
    assert found == wanted == {3: 3, 5: 6, 6: 7, 46: 8}
    assert rows.sources.tolist() == [3, 0, 5, 0, 8]
    assert rows.written.tolist() == [3, 4, 5, 6, 46]
    assert rows.short.tolist() == [0, 1, 2, 3] and rows.long.tolist() == [[4, 0, 3]]
    assert rows.chunks.tolist() == [[7, 16], [23, 16], [39, 8]]


@pytest.mark.parametrize(
    ("rows", "row"),
    [(Rows, [-1, 2, 3]), (Rows, [4, 2, -1]), (partial(ReplayRows, history=4), [-1])],
)
def test_a_row_without_a_page_is_refused(rows, row):
    with pytest.raises(StateError) as error:
        rows(torch.device("cpu")).stage(step([row], [2], [1]), 0)
    assert str(error.value) == "row 0 of the step has no page for its state"


def test_buffers_stay_where_they_are():
    rows = Rows(torch.device("cpu"))
    rows.stage(step([[3], [4]], [1, 1]), 0)
    first = rows.sources.data_ptr()
    rows.stage(step([[5]], [1]), 0)
    assert rows.sources.data_ptr() == first and rows.sources.tolist() == [5]


def replaying(table, query_lengths, drafts, checkpoints, history=4):
    """Staged rows that begin at position 5, and pages whose checkpoints are at these positions."""
    rows = ReplayRows(torch.device("cpu"), history)
    positions = torch.tensor(checkpoints, dtype=torch.int64)[:, None]
    rows.stage(step(table, query_lengths, drafts), 0)
    rows.turn(positions)
    return rows, positions


def test_rows_with_replay_are_those_of_the_reference():
    """A full history, an empty one, none at all, one that is more than full with the drafts, and nobody's."""
    rows, positions = replaying(
        [[2], [3], [4], [1], [0], [5]], [3, 20, 4, 3, 6, 0], [2, 0, 3, 1, 0, 0], [9, 4, 5, 5, 2, 7]
    )
    turns = [reference.turn(*each, room=4) for each in ((5, 5, 3, 2), (5, 5, 20, 0), (2, 5, 4, 3), (4, 5, 3, 1))]
    assert (rows.ends - rows.begins).tolist() == [turn.valid + n for turn, n in zip(turns, (3, 20, 4, 3))] + [6, 0]
    written = {token: page for token, page in enumerate(rows.targets.tolist()) if page != -1}
    done = [
        (int(begin) + turn.done - 1, page) for begin, turn, page in zip(rows.begins, turns, (2, 3, 4, 1)) if turn.done
    ]
    assert written == dict(done) and [page for _, page in done] == [3, 4]
    assert rows.sources.tolist() == [2, 3, 4, 1, 0, 0]
    assert rows.long.tolist() == [[1, 0, 2]] and rows.chunks.tolist() == [[7, 16], [23, 8]]
    assert not rows.blame.any()
    rows.move(positions)
    assert positions[:, 0].tolist() == [9, 4, 5, 25, 5, 7]


def test_a_page_of_another_position_gives_no_values():
    """Behind the row's first token, and further before it than the history goes back."""
    rows, positions = replaying([[1], [2], [3]], [2, 2, 2], [1, 1, 1], [0, 6, 5, 0])
    assert rows.sources.tolist() == [0, 2, 0]
    values = rows.values(torch.ones(18, 3))
    assert values.isnan().all(1).tolist() == [True, True, False, False, True, True]
    assert torch.equal(values[2:4], torch.ones(2, 3))
    rows.move(positions)
    assert positions[:, 0].tolist() == [0, 6, 5, 0]


@pytest.mark.parametrize("history", [3, 4])
def test_histories_are_joined_and_kept(history):
    """Of bytes between NaN. The first row's checkpoint stays, the second's moves into its own tokens, and the third's
    to its end."""
    counts, drafts, checkpoints = [2, 5, 3], [1, 4, 0], [0, 4, 3, 5]
    rows, positions = replaying([[1], [2], [3]], counts, drafts, checkpoints, history)
    kept = torch.full((4, 6, history), torch.nan)
    kept[1, :, 0] = torch.arange(6.0)
    kept[2, :, :2] = 10 + torch.arange(12.0).reshape(6, 2)
    new = 100 + torch.arange(60.0).reshape(10, 6)
    before = kept.clone()
    joined = rows.join(kept, new)
    wanted = [torch.cat([before[1, :, :1].T, new[:2]]), torch.cat([before[2, :, :2].T, new[2:7]]), new[7:]]
    for begin, end, want in zip(rows.begins.tolist(), rows.ends.tolist(), wanted):
        assert torch.equal(joined[begin:end], want)
    assert torch.equal(rows.values(joined), new)
    rows.keep(kept, joined)
    left = [wanted[0], wanted[1][-history:], new[:0]]
    for page, want in zip((1, 2, 3), left):
        assert torch.equal(kept[page, :, : len(want)], want.T)
        assert torch.equal(kept[page, :, len(want) :].nan_to_num(9), before[page, :, len(want) :].nan_to_num(9))
    assert kept[0].isnan().all()
    rows.move(positions)
    assert positions[:, 0].tolist() == [0, 4, 10 - history, 8]


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(2, 97, count).astype(np.int32)


def drive_all(drive):
    """Prompts in ragged chunks, drafts of which some stay, decode, and a long chunk."""
    one, two = drive.open(tokens(60, 1), prompt=8), drive.open(tokens(60, 2), prompt=8)
    drive.step([(one, 5, 0), (two, 2, 0)], padding=(2, 1))
    drive.step([(one, 1, 3), (two, 1, 0)], [2, 1], padding=(1,))
    drive.step([(one, 1, 0), (two, 33, 0)])
    drive.step([(one, 19, 0), (two, 1, 2)], [19, 1])
    drive.step([(one, 1, 0), (two, 1, 0)])
    return one, two


REPLAY = {"rollback": "replay", "history_tokens": 5}


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((each, {}) for each in QUICK),
        *((each, REPLAY) for each in QUICK),
        *(pytest.param(each, {}, marks=pytest.mark.slow) for each in sorted({*CONFIGS} - {*QUICK})),
        *(pytest.param(each, REPLAY, marks=pytest.mark.slow) for each in ("mamba2", "qwen3_next")),
    ],
)
def test_layers_put_out_what_those_of_transformers_do(model_type, options):
    """And leave the bytes that the reference leaves, so either goes on where the other stopped: their layouts have one
    tag."""
    drives = [Drive(model_type, backend=backend, **options) for backend in (TritonBackend, ReferenceBackend)]
    requests = [drive_all(drive) for drive in drives]
    for request in requests[0]:
        drives[0].check(request)
    assert len({drive.backend.page_layout(drive.spec.only(STREAMS)).tag for drive in drives}) == 1
    states = [
        torch.stack([drive.state(request).view(torch.float32) for request in own])
        for drive, own in zip(drives, requests)
    ]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_a_model_of_16_bits():
    """Its own projections between convolution and scan compute in its dtype."""
    drive = Drive("mamba", backend=TritonBackend, dtype=torch.bfloat16)
    request = drive.open(tokens(12))
    for count in (9, 1, 2):
        drive.step([(request, count, 0)])
    assert request.output(min(drive.mixers))[1].dtype == torch.bfloat16
    drive.check(request, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_sequences_resume_at_snapshots(model_type):
    drive = Drive(model_type, backend=TritonBackend, restore=RestorePolicy(every_blocks=1))
    prompt = tokens(29, 3)
    first = drive.open(prompt)
    drive.prefill(first)
    drive.check(first)
    drive.manager.close(first.sequence)
    other = drive.open(np.concatenate([prompt[:20], tokens(22, 4)]))
    assert other.sequence.computed == 16
    drive.step([(other, 26, 0)])
    drive.check(other, first=16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"dtype": "float64"},
            "backend 'mamba-triton': layer 0 stream 'conv_state' is stored as float64\n"
            "hint: use one of float32, float16, bfloat16",
        ),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused_by_name(options, text):
    spec = cache_spec({"model_type": "mamba2", **CONFIGS["mamba2"], "hidden_size": 32}, block_tokens=8, **options)
    with pytest.raises(SpecError) as error:
        TritonBackend.page_layout(spec)
    assert str(error.value) == text


@pytest.mark.slow
class TestContract(RecurrentBackendTests):
    """Of one kind: the interpreter takes minutes for each."""

    backend = TritonBackend
    features = frozenset(KINDS)
    cases = (recurrent_case("mamba2"),)
    triton = True


def test_the_interpreter_is_on():
    assert type(elementwise.silu).__name__ == "InterpretedFunction"
