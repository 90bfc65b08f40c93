"""Clauses that a transport keeps by itself: what arrives, what is answered, who is talked to."""

from __future__ import annotations

import os
import threading
import time
import warnings

import numpy as np
import pytest

from kvist.errors import TransferError
from kvist.testing.outcomes import not_applicable
from kvist.testing.transfer.author import TransportAuthor, expected
from kvist.testing.transfer.world import LONG_S
from kvist.transfer.transport import (
    Capabilities,
    Closed,
    Done,
    Event,
    Failed,
    Fragments,
    IncompatibleError,
    Message,
    PeerDown,
    Revoked,
    Transport,
)


class TransportTests(TransportAuthor):
    """Subclass it as ``class TestMine(TransportTests)`` and fill in what :class:`TransportAuthor` names.

    What it cannot show: speed, other hosts, and memory of devices that are not here.
    """

    @pytest.mark.clause("TR-26")
    def test_bytes_arrive_where_they_belong_and_nowhere_else(self) -> None:
        with self.ends() as ends:
            assert isinstance(ends.a.transport, Transport) and isinstance(ends.a.transport.capabilities, Capabilities)
            one = ends.write(1, (0, 100, 10), (50, 300, 5), (7, 0, 1), (9, ends.size - 1, 1))
            assert ends.answer(1) == Done(1)
            assert expected(ends, one), "other bytes than were written"
            rng = np.random.default_rng(1)
            sizes = rng.integers(0, 97, 600)
            begins = np.concatenate(([0], np.cumsum(sizes)[:-1])) + 400
            order = rng.permutation(600)
            sources = rng.integers(0, ends.size - 97, 600)
            many = ends.write_all(2, sources, begins[order], sizes[order])
            assert ends.answer(2) == Done(2)
            assert expected(ends, one, many), "other bytes than were written, of many fragments"

    @pytest.mark.clause("TR-12")
    def test_done_means_that_the_bytes_are_there(self) -> None:
        size = 8 << 20
        with self.ends(size) as ends:
            page = 1 << 16
            places = np.random.default_rng(2).permutation(size // page) * page
            sources = np.arange(size // page) * page
            made = ends.write_all(1, sources, places, np.full(len(places), page))
            # b takes part only as far as the transport needs it: what is there is looked at when a has its answer.
            while not [each for each in ends.a.seen if isinstance(each, Done | Failed)]:
                ends.a.poll()
                if ends.a.transport.capabilities.target_must_progress:
                    ends.b.poll()
            assert ends.answer(1) == Done(1) and expected(ends, made)

    @pytest.mark.clause("TR-12")
    def test_memory_is_read_until_the_answer_and_no_longer(self) -> None:
        with self.ends() as ends:
            for token in range(1, 30):
                ends.a.memory[:] = token
                ends.write(token, (0, 0, ends.size))
                assert ends.answer(token) == Done(token)
                ends.a.memory[:] = 255
                assert (ends.b.memory == token).all()
            ends.quiet()
            assert (ends.b.memory == 29).all(), "memory of ours was read after the answer"

    @pytest.mark.clause("TR-18")
    def test_messages_come_after_what_was_sent_before(self) -> None:
        size = 4 << 20
        with self.ends(size) as ends:
            for number in range(8):
                ends.a.memory[:] = number + 1
                ends.write(number + 1, (0, 0, size))
                ends.a.transport.message(ends.to_b, b"%d" % number)
                # b first, so that nothing happens between the message and the look.
                until_s = time.monotonic() + LONG_S
                ends.b.poll()
                while len(ends.b.all(Message)) <= number:
                    assert time.monotonic() < until_s, "a message has not come"
                    ends.a.poll()
                    ends.b.poll()
                assert (ends.b.memory == number + 1).all(), "a message came before the bytes written before it"
                ends.answer(number + 1)
            assert [each.data for each in ends.b.all(Message)] == [b"%d" % number for number in range(8)]
            assert all(each.peer == ends.to_a for each in ends.b.all(Message))

    @pytest.mark.clause("TR-14")
    def test_a_write_of_nothing_is_answered_too(self) -> None:
        with self.ends() as ends:
            ends.write(1)
            assert ends.answer(1) == Done(1)

    @pytest.mark.clause("TR-15")
    def test_what_cannot_be_sent_has_failed(self) -> None:
        with self.ends() as ends:
            ends.a.transport.disconnect(ends.to_b)
            ends.first(ends.a, Closed)
            ends.write(1, (0, 0, 8))
            assert isinstance(found := ends.answer(1), Failed) and not found.in_doubt and found.reason
            assert not ends.b.memory.any()
            with pytest.raises(TransferError):
                ends.write(2, (ends.size - 4, 0, 8))
            with pytest.raises(TransferError):
                ends.a.transport.message(ends.to_b, bytes(ends.a.transport.capabilities.max_message_bytes + 1))

    @pytest.mark.clause("TR-13")
    def test_every_write_has_one_answer(self) -> None:
        with self.ends() as ends:
            for token in range(1, 200):
                ends.write(token, (0, token, 1))
            ends.a.transport.disconnect(ends.to_b)
            ends.first(ends.a, Closed)
            ends.quiet()
            answers = [each.token for each in ends.a.seen if isinstance(each, Done | Failed)]
            assert sorted(answers) == list(range(1, 200))
            kinds = [type(each) for each in ends.a.seen]
            assert kinds[-1] is Closed, "something came after the last event of a peer"

    @pytest.mark.clause("TR-02")
    def test_what_is_not_granted_is_refused_as_a_whole(self) -> None:
        with self.ends() as ends:
            if not ends.b.transport.capabilities.grants:
                not_applicable("the transport has no grants")
            ends.grant(8, (100, 200), (300, 400))
            for token, (grant, copies) in enumerate(
                [
                    (9, [(0, 100, 4)]),
                    (8, [(0, 120, 4), (0, 99, 4)]),
                    (8, [(0, 120, 4), (0, 198, 4)]),
                    (8, [(0, 150, 200)]),
                    (8, [(0, 200, 1)]),
                ],
                1,
            ):
                ends.write(token, *copies, grant=grant)
                assert isinstance(answer := ends.answer(token), Failed) and not answer.in_doubt, copies
            assert not ends.b.memory.any()
            made = ends.write(20, (0, 100, 100), (0, 300, 100), grant=8)
            assert ends.answer(20) == Done(20) and expected(ends, made)

    @pytest.mark.clause("TR-10")
    def test_a_revoked_grant_is_a_fence(self) -> None:
        size = 32 << 20
        with self.ends(size) as ends:
            if not ends.b.transport.capabilities.grants:
                not_applicable("the transport has no grants")
            # In the midst of a write, as far as that can be arranged.
            page = 1 << 14
            sources = np.arange(size // page, dtype=np.int64) * page
            ends.write_all(1, sources, sources, np.full(len(sources), page))
            while not ends.b.memory[:page].any() and not ends.a.all(Done):
                ends.poll()
            ends.b.transport.revoke(7)
            ends.until(lambda: Revoked(7) in ends.b.seen)
            ends.b.memory[:] = 0xEE
            first = ends.answer(1)
            assert isinstance(first, Done) or first.in_doubt
            ends.write(2, (0, 0, 8))
            assert isinstance(second := ends.answer(2), Failed) and not second.in_doubt
            ends.b.transport.revoke(123)
            ends.until(lambda: Revoked(123) in ends.b.seen)
            ends.quiet()
            assert (ends.b.memory == 0xEE).all(), "a write came through after its grant was revoked"

    @pytest.mark.clause("TR-10")
    def test_a_closed_connection_is_a_fence_where_that_is_promised(self) -> None:
        size = 32 << 20
        with self.ends(size) as ends:
            if not ends.b.transport.capabilities.close_is_fence:
                not_applicable("to close is no fence of this transport")
            sources = np.arange(size >> 14, dtype=np.int64) << 14
            ends.write_all(1, sources, sources, np.full(len(sources), 1 << 14))
            while not ends.b.memory[: 1 << 14].any():
                ends.poll()
            ends.b.transport.disconnect(ends.to_a)
            ends.first(ends.b, Closed)
            ends.b.memory[:] = 0xEE
            ends.write(2, (0, 0, 8))
            ends.answer(1), ends.answer(2)
            ends.quiet()
            assert (ends.b.memory == 0xEE).all(), "a write came through after the connection was closed"
            down = ends.first(ends.a, PeerDown)
            assert down.peer == ends.to_b and len(ends.a.all(PeerDown)) == 1

    @pytest.mark.clause("TR-19")
    def test_the_other_end_is_told_of_an_orderly_end(self) -> None:
        with self.ends() as ends:
            ends.b.transport.disconnect(ends.to_a)
            ends.b.transport.disconnect(ends.to_a)
            assert ends.first(ends.b, Closed) == Closed(ends.to_a)
            assert ends.first(ends.a, PeerDown).peer == ends.to_b
            ends.a.transport.disconnect(ends.to_b)
            ends.first(ends.a, Closed)
            ends.quiet()
            assert (len(ends.b.all(Closed)), len(ends.a.all(Closed)), len(ends.a.all(PeerDown))) == (1, 1, 1)
            # And both go on, with another connection.
            again = ends.a.transport.connect(ends.b.transport.hello())
            assert again.id != ends.to_b.id
            ends.a.transport.message(again, b"again")
            ends.until(lambda: any(each.data == b"again" for each in ends.b.all(Message)))
            for end in (ends.a, ends.b):
                for peer in {each.peer for each in end.seen if hasattr(each, "peer")}:
                    end.transport.disconnect(peer)

    @pytest.mark.clause("TR-22")
    def test_an_incarnation_that_has_ended_is_not_there(self) -> None:
        with self.ends() as ends:
            stale = ends.b.transport.hello()
            ends.b.transport.disconnect(ends.to_a)
            ends.first(ends.b, Closed)
            ends.b.transport.close()
            new = self.transport("b")
            try:
                began_s = time.monotonic()
                peer = ends.a.transport.connect(stale)
                ends.a.transport.message(peer, b"for the old one")
                ends.b.transport = new
                ends.until(lambda: any(each.peer == peer for each in ends.a.all(PeerDown)))
                assert time.monotonic() - began_s < 10
                assert not [each for each in ends.b.all(Message) if each.data == b"for the old one"]
                ends.a.transport.disconnect(peer)
                ends.until(lambda: Closed(peer) in ends.a.seen)
            finally:
                new.close()

    @pytest.mark.clause("TR-23")
    def test_what_is_no_hello_of_ours_is_refused_with_a_reason(self) -> None:
        with self.ends() as ends:
            for hello in (b"", b"\xc1nonsense", b"\x80", ends.b.transport.hello()[:-3]):
                with pytest.raises(IncompatibleError) as error:
                    ends.a.transport.connect(hello)
                assert error.value.message

    @pytest.mark.clause("TR-23")
    def test_connections_are_of_identities_and_not_of_names(self) -> None:
        with self.ends() as ends:
            assert ends.a.transport.connect(ends.b.transport.hello()) == ends.to_b
            twin = self.transport("b")
            try:
                other = ends.a.transport.connect(twin.hello())
                assert twin.identity != ends.b.transport.identity
                assert (other.identity, ends.to_b.identity) == (twin.identity, ends.b.transport.identity)
                ends.a.transport.message(other, b"for the twin")
                heard: list[Event] = []

                def has_come() -> bool:
                    heard.extend(twin.poll(0))
                    return any(isinstance(event, Message) for event in heard)

                ends.until(has_come)
                ends.quiet()
                assert not ends.b.all(Message), "a message came to another end with the same name"
                for event in heard:
                    if isinstance(event, Message):
                        twin.disconnect(event.peer)
                ends.a.transport.disconnect(other)
                ends.until(lambda: Closed(other) in ends.a.seen)
            finally:
                twin.close()

    @pytest.mark.clause("TR-37")
    def test_many_ends_on_one_host(self) -> None:
        many = [self.transport(f"end {number}") for number in range(6)]
        try:
            assert len({each.identity for each in many}) == len({each.hello() for each in many}) == 6
            for each in many[1:]:
                each.message(each.connect(many[0].hello()), each.identity.encode())
            heard: list[Message] = []
            until_s = time.monotonic() + 10
            while len(heard) < 5 and time.monotonic() < until_s:
                for each in many:
                    heard += [event for event in each.poll(0.001) if isinstance(event, Message)]
            assert {(each.peer.identity, each.data.decode()) for each in heard} == {
                (each.identity, each.identity) for each in many[1:]
            }
        finally:
            for each in many:
                each.close()

    @pytest.mark.clause("TR-38")
    def test_closing_refuses_while_writes_have_no_answer_and_leaves_nothing(self) -> None:
        before = _held()
        for _ in range(3):
            with self.ends(1 << 22) as ends:
                for token in range(1, 4):
                    ends.write(token, (0, 0, ends.size))
                if len(ends.a.all(Done)) < 3:
                    refusal = None
                    try:
                        ends.a.transport.close()
                    except TransferError as error:
                        refusal = error
                    if refusal is None:
                        # Then nothing was under way any more, and whoever polls would have learned of it.
                        whole = Fragments(np.array([0]), np.array([0]), np.array([ends.size]))
                        assert expected(ends, whole), "it was closed in the midst of a write"
                        continue
                for token in range(1, 4):
                    ends.answer(token)
                for end, peer in ((ends.a, ends.to_b), (ends.b, ends.to_a)):
                    end.transport.disconnect(peer)
                    ends.first(end, Closed)
                    end.transport.close()
                    end.transport.close()
        assert _held() == before, "threads, descriptors or shared memory were left: before, after"

    @pytest.mark.clause("TR-40")
    def test_a_fork_does_no_harm(self) -> None:
        if not hasattr(os, "fork"):
            not_applicable("this system has no fork")
        with self.ends() as ends:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:  # It does nothing, and lives on while the others go on.
                time.sleep(0.5)
                os._exit(0)
            try:
                made = ends.write(1, (0, 0, 100))
                assert ends.answer(1) == Done(1) and expected(ends, made)
                # The child keeps no connection alive.
                ends.b.transport.disconnect(ends.to_a)
                ends.first(ends.a, PeerDown)
                assert os.waitpid(child, os.WNOHANG) == (0, 0), "the end was noticed only when the child had ended"
            finally:
                os.waitpid(child, 0)

    @pytest.mark.clause("TR-19", "TR-20")
    def test_the_death_of_an_end_is_noticed(self) -> None:
        with self.ends() as ends:
            self.kill(ends.b.transport)
            ends.write(1, (0, 0, 8))
            assert ends.first(ends.a, PeerDown).peer == ends.to_b
            ends.a.transport.disconnect(ends.to_b)
            assert isinstance(ends.answer(1), Failed)
            assert not ends.b.memory.any()


def _held() -> tuple[set[str], int, list[str]]:
    """Names of threads, how many descriptors, and shared memory with a name."""
    until_s = time.monotonic() + 2
    while any(thread.name.startswith("kvist") for thread in threading.enumerate()) and time.monotonic() < until_s:
        time.sleep(0.01)
    threads = {thread.name for thread in threading.enumerate()}
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return threads, descriptors, sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
