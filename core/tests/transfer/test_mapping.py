"""What is copied where: every byte of every page, by an oracle that knows only how pages are written down."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvist.errors import SpecError, TransferError
from kvist.layout import RowMajor
from kvist.spec import (
    CacheSpec,
    Heads,
    History,
    Layer,
    Replicated,
    RowFormat,
    ScaleFormat,
    Sections,
    State,
    Stream,
    Window,
)
from kvist.testing.transfer.values import KeyTiles, Model, Opaque, Rank, UnitMajor
from kvist.transfer.compatibility import overlaps, uncovered
from kvist.transfer.mapping import Mapping, interleave
from kvist.transfer.pagetable import PageTable, Placement, describe
from kvist.transfer.sharding import rank_spec
from kvist.transfer.transport import IncompatibleError

LENGTH = 43


def attention(layer, heads, size=6, retention=None, dtype="int16"):
    row = RowFormat((heads, size), dtype)
    return Layer(layer, [Stream(name, row, retention or History(), sharding=Heads(heads)) for name in ("k", "v")])


def spec_of(*layers, block=8, **fields):
    return CacheSpec(layers=layers, block_tokens=block, fingerprint="model", **fields)


def ranks(model, count, **options):
    return [Rank(model, placement=Placement(rank, count), **options) for rank in range(count)]


def move(senders, receivers, turn=0):
    """Everything from all to all, then compare. Returns the fragments of each pair."""
    made = {}
    tables = [PageTable.decode(sender.table.encode()) for sender in senders]
    for receiver in receivers:
        assert uncovered(receiver.table, tables) == []
        for index, sender in enumerate(senders):
            fragments = Mapping(tables[index], receiver.table).fragments(sender.pages, receiver.pages, turn)
            if not overlaps(tables[index], receiver.table):
                assert not len(fragments)
            receiver.receive(sender, fragments)
            made[index, receivers.index(receiver)] = fragments
        receiver.verify()
    return made


HYBRID = [
    lambda heads: attention(0, heads),
    lambda heads: attention(1, heads, size=4, retention=Window(12)),
    lambda heads: Layer(2, [Stream("index_k", RowFormat((10,), "int16"), History(), tokens_per_row=4)]),
    lambda heads: Layer(
        3,
        [
            Stream("conv", RowFormat((2 * heads + 8, 3), "int16"), State(), sharding=Sections((heads, heads, 8))),
            Stream("ssm", RowFormat((heads, 5), "int16"), State(), sharding=Heads(heads)),
        ],
    ),
]


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("page_layout", [RowMajor(), UnitMajor()], ids=["rows", "units"])
def test_every_pair_of_tensor_parallel_sizes(heads, page_layout):
    model = Model(spec_of(*(layer(heads) for layer in HYBRID)), length=LENGTH)
    for send, receive, turn in itertools.product((1, 2, 4), (1, 2, 4), (0, 5)):
        senders = [rank.fill() for rank in ranks(model, send, page_layout=page_layout)]
        move(senders, ranks(model, receive, page_layout=page_layout, seed=2), turn)


@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (16, 16)])
def test_tiles_of_keys_stay_whole(blocks):
    model = Model(spec_of(attention(0, 4, size=8), attention(1, 4, size=8)), length=64)
    for send, receive in itertools.product((1, 2), (1, 4)):
        senders = [r.fill() for r in ranks(model, send, page_layout=KeyTiles(), block_tokens=blocks[0])]
        move(senders, ranks(model, receive, page_layout=KeyTiles(), block_tokens=blocks[1], seed=2))


@pytest.mark.parametrize("page_layout", [RowMajor(), UnitMajor()], ids=["rows", "units"])
@pytest.mark.parametrize("blocks", [(4, 8), (8, 4), (4, 16), (16, 4)])
def test_blocks_of_other_sizes(blocks, page_layout):
    model = Model(spec_of(*(layer(4) for layer in HYBRID)), length=48)
    for send, receive in itertools.product((1, 2), (1, 4)):
        senders = [r.fill() for r in ranks(model, send, page_layout=page_layout, block_tokens=blocks[0])]
        move(senders, ranks(model, receive, page_layout=page_layout, block_tokens=blocks[1], seed=2))


@pytest.mark.parametrize(("send", "receive", "rows"), [(4, 8, 44), (8, 4, 44)])
def test_an_odd_count_of_smaller_blocks(send, receive, rows):
    # 11 blocks of 4, or 5 of 8 and half a sixth.
    model = Model(spec_of(attention(0, 2)), length=44)
    (sender,) = [r.fill() for r in ranks(model, 1, block_tokens=send)]
    (receiver,) = ranks(model, 1, block_tokens=receive, seed=2)
    if send < receive:
        fragments = Mapping(sender.table, receiver.table)
        sender.pages = [np.append(sender.pages[0], np.int32(-1))]
        with pytest.raises(TransferError, match="block 5 is wanted and not here"):
            fragments.fragments(sender.pages, receiver.pages)
        receiver.drop(0, [5])
    move([sender], [receiver])
    assert int(receiver.counts.sum()) == (40 if send < receive else 44) * 2 * 2 * 12


def test_what_the_receiver_has_is_not_sent():
    model = Model(spec_of(*(layer(2) for layer in HYBRID)), length=LENGTH)
    for cached in ([], [0], [0, 1, 2], range(6)):
        (sender,) = [r.fill() for r in ranks(model, 1)]
        receivers = ranks(model, 2, seed=2)
        for receiver in receivers:
            receiver.drop(0, cached)
        move([sender], receivers)


def test_what_the_window_has_left_is_not_sent():
    model = Model(spec_of(*(layer(2) for layer in HYBRID)), length=LENGTH)
    (sender,) = [r.fill() for r in ranks(model, 1)]
    (receiver,) = ranks(model, 1, seed=2)
    window = next(index for index, group in enumerate(sender.table.groups) if "Window" in group.retention)
    sender.drop(window, [0, 1, 2])
    receiver.drop(window, [0, 1, 2, 3])
    move([sender], [receiver])
    receiver = ranks(model, 1, seed=2)[0]
    receiver.drop(window, [0, 1])
    with pytest.raises(TransferError) as error:
        Mapping(sender.table, receiver.table).fragments(sender.pages, receiver.pages)
    assert str(error.value) == (
        "group target/Window(tokens=12, sinks=0): block 2 is wanted and not here\n"
        "hint: ask for no more blocks than the sender has computed"
    )


def test_the_receiver_may_have_room_for_less_and_the_sender_more():
    model = Model(spec_of(attention(0, 2)), length=LENGTH)
    (sender,) = [r.fill() for r in ranks(model, 1)]
    (receiver,) = ranks(model, 1, seed=2)
    receiver.pages = [receiver.pages[0][:3]]
    move([sender], [receiver])


@pytest.mark.parametrize("stages", [([0, 1, 2, 3],), ([0], [1, 2, 3]), ([0, 1], [2], [3]), ([3, 0], [1, 2])])
def test_uneven_pipeline_stages(stages):
    model = Model(spec_of(*(layer(2) for layer in HYBRID)), length=LENGTH)
    for other in (([0, 1, 2, 3],), ([0, 1, 2], [3])):
        senders = [r.fill() for layers in stages for r in ranks(model, 2, layers=layers)]
        move(senders, [r for layers in other for r in ranks(model, 1, layers=layers, seed=3)])


@pytest.mark.parametrize(("send", "receive"), [(1, 4), (4, 1), (2, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("block", [8, 4])
def test_interleaved_blocks_of_context_parallel_ranks(send, receive, block):
    model = Model(spec_of(*(layer(2) for layer in HYBRID)), length=LENGTH)
    senders = [
        Rank(model, placement=Placement(tensor, 2, context, send)).fill()
        for context in range(send)
        for tensor in range(2)
    ]
    receivers = [
        Rank(model, placement=Placement(0, 1, context, receive), seed=2, block_tokens=block if send == 1 else None)
        for context in range(receive)
    ]
    made = move(senders, receivers)
    # Sizes are sums of what is really sent: 43 tokens are 6 blocks of 8, and 4 ranks have 2, 2, 1 and 1 of them.
    if (send, receive, block) == (1, 4, 8):
        history = 8 * (2 * 2 * 12) + 2 * 20
        window, state = 8 * (2 * 2 * 8), (2 + 2 + 8) * 6 + 2 * 10
        sent = [sum(made[sender, rank].byte_count for sender in range(2)) for rank in range(4)]
        assert sent == [blocks * (history + window) + state for blocks in (2, 2, 1, 1)]


def test_positions_of_interleaved_blocks():
    pages = np.array([7, 3, 9], np.int32)
    assert interleave(pages, 1, 3, 8).tolist() == [-1, 7, -1, -1, 3, -1, -1, 9]
    assert interleave(pages[:2], 0, 1, 2).tolist() == [7, 3]


def test_replicas_take_turns():
    # What no rank splits is sent by one of four; by which one depends on the request and on nothing else.
    model = Model(
        spec_of(Layer(0, [Stream("kv", RowFormat((16,), "int16"), History(), sharding=Replicated())])), length=LENGTH
    )
    senders, receivers = [r.fill() for r in ranks(model, 4)], ranks(model, 2, seed=2)
    for turn in range(8):
        for receiver in receivers:
            receiver.counts[:] = 0
        made = move(senders, receivers, turn)
        assert [[len(made[s, r]) > 0 for s in range(4)].index(True) for r in range(2)] == [turn % 4, (turn + 1) % 4]


def test_two_heads_on_four_ranks():
    # Ranks 0 and 1 have head 0, ranks 2 and 3 head 1; back on one rank both heads arrive, from one rank of each pair.
    model = Model(spec_of(attention(0, 2)), length=LENGTH)
    (one,) = [r.fill() for r in ranks(model, 1)]
    four = ranks(model, 4, seed=2)
    move([one], four)
    table = [rank.table.groups[0].parts[0] for rank in four]
    assert [(part.shards, part.shard, part.replicas, part.replica) for part in table] == [
        (2, 0, 2, 0),
        (2, 0, 2, 1),
        (2, 1, 2, 0),
        (2, 1, 2, 1),
    ]
    (back,) = ranks(model, 1, seed=3)
    made = move(four, [back], 1)
    assert [len(made[sender, 0]) > 0 for sender in range(4)] == [False, True, False, True]
    partial = [rank.table for rank in four[:2]]
    assert uncovered(back.table, partial) == [
        "target layer 0 stream 'k': nobody has 1 of 2 units",
        "target layer 0 stream 'v': nobody has 1 of 2 units",
    ]


def test_a_state_of_sections():
    # [q:2 | k:2 | v:4] on two ranks: rank 1 gets q[1], k[1], v[2..3].
    stream = Stream("conv", RowFormat((8, 1), "int16"), State(), sharding=Sections((2, 2, 4)))
    model = Model(spec_of(Layer(0, [stream])), length=LENGTH)
    (sender,) = [r.fill() for r in ranks(model, 1)]
    receivers = ranks(model, 2, seed=2)
    move([sender], receivers)
    page = receivers[1].pages[0][0] * receivers[1].layout.groups[0].page_bytes
    got = receivers[1].memory[page : page + 8].reshape(4, 2)
    assert np.array_equal(got, model.rows["target", 0, "conv"][0, [1, 3, 6, 7]])


def test_a_draft_model_on_one_side_only():
    draft = CacheSpec([attention(0, 1)], 8, "draft", domain="draft")
    model = Model(spec_of(attention(0, 2)), draft, length=LENGTH)
    for sender_drafts, receiver_drafts in itertools.product((True, False), repeat=2):
        (sender,) = [r.fill() for r in ranks(model, 1, drafts=sender_drafts)]
        (receiver,) = ranks(model, 1, seed=2, drafts=receiver_drafts)
        if receiver_drafts and not sender_drafts:
            receiver.pages[1][:] = -1
        move([sender], [receiver])


def test_runs_that_follow_each_other_are_one():
    model = Model(spec_of(attention(0, 2, size=4), attention(1, 2, size=4)), length=LENGTH)
    (sender,), (receiver,) = [r.fill() for r in ranks(model, 1)], ranks(model, 1, seed=2)
    # Two layers of keys and values of 8 * 2 * 4 * 2 = 128 bytes fill a page without padding.
    sender.pages[0][:] = [9, 10, 11, 20, 21, 30]
    sender.fill()
    receiver.pages[0][:] = [1, 2, 3, 4, 40, 41]
    made = move([sender], [receiver])[0, 0]
    assert made.byte_counts.tolist() == [3 * 512, 512, 512, 512]


def test_forty_eight_thousand_fragments_are_quick_to_prepare():
    # The figure is `transfer.prepare_48k_ms`; here only that it is a matter of milliseconds.
    model = Model(spec_of(attention(0, 8)), length=8)
    (sender,), receivers = [r.fill() for r in ranks(model, 1)], ranks(model, 2, seed=2)
    mapping = Mapping(sender.table, receivers[0].table)
    pages = np.random.default_rng(0).permutation(3000).astype(np.int32)
    assert len(mapping.fragments([pages], [pages[::-1]])) == 3000 * 16


def refusal(sender, receiver):
    with pytest.raises(IncompatibleError) as error:
        Mapping(sender.table, receiver.table)
    assert error.value.hint == "build both from the same model, dtype and page layout"
    return error.value.message.removeprefix("the caches do not fit together: ")


BASE = spec_of(attention(0, 4))


@pytest.mark.parametrize(
    ("other", "options", "reason"),
    [
        (
            spec_of(attention(0, 4, dtype="bfloat16")),
            {},
            "target layer 0 stream 'k': dtype: the sender has int16, the receiver bfloat16; "
            "target layer 0 stream 'v': dtype: the sender has int16, the receiver bfloat16",
        ),
        (
            spec_of(attention(0, 4, size=12, dtype="int8")),
            {},
            "target layer 0 stream 'k': dtype: the sender has int16, the receiver int8; "
            "target layer 0 stream 'v': dtype: the sender has int16, the receiver int8",
        ),
        (
            spec_of(attention(0, 4, size=5)),
            {},
            "target layer 0 stream 'k': bytes of a unit: the sender has 12, the receiver 10; "
            "target layer 0 stream 'v': bytes of a unit: the sender has 12, the receiver 10",
        ),
        (
            spec_of(attention(0, 8, size=3)),
            {},
            "target layer 0 stream 'k': sections of a row: the sender has (4,), the receiver (8,); "
            "target layer 0 stream 'v': sections of a row: the sender has (4,), the receiver (8,)",
        ),
        (
            spec_of(attention(0, 4, retention=Window(4))),
            {},
            "target layer 0 stream 'k': retention: the sender has History(), the receiver Window(tokens=4, sinks=0); "
            "target layer 0 stream 'v': retention: the sender has History(), the receiver Window(tokens=4, sinks=0)",
        ),
        (BASE, {"page_layout": UnitMajor("row-major-1")}, None),
        (
            BASE,
            {"block_tokens": 12},
            "block tokens, of which one must divide the other: the sender has 8, the receiver 12",
        ),
        (
            CacheSpec([attention(0, 4)], 8, "other"),
            {},
            "fingerprint of the target model: the sender has model, the receiver other",
        ),
        (
            CacheSpec([attention(0, 4)], 8, "model", domain="draft"),
            {},
            "domains: the sender has ['target'], the receiver ['draft']",
        ),
    ],
)
def test_caches_that_do_not_fit(other, options, reason):
    (sender,) = ranks(Model(BASE, length=LENGTH), 1)
    (receiver,) = ranks(Model(other, length=LENGTH), 1, **options)
    found = refusal(sender, receiver)
    if reason is None:
        reason = "; ".join(
            f"target layer 0 stream {name!r}: order: the sender has row after row, runs of 1, "
            "the receiver unit after unit, runs of 1"
            for name in "kv"
        )
    assert found == reason


def test_another_page_layout_and_another_version():
    model = Model(BASE, length=LENGTH)
    (sender,), (receiver,) = ranks(model, 1), ranks(model, 1, page_layout=UnitMajor())
    assert refusal(sender, receiver).startswith(
        "page layout: the sender has row-major-1, the receiver unit-major-test; "
    )
    newer = PageTable.decode(sender.table.encode().replace(b"\x98\x01", b"\x98\x02", 1))
    sender.table = newer
    assert refusal(sender, receiver) == "wire version: the sender has 2, the receiver 1"


def test_a_layout_that_says_nothing_moves_whole_pages_only():
    model = Model(spec_of(*(layer(2) for layer in HYBRID)), length=LENGTH)
    move([r.fill() for r in ranks(model, 2, page_layout=Opaque())], ranks(model, 2, page_layout=Opaque(), seed=2))
    reason = (
        "its page layout does not say where rows and units lie, so blocks and tensor-parallel ranks must be the same"
    )
    (sender,) = ranks(model, 1, page_layout=Opaque())
    for options in ({"block_tokens": 16}, {"placement": Placement(0, 2)}):
        assert reason in refusal(sender, Rank(model, page_layout=Opaque(), **options))


def test_rings_and_tiles_keep_their_blocks():
    model = Model(spec_of(attention(0, 2, retention=Window(4, ring=8))), length=LENGTH)
    (sender,) = [r.fill() for r in ranks(model, 1)]
    move([sender], ranks(model, 2, seed=2))
    assert refusal(sender, ranks(model, 1, block_tokens=16)[0]) == (
        "target layer 0 stream 'k': rows of rings belong to their block, and the blocks differ; "
        "target layer 0 stream 'v': rows of rings belong to their block, and the blocks differ"
    )
    model = Model(spec_of(attention(0, 2)), length=LENGTH)
    (sender,) = ranks(model, 1, block_tokens=32, page_layout=KeyTiles())
    (receiver,) = ranks(model, 1, block_tokens=8, page_layout=KeyTiles())
    assert refusal(sender, receiver) == (
        "target layer 0 stream 'k': order: the sender has unit after unit, runs of 16, "
        "the receiver unit after unit, runs of 8"
    )


def test_a_receiver_that_needs_more_than_anybody_has():
    model = Model(spec_of(*(layer(2) for layer in HYBRID)), length=LENGTH)
    (all_layers,) = ranks(model, 1)
    (some,) = ranks(model, 1, layers=[0, 1, 2])
    assert uncovered(all_layers.table, [some.table]) == [
        "target layer 3 stream 'conv': nobody has 12 of 12 units",
        "target layer 3 stream 'ssm': nobody has 2 of 2 units",
    ]
    assert uncovered(some.table, [all_layers.table]) == []
    half = Rank(model, placement=Placement(context_rank=1, context_count=2))
    assert uncovered(some.table, [half.table])[0] == (
        "target layer 0 stream 'k': nobody has 2 of 2 units of blocks 0, 2, ..."
    )


def test_specs_of_ranks():
    split = rank_spec(spec_of(attention(0, 6)), 4)
    assert split.layers[0].streams[0].row.shape == (3, 6) and split.fingerprint == "model"
    scaled = RowFormat((4, 6), "int8", ScaleFormat(4))
    spec = spec_of(Layer(0, [Stream("k", scaled, History(), sharding=Heads(4))]))
    assert rank_spec(spec, 3) == spec
    with pytest.raises(SpecError) as error:
        rank_spec(spec, 2)
    assert str(error.value) == (
        "layer 0 stream 'k': rows with scales cannot be split over 2 ranks\n"
        "hint: store the scales as a stream of their own, with a sharding of their own"
    )
    with pytest.raises(SpecError) as error:
        rank_spec(spec_of(Layer(0, [Stream("k", RowFormat((4,), "int8"), History(), sharding=Heads(2))])), 2)
    assert str(error.value) == "layer 0 stream 'k': its sharding is of 2 units, its rows have the shape (4,)"
    with pytest.raises(SpecError) as error:
        rank_spec(spec, 0)
    assert str(error.value) == "0 tensor-parallel ranks"
    with pytest.raises(SpecError) as error:
        Placement(2, 2)
    assert error.value.hint == "ranks count from 0 and are below their count"
    (rank,) = ranks(Model(spec_of(attention(0, 4)), length=8), 1)
    with pytest.raises(SpecError) as error:
        describe(rank.layout, Placement(0, 2))
    assert str(error.value) == (
        "layer 0 stream 'k': each of 2 tensor-parallel ranks keeps 2 of 4 units, and the rows have the shape (4, 6)\n"
        "hint: build the layout from rank_spec() of the model's spec"
    )


def test_rows_with_scales_move_whole():
    row = RowFormat((2, 6), "int8", ScaleFormat(2))
    stream = Stream("kv", row, History(), sharding=Replicated())
    model = Model(spec_of(Layer(0, [stream])), length=48)
    (sender,) = [r.fill() for r in ranks(model, 1, block_tokens=4)]
    move([sender], ranks(model, 2, seed=2, block_tokens=16))
    receivers = ranks(model, 1, page_layout=UnitMajor(), block_tokens=16)
    (sender,) = ranks(model, 1, page_layout=UnitMajor())
    assert "its page layout does not say" in refusal(sender, receivers[0])


def test_what_is_no_page_table():
    with pytest.raises(TransferError) as error:
        PageTable.decode(b"\x01")
    assert str(error.value).startswith("this is no page table: ")
    assert error.value.hint == "run the same version of kvist on both sides"
