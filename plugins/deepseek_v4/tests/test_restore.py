"""Which rows are needed to go on: by hand, by moving nothing else to another cache, and as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache, tokens
from deepseek_v4_models import tiny

from kvist.manager import Run
from kvist.step import NO_PAGE
from kvist_deepseek_v4.restore import Rows, droppable_below, needs_state, restore_rows
from kvist_deepseek_v4.rows import StreamRows
from kvist_deepseek_v4.sizes import admission_bytes
from kvist_deepseek_v4.spec import cache_spec

#: Layers 0, 1 and 2 of the tiny model have one of each kind; window 8, ratios 4 and 16.
SLIDING, SPARSE, HEAVY = 0, 1, 2


def spec(block=16):
    return cache_spec(tiny().config.to_dict(), block_tokens=block, dtype="float32")


def rows(length, layer):
    return {each.stream: (each.begin, each.end) for each in restore_rows(spec(), length) if each.layer_id == layer}


def test_restore_rows_by_hand():
    assert rows(3, SLIDING) == {"kv": (0, 3)}
    assert rows(30, SLIDING) == {"kv": (23, 30)}
    # Before the first window is closed only its open rows are there.
    assert rows(3, SPARSE) == {"kv": (0, 3), "state": (0, 3), "index_state": (0, 3)}
    # At an aligned length the closed window still has its first series to give.
    last = {"kv": (25, 32), "compressed": (0, 8), "state": (28, 32), "index_k": (0, 8), "index_state": (28, 32)}
    assert rows(32, SPARSE) == last
    assert rows(34, SPARSE) == {**last, "kv": (27, 34), "state": (28, 34), "index_state": (28, 34)}
    # Where windows do not overlap an aligned length needs none.
    assert rows(32, HEAVY) == {"kv": (25, 32), "compressed": (0, 2)}
    assert rows(37, HEAVY) == {"kv": (30, 37), "compressed": (0, 2), "state": (32, 37)}
    assert needs_state(spec(), 32) == {4} and needs_state(spec(), 37) == {4, 16} and needs_state(spec(), 0) == set()


def test_what_may_be_dropped():
    dropped = {each.stream: each.end for each in droppable_below(spec(), 37) if each.layer_id == SPARSE}
    assert dropped == {"kv": 30, "state": 32, "index_state": 32}
    # After taking three back, 34 is the length: rows below 27, and the window before the one that is then open.
    dropped = {each.stream: each.end for each in droppable_below(spec(), 37, rollback=3) if each.layer_id == SPARSE}
    assert dropped == {"kv": 27, "state": 28, "index_state": 28}
    assert Rows(HEAVY, "state", 0, 32) in droppable_below(spec(), 37)
    assert droppable_below(spec(), 0) == ()


@pytest.mark.parametrize("length", [15, 16, 17, 33, 36, 47, 48, 64])
@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16)])
def test_another_cache_goes_on_with_these_rows_alone(length, here, there):
    """Sent by position, between caches of other page sizes and rings: the receiver works out its own slots."""
    with Cache(block=here, alone=True, seed=1) as sender:
        request = sender.open(length + 20, 21)
        sender.step([(request, length)])
        sent = []
        for each in restore_rows(sender.spec, length):
            stream, table = _stream(sender, each, request.sequence)
            sent.append((each, stream.load(table, each.begin, each.end)))
    with Cache(block=there, alone=True, seed=2) as receiver:
        other = receiver.open(length + 20, 21)
        # Pages and length as if it had computed them itself.
        step = receiver.manager.plan([Run(other.sequence, length)]).commit()
        receiver.memory.bytes.fill_(255)
        for each, content in sent:
            stream, table = _stream(receiver, each, other.sequence)
            stream.store(table, each.begin, content)
        receiver.manager.complete(step)
        receiver.step([(other, 1)])
        receiver.step([(other, 19)])


@pytest.mark.parametrize("length", [33, 39, 48])
@pytest.mark.parametrize("block", [16, 64])
def test_handed_over_in_whole_pages(length, block):
    """Between two caches whose pages lie elsewhere: every group's pages by position, and nothing but what is asked for,
    of which the sender has more than the receiver knows already."""
    prompt = tokens(length + 20, 8)
    with Cache(block=block, seed=1) as sender:
        sequence = sender.manager.open(prompt[:length])
        sender.compute(sequence, 7)
        hold = sender.manager.hand_over(sequence)
    with Cache(block=block, seed=2) as receiver:
        known = receiver.manager.open(prompt[:16])
        receiver.compute(known)
        receiver.manager.close(known)
        landing = receiver.manager.land(prompt, length=length)
        for group, (there, here) in enumerate(zip(hold.pages, landing.pages, strict=True)):
            wanted = np.flatnonzero(here != NO_PAGE)
            assert (there[wanted] != NO_PAGE).all()
            pages = sender.memory.pages(group)[torch.from_numpy(there[wanted]).long()]
            receiver.memory.pages(group)[torch.from_numpy(here[wanted]).long()] = pages
        arrived = receiver.manager.landed(landing)
        hold.release()
        assert arrived.computed == length
        receiver.compute(arrived, 6)


def _stream(cache, rows, sequence):
    layer = next(layer for layer in cache.spec.layers if layer.id == rows.layer_id)
    stream = next(stream for stream in layer.streams if stream.name == rows.stream)
    found = StreamRows.of(cache.memory, rows.layer_id, stream)
    return found, cache.manager._tables.arrays[found.group][sequence.slot]


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("chunk", [3, 16, 40])
def test_admission_bounds_what_is_held(block, chunk):
    """By kind, at every step of a sequence: no less than its pages, and no more than a tenth over their sum."""
    with Cache(block=block, alone=True, drafts=2) as cache:
        request = cache.open(200, 1)
        while (length := request.sequence.computed) < 150:
            estimate = admission_bytes(cache.layout, length, chunk, 2)
            step, _ = cache.commit([(request.sequence, chunk + 2, 2)])
            held = {}
            for group in cache.layout.groups:
                table = step.tables[group.index][step.slots[0]]
                held[group.name] = int(np.count_nonzero(table != NO_PAGE)) * group.page_bytes
            assert all(estimate[name] >= held[name] for name in held)
            assert sum(estimate.values()) <= 1.1 * sum(held.values())
            cache.manager.complete(step, [chunk])


def test_a_position_is_read_where_it_was_written():
    """Rows of every kind, written in one go over three blocks, come back; a ring keeps the last of each block."""
    for block in (16, 64):
        with Cache(block=block, alone=True) as cache:
            request = cache.open(180)
            cache.manager.plan([Run(request.sequence, 150)]).commit()
            for layer in cache.spec.layers[:3]:
                for stream in layer.streams:
                    found, table = _stream(cache, Rows(layer.id, stream.name, 0, 0), request.sequence)
                    count = 150 // stream.tokens_per_row
                    content = torch.arange(count, dtype=torch.float32).view(-1, *[1] * len(stream.row.shape))
                    found.write(table, 0, content.expand(-1, *stream.row.shape))
                    for end in range(found.block_rows, count + 1, found.block_rows):
                        begin = end - found.slots
                        assert torch.equal(
                            found.read(table, begin, end), content[begin:end].expand(-1, *stream.row.shape)
                        )
