"""The local transport: what arrives where, in which order, and what its faults do."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import TransferError
from kvist.plugins import load, plan
from kvist.registry import Registry
from kvist.transfer.faults import Fault
from kvist.transfer.local import LOCAL, LocalTransport
from kvist.transfer.network import LocalNetwork, WriteRecord
from kvist.transfer.transport import (
    Closed,
    Connected,
    Done,
    Failed,
    Fragments,
    IncompatibleError,
    Message,
    PeerDown,
    Revoked,
    Transport,
    TransportContext,
)

SIZE = 4096


def ints(*values):
    return np.array(values, np.int64)


class End:
    """A local transport with one region of bytes of its own."""

    def __init__(self, network, name, **options):
        self.memory = np.zeros(SIZE, np.uint8)
        self.transport = LocalTransport(TransportContext(name), network, **options)
        self.region = self.transport.register(self.memory.ctypes.data, SIZE)

    def events(self):
        return self.transport.poll(0)


class Pair:
    """``a`` connected to ``b``, who has granted all of its memory as grant 7."""

    def __init__(self, *faults, **options):
        self.network = LocalNetwork(virtual=True, faults=faults)
        self.a, self.b = (End(self.network, name, **options) for name in "ab")
        self.a.memory[:] = np.arange(SIZE) % 251
        self.to_b = self.a.transport.connect(self.b.transport.hello())
        (connected,) = self.a.events()
        assert connected == Connected(self.to_b)
        (connected,) = self.b.events()
        self.to_a = connected.peer
        if self.b.transport.capabilities.grants:
            self.b.transport.grant(self.to_a, 7, self.b.region, ints(0), ints(SIZE))

    def write(self, token, *copies, grant=7):
        sources, destinations, sizes = np.array(copies, np.int64).reshape(-1, 3).T
        self.a.transport.write(self.to_b, Fragments(sources, destinations, sizes), grant, token)


def test_it_is_a_transport_and_has_a_record():
    pair = Pair()
    assert isinstance(pair.a.transport, Transport)
    entry = Registry(load(plan({}))).transceiver("local")
    assert entry.resolve(entry.info.factory) is LocalTransport


def test_bytes_arrive_where_they_belong_and_nowhere_else():
    pair = Pair()
    pair.write(1, (0, 100, 10), (50, 300, 5))
    expected = np.zeros(SIZE, np.uint8)
    expected[100:110], expected[300:305] = pair.a.memory[:10], pair.a.memory[50:55]
    assert np.array_equal(pair.b.memory, expected)
    assert pair.a.events() == [Done(1)]
    assert pair.network.writes == [
        WriteRecord("a", "b", 0, 100, 110, 1, 7),
        WriteRecord("a", "b", 0, 300, 305, 1, 7),
    ]


def test_a_write_of_nothing_is_answered_too():
    pair = Pair()
    pair.write(1)
    assert pair.a.events() == [Done(1)]


def test_messages_come_after_what_was_sent_before():
    pair = Pair(Fault("hold", "write"))
    pair.write(1, (0, 0, 8))
    pair.a.transport.message(pair.to_b, b"later")
    assert pair.b.events() == [] and not pair.b.memory.any()
    pair.network.release()
    assert pair.b.events() == [Message(pair.to_a, b"later")]
    assert np.array_equal(pair.b.memory[:8], pair.a.memory[:8])


def test_memory_is_read_when_the_write_arrives():
    # Whoever reuses memory before the answer sends other bytes than were meant, as with any one-sided write.
    pair = Pair(Fault("hold", "write"))
    pair.write(1, (0, 0, 8))
    pair.a.memory[:8] = 99
    pair.network.release()
    assert (pair.b.memory[:8] == 99).all()


@pytest.mark.parametrize(
    ("grant", "copy", "reason"),
    [
        (7, (0, SIZE - 4, 8), "the write goes beyond grant 7"),
        (8, (0, 0, 8), "there is no grant 8"),
    ],
)
def test_writes_beyond_their_grant_are_refused(grant, copy, reason):
    pair = Pair()
    pair.write(1, copy, grant=grant)
    assert pair.a.events() == [Failed(1, reason, in_doubt=False)]
    assert not pair.b.memory.any()


def test_a_grant_of_several_ranges_has_gaps():
    pair = Pair()
    pair.b.transport.grant(pair.to_a, 9, pair.b.region, ints(64, 0), ints(96, 32))
    pair.write(1, (0, 0, 32), (0, 64, 32), grant=9)
    pair.write(2, (0, 0, 33), grant=9)
    pair.write(3, (0, 95, 2), grant=9)
    pair.write(4, (0, 40, 1), grant=9)
    assert [type(event) for event in pair.a.events()] == [Done, Failed, Failed, Failed]


def test_revoking_a_grant_is_a_fence():
    pair = Pair(Fault("hold", "write"))
    pair.write(1, (0, 0, 8))
    pair.b.transport.revoke(7)
    assert pair.b.events() == [Revoked(7)]
    pair.network.release()
    assert pair.a.events() == [Failed(1, "there is no grant 7", in_doubt=False)]
    assert not pair.b.memory.any()


def test_without_the_promise_a_late_write_reaches_memory():
    weaker = LOCAL.__class__(frozenset({"cpu"}), False, False, False, False, True, False)
    pair = Pair(Fault("late", "write"), capabilities=weaker)
    pair.write(1, (0, 0, 8))
    pair.b.transport.disconnect(pair.to_a)
    assert pair.b.events() == [Closed(pair.to_a)]
    assert pair.a.events() == [PeerDown(pair.to_b, "it has disconnected")]
    pair.network.release()
    assert pair.b.memory[:8].any()


def test_what_reads_us_is_over_once_closed():
    pair = Pair(Fault("late", "write"), Fault("hold", "write", first=1))
    pair.write(1, (0, 0, 8))
    pair.write(2, (8, 8, 8))
    pair.a.transport.disconnect(pair.to_b)
    why = "the connection was closed"
    assert pair.a.events() == [Failed(1, why, in_doubt=True), Failed(2, why, in_doubt=True), Closed(pair.to_b)]
    pair.network.release()
    assert not pair.b.memory.any()
    assert pair.b.events() == [PeerDown(pair.to_a, "it has disconnected")]


def test_a_dead_process_is_noticed_and_writes_half():
    pair = Pair(Fault("kill_receiver", "write"))
    pair.network.detect_s = 0.5
    pair.write(1, (0, 0, 8), (8, 8, 8))
    assert pair.b.memory[:8].any() and not pair.b.memory[8:].any()
    assert pair.a.events() == []
    pair.network.advance(0.5)
    assert pair.a.events() == [PeerDown(pair.to_b, "its process has ended")]
    pair.a.transport.disconnect(pair.to_b)
    assert pair.a.events() == [Failed(1, "the connection was closed", in_doubt=True), Closed(pair.to_b)]


def test_a_stalled_process_says_nothing():
    pair = Pair(Fault("stall_receiver", "message"))
    pair.a.transport.message(pair.to_b, b"x")
    pair.network.advance(100)
    assert pair.a.events() == [] and pair.b.events() == []
    pair.network.resume(pair.b.transport)
    assert pair.b.events() == [Message(pair.to_a, b"x")]


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [
        (Fault("drop", "message", first=1), b"acd"),
        (Fault("duplicate", "message", first=1), b"abbcd"),
        (Fault("delay", "message", first=1, delay_s=2.0), b"a"),
    ],
)
def test_messages_go_wrong(fault, arrives):
    pair = Pair(fault)
    for letter in b"abcd":
        pair.a.transport.message(pair.to_b, bytes([letter]))
    assert b"".join(event.data for event in pair.b.events()) == arrives
    pair.network.advance(2.0)
    if fault.action == "delay":
        assert b"".join(event.data for event in pair.b.events()) == b"bcd"


def test_a_message_that_overtakes():
    pair = Pair(Fault("delay", "message", delay_s=1.0), Fault("overtake", "message", contains=b"c"))
    for letter in b"abc":
        pair.a.transport.message(pair.to_b, bytes([letter]))
    assert [event.data for event in pair.b.events()] == [b"c"]
    pair.network.advance(1.0)
    assert [event.data for event in pair.b.events()] == [b"a", b"b"]


def test_an_answer_that_is_lost_or_comes_twice():
    pair = Pair(Fault("drop", "answer"), Fault("duplicate", "answer", first=1))
    pair.write(1, (0, 0, 8))
    pair.write(2, (8, 8, 8))
    assert pair.a.events() == [Done(2)]
    with pytest.raises(TransferError) as error:
        pair.a.transport.close()
    assert str(error.value) == "close() while 1 write(s) have no answer\nhint: disconnect() their peers first"
    pair.a.transport.disconnect(pair.to_b)
    pair.a.transport.close()
    pair.a.transport.close()


def test_a_restarted_process_is_another_one():
    pair = Pair()
    hello = pair.b.transport.hello()
    pair.network.kill(pair.b.transport)
    again = End(pair.network, "b")
    assert pair.a.events() == [PeerDown(pair.to_b, "its process has ended")]
    stale = pair.a.transport.connect(hello)
    assert stale != pair.to_b
    assert pair.a.events() == [PeerDown(stale, "nobody is there: it has ended, or another one has its address")]
    pair.a.transport.disconnect(stale)
    assert pair.a.events() == [Closed(stale)]
    fresh = pair.a.transport.connect(again.transport.hello())
    assert pair.a.events() == [Connected(fresh)] and fresh.identity != pair.to_b.identity


def test_connecting_again_gives_the_same_peer():
    pair = Pair()
    assert pair.a.transport.connect(pair.b.transport.hello()) == pair.to_b
    assert pair.a.events() == []


def test_hellos_that_cannot_work():
    pair = Pair()
    with pytest.raises(IncompatibleError) as error:
        pair.a.transport.connect(pair.b.transport.hello().replace(b"local", b"lobal"))
    assert str(error.value) == (
        "'b' speaks version 1 of 'lobal', we speak version 1 of 'local'\n"
        "hint: run the same version of kvist on both sides"
    )
    with pytest.raises(IncompatibleError) as error:
        pair.a.transport.connect(b"\xc1")
    assert str(error.value).startswith("this is no hello of a local transport: ")


def test_a_callers_mistakes():
    pair = Pair()
    with pytest.raises(TransferError) as error:
        pair.write(1, (SIZE - 4, 0, 8))
    assert str(error.value) == (
        f"a write reads bytes {SIZE - 4}..{SIZE + 4} of region 0, which has {SIZE}\n"
        "hint: compute fragments from the page table of the memory that was registered"
    )
    with pytest.raises(TransferError) as error:
        pair.a.transport.message(pair.to_b, bytes((1 << 20) + 1))
    assert str(error.value) == "a message of 1048577 bytes; 1048576 are the most\nhint: split it"
    with pytest.raises(TransferError) as error:
        pair.b.transport.register(0, 1)
    assert str(error.value) == "memory was registered after hello()\nhint: register everything before"
    with pytest.raises(TransferError) as error:
        pair.b.transport.register(0, 1, "cuda")
    assert str(error.value) == "a local transport cannot register memory on 'cuda'\nhint: it takes cpu"
    with pytest.raises(TransferError) as error:
        pair.b.transport.allocate(1)
    assert str(error.value) == "a local transport allocates no memory\nhint: register() memory of your own"
