"""Two processes over real UCX, over shared memory and over TCP: bytes are compared with the sender's."""

from __future__ import annotations

import os
import signal
import threading
import time

import attrs
import numpy as np
import pytest
from ucx_peer import End, OtherProcess, fragments

from kvist.errors import TransferError
from kvist.testing.transfer.remote import Remote
from kvist.transfer.transport import Closed, Connected, Done, Failed, Message, PeerDown
from kvist_transceiver_ucx import conformance
from kvist_transceiver_ucx.library import load

try:
    load()
except TransferError as error:
    pytest.skip(f"UCX is needed: {error.message}", allow_module_level=True)

SIZE = 1 << 20
#: Of requests, one after the other.
COUNT = 2000
LANES = {"posix": "posix,self", "sysv": "sysv,self", "tcp": "tcp", "default": ""}


@pytest.fixture(params=["posix", "sysv", "tcp", "default"])
def settings(request):
    lanes = LANES[request.param]
    return {"TLS": lanes} if lanes else {}


@pytest.fixture
def quick(request):
    """For what does not depend on the kind of shared memory."""
    return {"TLS": request.param} if request.param else {}


both = pytest.mark.parametrize("quick", ["", "tcp"], indirect=True, ids=["default", "tcp"])


def closed(end: End) -> None:
    """End everything; nothing may be left behind."""
    for connected in end.all(Connected):
        end.transport.disconnect(connected.peer)
    end.transport.close()


def filled(end: End) -> None:
    for number, memory in enumerate(end.memory):
        memory[:] = np.random.default_rng(number).integers(0, 256, len(memory), np.uint8)


def test_bytes_and_messages_arrive(settings):
    end = End("here", settings, SIZE)
    with OtherProcess(settings, SIZE) as other:
        filled(end)
        peer = end.meet(other)
        assert end.transport.connect(other.hello) == peer
        rng = np.random.default_rng(3)
        token = 0
        for source in (0, 1):
            for destination in (0, 1):
                # 1,000 fragments of uneven sizes, in another order there, with gaps between them.
                sizes = rng.integers(0, 900, 1000)
                begins = np.arange(1000) * 1000 + 7
                rng.shuffle(begins)
                sources = rng.integers(0, SIZE - 900, 1000)
                copies = list(zip(sources.tolist(), begins.tolist(), sizes.tolist()))
                token += 1
                end.transport.write(peer, fragments(copies, source, destination), destination, token)
                end.transport.message(peer, b"after %d" % token)
                assert end.answer(token) == Done(token)
                if source == 1:  # It lies over the first one.
                    continue
                wanted = np.zeros(SIZE, np.uint8)
                for begin, to, size in copies:
                    wanted[to : to + size] = end.memory[source][begin : begin + size]
                assert other.call("bytes", destination, 0, SIZE) == wanted.tobytes()
        long = os.urandom(end.transport.capabilities.max_message_bytes)
        end.transport.message(peer, long)
        end.transport.message(peer, b"")
        end.until(lambda: any(isinstance(e, Message) and e.data == b"" for e in other.call("seen")))
        heard = [e.data for e in other.call("seen") if isinstance(e, Message)]
        assert heard == [*(b"after %d" % number for number in range(1, token + 1)), long, b""]
        closed(end)


@both
def test_evidence_comes_after_the_data(quick):
    end = End("here", quick, 4 * SIZE)
    with OtherProcess(quick, 4 * SIZE) as other:
        back = other.call("connect", end.transport.hello())
        for number in range(1, 9):
            peer = end.first(Connected).peer
            other.call("write", back, fragments([(0, number, SIZE)]), number)
            end.transport.write(peer, fragments([(0, 2 * SIZE, SIZE)]), 0, number)
            assert end.answer(number) == Done(number)
        # Both wrote at once, over one connection.
        assert len(end.all(Connected)) == 1
        end.until(lambda: sum(isinstance(e, Done) for e in other.call("seen")) == 8)
        closed(end)


@both
def test_a_thousand_small_writes_and_one_of_64_mib(quick):
    size = 64 << 20
    end = End("here", quick, size)
    with OtherProcess(quick, size) as other:
        end.memory[0][:] = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
        peer = end.meet(other)
        for token in range(1000):
            end.transport.write(peer, fragments([(token * 64, token * 128, 64)]), 0, token)
        end.until(lambda: len(end.all(Done)) == 1000)
        there = np.frombuffer(other.call("bytes", 0, 0, 128_000), np.uint8).reshape(1000, 128)
        assert np.array_equal(there[:, :64].ravel(), end.memory[0][:64_000]) and not there[:, 64:].any()
        end.transport.write(peer, fragments([(0, 0, size)]), 0, 5000)
        assert end.answer(5000) == Done(5000)
        for begin in range(0, size, 8 << 20):
            assert other.call("bytes", 0, begin, 8 << 20) == end.memory[0][begin : begin + (8 << 20)].tobytes()
        closed(end)


@both
def test_what_the_peer_does_not_have_is_not_written(quick):
    end = End("here", quick, SIZE)
    with OtherProcess(quick, SIZE) as other:
        peer = end.meet(other)
        end.transport.write(peer, fragments([(0, SIZE - 4, 8)]), 0, 1)
        end.transport.write(peer, fragments([(0, -4, 8)]), 0, 2)
        end.transport.write(peer, fragments([(0, 0, 8)], destination=2), 0, 3)
        end.transport.write(peer, fragments([]), 0, 4)
        reasons = [end.answer(token) for token in (1, 2, 3)]
        assert reasons == [
            Failed(1, f"it writes bytes {SIZE - 4}..{SIZE + 4} of region 0, which has {SIZE}", in_doubt=False),
            Failed(2, f"it writes bytes -4..4 of region 0, which has {SIZE}", in_doubt=False),
            Failed(3, "'other' has no region 2", in_doubt=False),
        ]
        assert end.answer(4) == Done(4)
        closed(end)


@both
def test_a_killed_peer_is_noticed_and_its_writes_fail(quick):
    end = End("here", quick, SIZE)
    with OtherProcess(quick, SIZE) as other:
        peer = end.meet(other)
        end.first(Connected)
        other.signal(signal.SIGSTOP)
        for token in range(200):
            end.transport.write(peer, fragments([(0, 0, SIZE)]), 0, token)
        other.signal(signal.SIGKILL)
        began_s = time.monotonic()
        assert end.first(PeerDown, limit_s=5.0).peer == peer
        assert time.monotonic() - began_s < 4.0
        answers = [end.answer(token) for token in range(200)]
        assert all(isinstance(e, Done | Failed) for e in answers)
        if quick:  # Over shared memory all may have been there before it was killed.
            assert isinstance(answers[-1], Failed) and answers[-1].reason
        end.transport.write(peer, fragments([(0, 0, 8)]), 0, 1000)
        assert end.answer(1000) == Failed(1000, f"{peer} is gone", in_doubt=False)
        end.transport.disconnect(peer)
        end.first(Closed)
        again = end.transport.connect(other.hello)
        assert end.first(PeerDown, again).reason == "its process has ended"
        end.transport.disconnect(again)
        end.first(Closed, again)
        assert len(end.all(PeerDown)) == 2 and not end.all(Connected, again)
        end.transport.close()


@both
def test_a_stopped_peer_hangs_nobody_and_comes_back(quick):
    end = End("here", quick, SIZE)
    with OtherProcess(quick, SIZE) as other:
        peer = end.meet(other)
        end.first(Connected)
        other.signal(signal.SIGSTOP)
        for token in range(100):
            end.transport.write(peer, fragments([(0, 0, SIZE)]), 0, token)
        time.sleep(0.3)
        assert not end.all(PeerDown)
        if quick:  # Over shared memory they are there already: the peer has no part in it.
            with pytest.raises(TransferError) as error:
                end.transport.close()
            assert "write(s) have no answer\nhint: disconnect() their peers first" in str(error.value)
        end.transport.disconnect(peer)
        end.transport.disconnect(peer)
        end.first(Closed, limit_s=3.0)
        assert isinstance(end.answer(99), Failed if quick else Done)
        assert end.seen[-1] == Closed(peer)
        other.signal(signal.SIGCONT)
        end.until(lambda: any(isinstance(e, PeerDown) for e in other.call("seen")))
        again = end.transport.connect(other.hello)
        assert again.id != peer.id
        # Where there are grants, it gives them to every connection anew.
        end.until(lambda: sum(isinstance(e, Connected) for e in other.call("seen")) == 2)
        end.memory[0][:8] = 9
        end.transport.write(again, fragments([(0, 100, 8)]), 0, 1000)
        assert end.answer(1000) == Done(1000)
        assert other.call("bytes", 0, 99, 10) == bytes([0, *[9] * 8, 0])
        closed(end)


def test_registered_memory_of_a_peer_is_written_over_shared_memory_too():
    end = End("here", {}, SIZE)
    with OtherProcess({}, SIZE) as other:
        peer = end.meet(other)
        end.memory[0][:] = 7
        end.memory[1][:] = 5
        end.transport.write(peer, fragments([(0, 1, SIZE - 1)], 0, 1), 0, 1)
        end.transport.write(peer, fragments([(0, 0, 8)], 1, 0), 0, 2)
        assert end.answer(1) == Done(1)
        assert end.answer(2) == Done(2)
        assert other.call("bytes", 1, 0, SIZE) == bytes([0] + [7] * (SIZE - 1))
        assert other.call("bytes", 0, 0, 9) == bytes([5] * 8 + [0])
        closed(end)


@pytest.mark.parametrize("way", ["killed", "disconnects"])
@both
def test_a_writer_writes_nothing_after_it_is_down(quick, way):
    size = 32 << 20
    end = End("here", quick, size)
    with OtherProcess(quick, size) as other:
        back = other.call("connect", end.transport.hello())
        end.first(Connected)
        whole = fragments([(0, 0, size)])
        for token in range(20):
            other.call("write", back, whole, token)
        if way == "killed":
            other.signal(signal.SIGKILL)
        else:
            other.call("disconnect", back)
        end.first(PeerDown, limit_s=5.0)
        for memory in end.memory:
            memory[:] = 0xEE
        end.poll(0.3)
        assert all((memory == 0xEE).all() for memory in end.memory)
        closed(end)


@pytest.mark.slow
@both
def test_a_stopped_peer_is_not_reported(quick):
    end = End("here", quick, SIZE)
    with OtherProcess(quick, SIZE) as other:
        peer = end.transport.connect(other.hello)
        end.first(Connected)
        other.signal(signal.SIGSTOP)
        until_s = time.monotonic() + 6.0  # Of UCX's keepalive, three rounds.
        while time.monotonic() < until_s:
            end.poll(0.1)
        assert not end.all(PeerDown)
        other.signal(signal.SIGCONT)
        end.transport.write(peer, fragments([(0, 0, 8)]), 0, 1)
        assert end.answer(1) == Done(1)
        closed(end)


@both
def test_both_connect_at_once_and_again(quick):
    end = End("here", quick, SIZE)
    with OtherProcess(quick, SIZE) as other:
        for _ in range(5):
            before = len(end.all(Connected))
            peer = end.transport.connect(other.hello)
            back = other.call("connect", end.transport.hello())
            end.until(lambda: len(end.all(Connected)) > before)  # noqa: B023
            end.transport.message(peer, b"over this")
            end.until(lambda: Message(back, b"over this") in other.call("seen"))  # noqa: B023
            assert len(end.all(Connected)) == before + 1
            other.call("disconnect", back)
            end.first(PeerDown, peer)
            end.transport.disconnect(peer)
            end.first(Closed, peer)
        end.transport.close()


def test_another_incarnation_is_not_mistaken():
    """The peer's worker refuses a greeting that was meant for somebody else."""
    end = End("here", {}, SIZE)
    with OtherProcess({}, SIZE) as other:
        import msgspec

        from kvist_transceiver_ucx.wire import Hello

        hello = msgspec.msgpack.decode(other.hello, type=Hello)
        stale = msgspec.structs.replace(hello, identity="0" * 32)
        peer = end.transport.connect(msgspec.msgpack.encode(stale))
        down = end.first(PeerDown)
        assert (down.peer, down.reason) == (
            peer,
            "'other' is not the one that was meant: another process has its address",
        )
        assert not [e for e in other.call("seen") if isinstance(e, Connected)]
        end.transport.disconnect(peer)
        end.first(Closed)
        end.transport.close()


def test_a_closed_transport_takes_nothing():
    end, other = End("here", {}, SIZE), End("other", {}, SIZE)
    hello = other.transport.hello()
    end.transport.close()
    for use in (lambda: end.transport.allocate(8), end.transport.hello, lambda: end.transport.connect(hello)):
        with pytest.raises(TransferError) as error:
            use()
        assert error.value.message == "the ucx transport of 'here' is closed"
    other.transport.close()


def test_a_defect_of_the_thread_reaches_whoever_polls():
    end = End("here", {}, SIZE)

    def defect() -> None:
        raise ZeroDivisionError("a defect")

    end.transport._progress.submit(defect)
    with pytest.raises(TransferError) as error:
        end.until(lambda: False)
    assert error.value.message == "the transport has stopped: ZeroDivisionError: a defect"
    end.transport.close()


def test_nothing_is_left_behind():
    def held() -> tuple[int, int]:
        import threading

        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    End("first", {}, SIZE).transport.close()
    before = held()
    for _ in range(2):
        end = End("here", {}, SIZE)
        end.transport.close()
        end.transport.close()
    assert held() == before
    assert attrs.asdict(end.transport.capabilities)["grants"] is False


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_either_side_is_killed_at_random_moments_without_shared_memory(victim, monkeypatch):
    """The survivor decides all requests, nothing wrong is written, and it goes on with the next partner."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    factory, rng = "kvist_transceiver_ucx.transport:UcxTransport", np.random.default_rng(len(victim))
    new = {role: lambda role=role: Remote(factory, role, fill=role == "sender") for role in ("sender", "receiver")}
    processes = {role: make() for role, make in new.items()}
    try:
        for number in range(4):
            sender, receiver, prefix = processes["sender"], processes["receiver"], f"{number}."
            sender.call("offer_many", prefix, 1000)
            receiver.call("ask_many", prefix, [sender.call("hello")], 1000, 10.0)
            receiver.until("some_done", prefix, timeout_s=15)
            time.sleep(rng.uniform(0, 0.15))
            dead = processes[victim]
            dead.kill()
            survivor = "receiver" if victim == "sender" else "sender"
            alive = processes[survivor]
            assert alive.process.is_alive()
            alive.call("start_no_more")
            if survivor == "sender":
                alive.call("give_up")
            alive.until("all_decided", timeout_s=15)
            alive.until("all_ended", timeout_s=20)
            assert alive.call("leaks") == [] and alive.call("verify")
            dead.__exit__()
            processes[victim] = new[victim]()
            sender, receiver = processes["sender"], processes["receiver"]
            sender.call("offer", prefix + "next")
            receiver.call("ask", prefix + "next", sender.call("hello"), 10.0)
            receiver.until("all_ended", timeout_s=15)
            assert receiver.call("outcome", prefix + "next") == "done"
    finally:
        for each in processes.values():
            each.__exit__()


@pytest.mark.slow
@both
def test_thousands_of_requests_leave_nothing(quick, monkeypatch):
    """10 % are cancelled; sessions, threads, descriptors and shared memory are back at what they were."""
    if quick:
        monkeypatch.setenv("UCX_TLS", "tcp")

    def counts():
        threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvist"))
        segments = sum("ucx_shm" in name for name in os.listdir("/dev/shm"))
        return threads, len(os.listdir("/proc/self/fd")), segments

    End("first", {}, SIZE).transport.close()
    before = counts()
    conformance.TestTransceiver()._many(COUNT)
    assert counts() == before
