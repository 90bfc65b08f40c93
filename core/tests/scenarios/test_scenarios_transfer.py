"""Scenarios of area H, transfers between processes, and public reports about transceivers, "rows" of that table."""

from __future__ import annotations

import os
import threading

import pytest
from transfer_nodes import MIXES, WEAK, Nodes
from transfer_world import LENGTH, LocalWorld

from kvist.errors import RequestError
from kvist.manager import Run
from kvist.testing.transfer import TransceiverTests
from kvist.transfer.faults import Fault
from kvist.transfer.local import LOCAL
from kvist.transfer.outcome import DONE, Status
from kvist.transfer.transport import Connected, PeerDown, TransportContext

HISTORY = MIXES["history"]


def held(node):
    return sum(group.held for group in node.manager.stats().groups)


def prefilled(node, length, first=0):
    sequence = node.open(range(first, first + length))
    node.prefill(sequence)
    return sequence


@pytest.mark.parametrize("capabilities", [LOCAL, WEAK], ids=["fenced", "weak"])
def test_a_late_write_never_meets_the_next_owner(capabilities):
    """42 (a), (c), row 12: a pool for one request, aborted while its write is under way. Where writes cannot be shut
    out the next request has to wait; where they can, it runs at once, and the write is refused."""
    nodes = Nodes(HISTORY, Fault("late", "write"), pages=6, capabilities=capabilities)
    nodes.prefill.transfers.send("r", prefilled(nodes.prefill, 8))
    receiving = nodes.decode.receive("r", 8, nodes.prefill)
    nodes.run()
    nodes.decode.transfers.cancel(receiving)
    nodes.run()
    following = nodes.decode.open(range(500, 519))
    fits = nodes.decode.manager.plan([Run(following, 19)]).fits
    assert fits is capabilities.grants
    if not fits:
        assert held(nodes.decode) == 2
        nodes.network.release()
        nodes.run()
    nodes.decode.prefill(following)
    nodes.network.release()
    nodes.run()
    nodes.decode.decode(following, 1)
    nodes.decode.close(following)
    nodes.drained()


def test_nothing_else_going_on():
    """42 (b), row 4: the word that never comes, and no other work: the deadline gives the pages back all the same."""
    nodes = Nodes(HISTORY, Fault("drop", "message", count=10**6, contains=b"evidence"))
    nodes.prefill.transfers.send("r", prefilled(nodes.prefill, 8))
    receiving = nodes.decode.receive("r", 8, nodes.prefill, deadline_s=5)
    nodes.run(4)
    assert held(nodes.decode) > 0
    nodes.run(2)
    assert receiving.outcome.status is Status.TIMED_OUT and held(nodes.decode) == 0
    nodes.drained()


def test_a_cancel_of_the_sender_while_it_is_read():
    """42 (d), (e), row 3: its pages stay until the write has its answer; without one the receiver learns of it at once.

    A receiver to whom everything was written nevertheless may use it: all of it is right."""
    nodes = Nodes(HISTORY, Fault("hold", "write"))
    sending = nodes.prefill.transfers.send("r", prefilled(nodes.prefill, 8))
    receiving = nodes.decode.receive("r", 8, nodes.prefill)
    nodes.run()
    nodes.prefill.transfers.cancel(sending)
    nodes.run()
    assert sending.outcome.status is Status.CANCELLED and held(nodes.prefill) > 0
    nodes.network.release()
    nodes.run()
    assert held(nodes.prefill) == 0 and receiving.outcome == DONE
    nodes.decode.close(nodes.decode.taken(receiving))
    early = nodes.prefill.transfers.begin("s")
    receiving = nodes.decode.receive("s", 8, nodes.prefill, first=600)
    nodes.prefill.transfers.cancel(early)
    nodes.run()
    assert not receiving.outcome.ok and receiving.outcome.reason.endswith("it was cancelled")
    nodes.drained()


def test_ids_of_requests():
    """43, rows 15, 23: an id in use is refused and its owner goes on; samples have ids of their own; what nobody has
    written is not ready; a request that is tried again has another attempt, and nothing of the old one counts."""
    nodes = Nodes(HISTORY, Fault("late", "message", contains=b"evidence"))
    first = nodes.prefill.transfers.send("7", prefilled(nodes.prefill, 8))
    receiving = nodes.decode.receive("7", 8, nodes.prefill)
    with pytest.raises(RequestError):
        nodes.decode.receive("7", 8, nodes.prefill)
    other = prefilled(nodes.prefill, 8, 100)
    with pytest.raises(RequestError):
        nodes.prefill.transfers.send("7", other)
    nodes.run()
    assert first.outcome == DONE and receiving.outcome is None
    nodes.decode.transfers.cancel(receiving)
    nodes.run()
    nodes.prefill.transfers.send("7 again", other)
    again = nodes.decode.receive("7 again", 8, nodes.prefill, first=100)
    assert again.session.attempt != receiving.session.attempt
    nodes.network.release()
    nodes.run()
    assert again.outcome == DONE and not receiving.outcome.ok
    nodes.decode.decode(nodes.decode.taken(again), 1)
    nodes.decode.close(again.sequence)
    sample = prefilled(nodes.prefill, 8, 200)
    samples = [nodes.prefill.manager.fork(sample) for _ in range(2)]
    for number, sequence in enumerate([sample, *samples]):
        nodes.prefill.transfers.send(f"sample {number}", sequence)
    results = [nodes.decode.receive(f"sample {number}", 8, nodes.prefill, first=200) for number in range(3)]
    nodes.run()
    assert [each.outcome for each in results] == [DONE] * 3
    nodes.decode.close(*(nodes.decode.taken(each) for each in results))
    nodes.drained()


def test_a_second_generation_under_the_old_name():
    """47, rows 15, 20: what was prepared for a process that has ended goes neither to it nor to its successor."""
    world = LocalWorld(Fault("hold", "write"))
    sender, receiver = world.pair()
    sender.offer("h1"), sender.offer("h2")
    stale = receiver.hello()
    asked = receiver.ask(sender, request="h1")
    world.run()
    world.kill(receiver)
    second = world.process("receiver")
    world.network.release()
    world.run()
    assert second.untouched and not asked.quiescent  # The dead one's session is nobody's any more.
    sessions = [sender.transceiver._outgoing.get(name) for name in ("h1", "h2")]
    assert sessions[0] is None and sessions[1] is not None and sender.stats.failed == 1
    good = second.ask(sender, request="h2")
    world.run()
    assert good.outcome == DONE
    second.verify()
    late = second.transceiver.receive("h3", second.rank.pages, LENGTH, [stale])
    world.run()
    assert "nobody is there" in late.outcome.reason


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_another_process_at_the_old_address(scheme):
    """47, rows 20, 21: whoever answers at an address has to be the one that was meant."""
    from kvist.transfer.shm import ShmTransport
    from kvist.transfer.tcp import TcpTransport

    make = {"tcp": TcpTransport, "shm": ShmTransport}[scheme]
    ours, old = make(TransportContext("ours")), make(TransportContext("p0"))
    stale, port = old.hello(), old._port
    old.close()
    new = make(TransportContext("p1", f"{scheme}://127.0.0.1:{port}"))
    peer = ours.connect(stale)
    ours.message(peer, b"for p0")
    (down,) = ours.poll(5)
    assert down == PeerDown(peer, "it has ended, or another one has its address")
    assert new.poll(0.05) == []
    ours.disconnect(peer)
    ours.poll(5)
    again = ours.connect(new.hello())
    assert ours.poll(5) == [Connected(again)]
    for each in (ours, new):
        each.close()


def test_reports_that_come_twice_and_at_once():
    """48: the first report counts. A request without anything to fetch is there at once; "sent" and "received" of one
    request may come in one poll after it was aborted."""
    nodes = Nodes(HISTORY, Fault("duplicate", "message", contains=b"evidence", count=3))
    node = nodes.decode
    nodes.prefill.transfers.send("r", prefilled(nodes.prefill, 8))
    receiving = node.receive("r", 8, nodes.prefill)
    nodes.run()
    assert receiving.outcome == DONE and node.transceiver.stats().odd_evidence == 1
    node.decode(node.taken(receiving), 3)
    there = node.receive("nothing to fetch", 8, nodes.prefill)
    assert there.sequence is not None
    node.close(receiving.sequence, there.sequence)
    # This one sends and receives at the same time.
    back = node.transfers.send("x", prefilled(node, 8, 300))
    forth = node.receive("x", 8, nodes.prefill, first=400)
    node.transfers.cancel(back)
    node.transfers.cancel(forth)
    nodes.run()
    assert back.outcome.status is forth.outcome.status is Status.CANCELLED
    nodes.run(12)
    nodes.drained()


def test_a_small_pool_does_not_deadlock_with_a_slow_receiver():
    """Row 5: waiting sends fill the sender's pool; what arrives needs no compute step of the receiver."""
    nodes = Nodes(HISTORY, pages=13)
    waiting = []
    for number in range(4):
        waiting.append(nodes.prefill.transfers.send(f"r{number}", prefilled(nodes.prefill, 10, 100 * number)))
    full = nodes.prefill.open(range(900, 912))
    assert not nodes.prefill.manager.plan([Run(full, 12)]).fits
    receiving = nodes.decode.receive("r2", 10, nodes.prefill, first=200)
    nodes.run()
    assert receiving.outcome == DONE and waiting[2].outcome == DONE
    assert nodes.prefill.manager.plan([Run(full, 12)]).fits
    nodes.prefill.close(full)
    nodes.decode.close(nodes.decode.taken(receiving))
    for each in waiting:
        nodes.prefill.transfers.cancel(each)
    nodes.drained()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_ten_thousand_requests_leave_nothing(scheme):
    """42, TR-39: 10 % are cancelled; sessions, threads, descriptors and shared memory are back at zero."""

    class Many(TransceiverTests):
        factory = {"tcp": "kvist.transfer.tcp:TcpTransport", "shm": "kvist.transfer.shm:ShmTransport"}[scheme]

    def counts():
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvist"))
        return names, len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm")), _mappings()

    before = counts()
    Many()._many(10_000)
    assert counts() == before


def _mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvist" in line for line in maps)
