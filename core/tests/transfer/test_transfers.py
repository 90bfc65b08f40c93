"""Requests that are computed by one manager and go on at another: by value, with junk in every free page."""

from __future__ import annotations

import time

import numpy as np
import pytest
from transfer_nodes import MIXES, WEAK, Nodes

from kvist.errors import CapacityError, RequestError, TransferError
from kvist.manager import Run
from kvist.testing.values import tokens
from kvist.transfer.background import Background
from kvist.transfer.faults import Fault
from kvist.transfer.local import LOCAL
from kvist.transfer.outcome import Status

each_mix = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


@each_mix
@pytest.mark.parametrize("chunk", [100, 5])
def test_a_request_goes_on_elsewhere(mix, chunk):
    nodes = Nodes(mix)
    prefill, decode = nodes.prefill, nodes.decode
    sending = prefill.transfers.begin("r")
    receiving = decode.receive("r", 18, prefill)
    sequence = prefill.open(range(18))
    while sequence.computed < 18:
        prefill.run(Run(sequence, min(chunk, 18 - sequence.computed)))
        prefill.transfers.advance(sending, sequence)
        nodes.run()
    prefill.transfers.finish(sending, sequence, b"token")
    assert sequence.closed and prefill.manager.stats().open_sequences == 0
    assert sorted(type(each).__name__ for each in nodes.run()) == ["Receiving", "Sending"]
    assert sending.outcome.ok and receiving.outcome.ok and receiving.payload == b"token"
    decode.decode(decode.taken(receiving), 7)
    decode.close(receiving.sequence)
    nodes.drained()


def test_a_session_that_ends_while_it_is_looked_at(monkeypatch):
    """Another thread polls the transceiver: rows may come between any two looks, and are never forgotten."""
    nodes = Nodes(MIXES["history"])
    prefill, decode = nodes.prefill, nodes.decode
    receiving = decode.receive("r", 17, prefill)
    sequence = prefill.open(range(17))
    prefill.prefill(sequence)
    prefill.transfers.send("r", sequence)
    take_in = decode.transfers._take_in

    def slow(each):
        take_in(each)
        if receiving.outcome is None:
            for _ in range(20):
                prefill.transceiver.poll()
                decode.transceiver.poll()
                nodes.network.advance(0)

    monkeypatch.setattr(decode.transfers, "_take_in", slow)
    while receiving.outcome is None:
        assert decode.transfers.poll() == []
    nodes.run()
    assert receiving.outcome.ok and receiving.sequence is not None
    decode.close(receiving.sequence)
    nodes.drained()


@each_mix
def test_second_turns_send_only_what_is_new(mix):
    nodes = Nodes(mix)
    prefill, decode = nodes.prefill, nodes.decode
    sizes = []
    for turn, length in enumerate((17, 33, 34)):
        sequence = prefill.open(range(length))
        prefill.prefill(sequence, chunk=6)
        prefill.transfers.send(f"r{turn}", sequence)
        receiving = decode.receive(f"r{turn}", length, prefill)
        nodes.run()
        assert receiving.outcome.ok
        sizes.append(receiving.session.byte_count)
        decode.decode(decode.taken(receiving), 3)
        decode.close(receiving.sequence)
    if mix is MIXES["history"]:
        # 5 blocks; then 9 without the 4 that are whole here; then nothing, because one token more was computed here.
        assert sizes == [5 * 128, 5 * 128, 0]
    nodes.drained()


def test_a_prefix_that_is_all_here_is_there_at_once():
    nodes = Nodes(MIXES["history"], Fault("drop", "message", count=1000))
    nodes.decode.turn(range(20))
    receiving = nodes.decode.receive("r", 16, nodes.prefill)
    assert receiving.sequence is not None and receiving.outcome is None
    nodes.decode.decode(nodes.decode.taken(receiving), 3)
    # Nobody waits for ever for what is only a payload.
    nodes.run(11)
    assert not receiving.outcome.ok and nodes.decode.transfers.open == 0
    nodes.decode.close(receiving.sequence)
    nodes.drained()


@each_mix
@pytest.mark.parametrize("weak", [False, True])
def test_pages_of_a_cancelled_request_wait_for_the_write(mix, weak):
    # Room for one request: the next one waits until the write has landed, and runs clean.
    nodes = Nodes(mix, Fault("late", "write"), pages=30, capabilities=WEAK if weak else LOCAL)
    prefill, decode = nodes.prefill, nodes.decode
    sequence = prefill.open(range(17))
    prefill.prefill(sequence)
    sending = prefill.transfers.send("r", sequence)
    receiving = decode.receive("r", 17, prefill)
    nodes.run()
    decode.transfers.cancel(receiving)
    nodes.run()
    assert receiving.outcome.status is Status.CANCELLED and receiving.sequence is None
    held = sum(group.held for group in decode.manager.stats().groups)
    assert (held > 0) == weak
    prefill_held = sum(group.held for group in prefill.manager.stats().groups)
    assert prefill_held > 0
    decode.turn(range(500, 515))
    nodes.network.release()
    nodes.run()
    assert nodes.decode.transfers.open == nodes.prefill.transfers.open == 0
    decode.turn(range(500, 517))
    assert not sending.outcome.ok
    nodes.drained()


@each_mix
def test_a_failed_transfer_is_computed_here(mix):
    nodes = Nodes(mix, Fault("kill_sender", "write"))
    prefill, decode = nodes.prefill, nodes.decode
    decode.turn(range(8))
    sequence = prefill.open(range(17))
    prefill.prefill(sequence)
    prefill.transfers.send("r", sequence)
    receiving = decode.receive("r", 17, prefill)
    for _ in range(8):
        prefill.transceiver.poll()
        decode.transceiver.poll()
    (over,) = decode.transfers.poll()
    assert over is receiving and not over.outcome.ok and receiving.sequence is None
    decode.audit()
    # What was half written is nowhere; what was here before still is.
    assert decode.probe(range(17)) <= 8
    decode.turn(range(17))
    decode.drained()


def test_what_goes_wrong_before_it_begins_changes_nothing():
    nodes = Nodes(MIXES["history"], pages=10)
    prefill, decode = nodes.prefill, nodes.decode
    with pytest.raises(RequestError):
        decode.transfers.receive("r", tokens(range(9)), [])
    with pytest.raises(CapacityError):
        decode.receive("r", 60, prefill)
    unused = prefill.open(range(9))
    with pytest.raises(Exception, match="hand_over"):
        prefill.transfers.send("r", unused)
    prefill.close(unused)
    nodes.run()
    nodes.drained()


def test_the_source_is_not_evicted_before_it_was_read():
    # Reuse on, a small pool, and eviction between the end of the prefill and the transfer.
    nodes = Nodes(MIXES["history+window"], pages=24)
    prefill, decode = nodes.prefill, nodes.decode
    sequence = prefill.open(range(17))
    prefill.prefill(sequence)
    prefill.transfers.send("r", sequence)
    for number in range(5):
        prefill.turn(range(1000 * number + 1000, 1000 * number + 1017))
    prefill.manager.clear()
    receiving = decode.receive("r", 17, prefill)
    nodes.run()
    decode.decode(decode.taken(receiving), 3)
    decode.close(receiving.sequence)
    nodes.drained()


def test_pages_come_back_without_other_work():
    # Nobody asks for what was computed, 60 times, in a pool for two: the deadline gives the pages back.
    nodes = Nodes(MIXES["history+state"], pages=24)
    for number in range(60):
        sequence = nodes.prefill.open(range(number * 100, number * 100 + 9))
        nodes.prefill.prefill(sequence)
        nodes.prefill.transfers.send(f"r{number}", sequence, deadline_s=1)
        nodes.run(1)
    nodes.run(1)
    assert nodes.prefill.transfers.open == 0
    nodes.drained()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@each_mix
def test_random_traffic(mix, seed):
    rng = np.random.default_rng(seed)
    faults = [
        Fault(rng.choice(["late", "hold", "fail", "drop"]), rng.choice(["write", "message", "answer"]), int(first))
        for first in rng.integers(0, 60, 6)
    ]
    faults = [fault for fault in faults if fault.kind == "write" or fault.action != "fail"]
    nodes = Nodes(mix, *faults, pages=80, capabilities=WEAK if seed == 1 else LOCAL)
    prefill, decode = nodes.prefill, nodes.decode
    arrived, running, good = [], [], 0
    for number in range(25):
        first, length = int(rng.integers(0, 3)) * 1000, int(rng.integers(1, 20))
        sequence = prefill.open(range(first, first + length))
        prefill.prefill(sequence, chunk=int(rng.integers(2, 9)))
        sending = prefill.transfers.send(f"r{number}", sequence)
        try:
            receiving = decode.receive(f"r{number}", length, prefill, first=first)
        except CapacityError:
            prefill.transfers.cancel(sending)
            decode.close(*running)
            running = []
            nodes.run(2)
            continue
        arrived.append(receiving)
        if rng.random() < 0.1:
            decode.transfers.cancel(receiving)
        if rng.random() < 0.1:
            prefill.transfers.cancel(sending)
        nodes.run(float(rng.random()))
        if rng.random() < 0.1:
            nodes.network.release()
        for each in [each for each in arrived if each.sequence is not None]:
            arrived.remove(each)
            running.append(decode.taken(each))
            good += 1
        for sequence in running:
            if decode.manager.plan([Run(sequence, 1)]).fits and rng.random() < 0.5:
                decode.decode(sequence, 1)
        if len(running) > 2:
            decode.close(running.pop(0))
    nodes.network.release()
    nodes.run(20)
    nodes.network.release()
    nodes.run(20)
    assert good > 2
    decode.close(*running, *(each.sequence for each in arrived if each.sequence is not None))
    nodes.drained()


def test_a_thread_keeps_it_going():
    nodes = Nodes(MIXES["history+window"])
    nodes.network.virtual = False
    prefill, decode = nodes.prefill, nodes.decode
    sequence = prefill.open(range(17))
    prefill.prefill(sequence)
    with Background(prefill.transceiver), Background(decode.transceiver):
        prefill.transfers.send("r", sequence)
        receiving = decode.receive("r", 17, prefill)
        for _ in range(500):
            if receiving.outcome is not None:
                break
            time.sleep(0.01)
    assert receiving.outcome.ok
    decode.transfers.poll()
    prefill.transfers.poll()
    decode.decode(decode.taken(receiving), 2)
    prefill.transceiver.transport.poll = None
    broken = Background(prefill.transceiver)
    with pytest.raises(TransferError) as error:
        broken.stop()
    assert str(error.value).startswith("transfers had stopped: TypeError: ")
