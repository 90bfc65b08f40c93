"""Clauses about who may touch which pages until when, and about what is believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvist.errors import TransferError
from kvist.manager import PagedCacheManager
from kvist.testing.transfer.author import TransportAuthor
from kvist.testing.transfer.values import Model
from kvist.testing.transfer.world import LENGTH, Process, World, spec_of
from kvist.transfer.faults import Fault
from kvist.transfer.messages import Evidence, Wire, encode
from kvist.transfer.outcome import DONE, Status
from kvist.transfer.pagetable import Placement
from kvist.transfer.transfers import Transfers
from kvist.transfer.transport import Peer

#: A message of a writer has this in it.
EVIDENCE = "\xa8evidence".encode("latin-1")
PUBLISH = b"publish"


def tell(process: Process, other: Process, message: Wire) -> None:
    """Send a message past the transceiver."""
    partners = process.transceiver._partners.values()
    (peer,) = [each.peer for each in partners if each.peer.name == other.name]
    process.transport.message(peer, encode(message))


class SessionTests(TransportAuthor):
    """Part of :class:`kvist.testing.transfer.TransceiverTests`."""

    def _fenced(self, process: Process) -> bool:
        return process.transport.capabilities.grants

    def _reused(self, world: World, receiver: Process) -> None:
        """The receiver's pages are used for something else from now on: nobody may write there."""
        receiver.poison()
        world.release()
        world.run()
        assert receiver.poisoned, "pages were written after they could be used for something else"

    @pytest.mark.clause("TR-01")
    def test_pages_of_the_sender_stay_until_every_write_has_its_answer(self) -> None:
        with self.world(Fault("hold", "answer")) as world:
            sender, _, outgoing, incoming = world.transfer(offer_s=3)
            world.run()
            assert not outgoing.quiescent
            world.wait(4)
            assert outgoing.outcome is not None and outgoing.outcome.status is Status.TIMED_OUT
            assert not outgoing.quiescent and sender.transceiver.cancel(outgoing) is False
            world.release()
            world.run(lambda: outgoing.quiescent and incoming.quiescent)
            assert sender.transceiver.cancel(outgoing) is True

    @pytest.mark.clause("TR-02")
    def test_pages_of_the_receiver_stay_until_every_writer_is_settled(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            _, receiver, _, incoming = world.transfer()
            world.run()
            receiver.transceiver.cancel(incoming)
            world.run()
            if not incoming.quiescent:
                assert not self._fenced(receiver), "a revoked grant settles a writer"
                assert receiver.stats.quarantined_pages == incoming.page_count
                world.release()
                world.run(lambda: incoming.quiescent)
            self._reused(world, receiver)
            assert receiver.stats.quarantined_pages == receiver.stats.received == 0

    @pytest.mark.clause("TR-03")
    def test_a_cancel_before_publication_frees_at_once(self) -> None:
        with self.world(Fault("hold", "message")) as world:
            _, receiver, _, incoming = world.transfer()
            world.run()
            assert receiver.transceiver.cancel(incoming) is True
            self._reused(world, receiver)
            assert world.written("receiver") == []

    @pytest.mark.clause("TR-04")
    @pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5])
    def test_a_cancel_that_races_with_publication(self, rounds: int) -> None:
        with self.world() as world:
            sender, receiver, outgoing, incoming = world.transfer()
            for number in range(rounds):
                (receiver, sender)[number % 2].transceiver.poll(0.01 if self.quiet_s else 0.0)
            receiver.transceiver.cancel(incoming)
            world.run(lambda: incoming.quiescent and outgoing.quiescent)
            assert incoming.outcome is not None and outgoing.outcome is not None
            if not incoming.outcome.ok:
                # No time has passed: the sender was told.
                assert outgoing.outcome.status in (Status.CANCELLED, Status.FAILED, Status.DONE)
            self._reused(world, receiver)

    @pytest.mark.clause("TR-05")
    def test_publication_that_fails_half_way(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            senders = [world.process(f"s{i}", placement=Placement(i, 4)) for i in range(4)]
            receiver = world.process("receiver")
            outgoing = [sender.offer() for sender in senders]
            message = receiver.transport.message

            def failing(peer: Peer, data: bytes) -> None:
                if peer.name == "s2" and PUBLISH in data:
                    raise TransferError("no")
                message(peer, data)

            receiver.transport.message = failing  # type: ignore[method-assign]
            incoming = receiver.ask(*senders)
            world.run(lambda: incoming.outcome is not None)
            assert incoming.outcome is not None and "could not be told where to write" in incoming.outcome.reason
            # Those that were not told are told that nobody will ask.
            world.run(lambda: all(each.outcome is not None for each in outgoing[2:]))
            assert {each.outcome.status for each in outgoing[2:] if each.outcome} == {Status.CANCELLED}
            world.run()
            if not incoming.quiescent:
                assert [partner.peer.name for partner in incoming.partners] == ["s0"], "only s0 has a write under way"
                world.release()
            world.run(lambda: incoming.quiescent)
            self._reused(world, receiver)

    @pytest.mark.clause("TR-06")
    def test_cancel_says_when_pages_are_free(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            _, receiver, _, incoming = world.transfer()
            world.run()
            assert receiver.transceiver.cancel(incoming) is False, "it is being written"
            assert receiver.transceiver.cancel(incoming) is False or self._fenced(receiver)
            world.run()
            assert receiver.transceiver.cancel(incoming) is incoming.quiescent is self._fenced(receiver)
            world.release()
            world.run(lambda: incoming.quiescent)
            assert receiver.transceiver.cancel(incoming) is True
            assert incoming.outcome is not None and incoming.outcome.status is Status.CANCELLED

    @pytest.mark.clause("TR-07")
    def test_a_timeout_does_not_free_what_may_still_be_written(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            _, receiver, _, incoming = world.transfer(ask_s=2)
            world.wait(3)
            assert incoming.outcome is not None and incoming.outcome.status is Status.TIMED_OUT
            assert incoming.quiescent is self._fenced(receiver)
            if not incoming.quiescent:
                world.release()
                world.run(lambda: incoming.quiescent)
            self._reused(world, receiver)

    @pytest.mark.clause("TR-08")
    def test_late_success_changes_no_outcome(self) -> None:
        with self.world(Fault("late", "message", contains=EVIDENCE)) as world:
            _, receiver, outgoing, incoming = world.transfer()
            world.run(lambda: outgoing.outcome is not None)
            receiver.transceiver.cancel(incoming)
            world.run()
            world.release()
            world.run(lambda: incoming.quiescent)
            assert incoming.outcome is not None and incoming.outcome.status is Status.CANCELLED
            assert (receiver.stats.received, receiver.stats.failed) == (0, 1)

    @pytest.mark.clause("TR-09")
    def test_evidence_that_is_lost_for_ever(self) -> None:
        with self.world(Fault("drop", "message", contains=EVIDENCE, count=10**6)) as world:
            sender, receiver, _, incoming = world.transfer(ask_s=2)
            world.wait(3)
            assert incoming.outcome is not None and incoming.outcome.status is Status.TIMED_OUT
            assert incoming.quiescent is self._fenced(receiver)
            if not incoming.quiescent:
                assert receiver.stats.quarantined_pages == incoming.page_count > 0
                # Its end settles what it never said.
                for partner in list(sender.transceiver._partners.values()):
                    sender.transport.disconnect(partner.peer)
                world.run(lambda: incoming.quiescent)
            assert receiver.stats.quarantined_pages == 0

    @pytest.mark.clause("TR-11")
    def test_what_came_in_part_is_not_published(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            manager = PagedCacheManager(receiver.rank.layout)
            transfers = Transfers(manager, receiver.transceiver)
            text = np.arange(LENGTH + 1)
            history, window = sender.rank.pages

            def send(request: str, length: int, *, breaks: bool) -> Any:
                outgoing = sender.transceiver.send(request)
                receiving = transfers.receive(request, text, [sender.hello()], length=length)
                half = length * 3 // 32 * 8
                sender.transceiver.add(outgoing, [history, None], 0, half, last=False)
                world.run(lambda: receiving.session.byte_count > 0)
                if breaks:
                    sender.transceiver.cancel(outgoing)
                else:
                    sender.transceiver.add(outgoing, [history, None], half, length, last=False)
                    sender.transceiver.add(outgoing, [None, window], 0, length, last=True)
                world.run(lambda: receiving.session.quiescent)
                transfers.poll()
                return receiving

            good = send("good", 16, breaks=False)
            assert good.outcome.ok
            manager.close(good.sequence)
            known, memory = manager.probe(text), receiver.rank.memory.copy()
            assert known > 0
            bad = send("bad", 40, breaks=True)
            assert not bad.outcome.ok and bad.sequence is None and transfers.open == 0
            assert manager.probe(text) == known, "what came in part is taken for known"
            again = manager.open(text)
            for group, table in zip(receiver.rank.layout.groups, manager.lend(again).pages):
                for page in table[table >= 0].tolist():
                    here = slice(page * group.page_bytes, (page + 1) * group.page_bytes)
                    assert (receiver.rank.memory[here] == memory[here]).all(), "a cached page was overwritten"

    @pytest.mark.clause("TR-12")
    def test_nothing_is_done_before_the_answer(self) -> None:
        with self.world(Fault("hold", "answer")) as world:
            _, receiver, outgoing, incoming = world.transfer(payload=b"first")
            world.run()
            assert incoming.outcome is None and outgoing.outcome is None and incoming.byte_count == 0
            world.release()
            world.run(lambda: incoming.outcome is not None and outgoing.outcome is not None)
            assert incoming.outcome == outgoing.outcome == DONE and incoming.payload == b"first"
            receiver.verify()

    @pytest.mark.clause("TR-13")
    def test_evidence_that_comes_twice(self) -> None:
        with self.world(Fault("duplicate", "message", contains=EVIDENCE)) as world:
            senders = [world.process(f"s{i}", placement=Placement(i, 2)) for i in range(2)]
            receiver = world.process("receiver")
            senders[0].rank.fill(), senders[1].rank.fill()
            senders[0].offer()
            incoming = receiver.ask(*senders)
            world.run(lambda: receiver.stats.odd_evidence == 1)
            assert incoming.outcome is None
            senders[1].offer()
            world.run(lambda: incoming.outcome is not None)
            assert incoming.outcome == DONE
            receiver.verify()

    @pytest.mark.clause("TR-13")
    def test_evidence_that_cannot_be_true(self) -> None:
        with self.world(Fault("hold", "write", first=1)) as world:
            senders = [world.process(f"s{i}", placement=Placement(i, 2)) for i in range(2)]
            receiver, other, whole = (world.process(name) for name in ("receiver", "other", "whole"))
            for sender in senders:
                sender.rank.fill(), sender.offer()
            incoming = receiver.ask(*senders)
            world.run(lambda: incoming.byte_count > 0)
            tell(senders[0], receiver, Evidence("r", incoming.attempt, 0, 1, "failed", reason="no"))
            world.run(lambda: incoming.outcome is not None)
            assert incoming.outcome is not None and "contradicts itself" in incoming.outcome.reason
            other.rank.fill(), other.offer("q")
            receiver.ask(other, request="q")
            foreign = receiver.ask(whole, request="s", deadline_s=50)
            world.run()
            tell(other, receiver, Evidence("s", foreign.attempt, 0, 1, "done", 0))
            world.run(lambda: foreign.outcome is not None)
            assert foreign.outcome is not None and "was not asked to write" in foreign.outcome.reason

    @pytest.mark.clause("TR-14")
    def test_a_writer_without_anything_to_write_reports_too(self) -> None:
        model = Model(spec_of(heads=2), length=LENGTH)
        with self.world() as world:
            senders = [world.process(f"s{i}", placement=Placement(i, 4), model=model) for i in range(4)]
            receiver = world.process("receiver", model=model)
            for sender in senders:
                sender.rank.fill()
            sessions = [sender.offer() for sender in senders[:3]]
            incoming = receiver.ask(*senders)
            world.run(lambda: all(each.outcome is not None for each in sessions))
            assert incoming.outcome is None
            sessions.append(senders[3].offer())
            world.run(lambda: incoming.outcome is not None and sessions[3].outcome is not None)
            assert incoming.outcome == DONE and {each.outcome for each in sessions} == {DONE}
            assert sorted(each.byte_count > 0 for each in sessions) == [False, False, True, True]
            receiver.verify()

    @pytest.mark.clause("TR-15")
    def test_a_write_that_cannot_be_posted(self) -> None:
        with self.world(Fault("fail", "write")) as world:
            _, receiver, outgoing, incoming = world.transfer()
            world.run(lambda: incoming.quiescent and outgoing.quiescent)
            assert incoming.outcome is not None and "the transport refused to send it" in incoming.outcome.reason
            assert outgoing.outcome is not None and not outgoing.outcome.ok and receiver.untouched

    @pytest.mark.clause("TR-16")
    def test_an_error_of_the_sender_reaches_the_receiver_at_once(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            sender.rank.pages[0][2] = -1
            sender.offer()
            incoming = receiver.ask(sender)
            world.run(lambda: incoming.quiescent)
            assert incoming.outcome is not None and "block 2 is wanted and not here" in incoming.outcome.reason
            assert receiver.untouched

    @pytest.mark.clause("TR-17")
    def test_evidence_of_an_older_attempt(self) -> None:
        with self.world(Fault("late", "message", contains=EVIDENCE)) as world:
            _, receiver, outgoing, first = world.transfer()
            world.run(lambda: outgoing.outcome is not None)
            receiver.transceiver.cancel(first)
            world.run(lambda: first.quiescent)
            other = world.process("other")
            second = receiver.ask(other)
            assert second.attempt != first.attempt
            world.run()
            world.release()
            world.run(lambda: receiver.stats.odd_evidence > 0)
            assert second.outcome is None and second.byte_count == 0, "an old attempt's evidence was believed"

    @pytest.mark.clause("TR-18")
    def test_evidence_does_not_overtake_what_it_is_about(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            _, receiver, _, incoming = world.transfer()
            world.run()
            assert incoming.byte_count == 0 and incoming.outcome is None and receiver.untouched
            world.release()
            world.run(lambda: incoming.outcome is not None)
            receiver.verify()
