"""Sessions over the local transport: outcomes, quiescence, evidence and peers, with faults of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_world import LENGTH, WEAK, LocalWorld, spec_of

from kvist.errors import RequestError, TransferError
from kvist.testing.transfer.values import Model
from kvist.transfer.faults import Fault
from kvist.transfer.local import LOCAL
from kvist.transfer.messages import Cancel, Evidence, encode
from kvist.transfer.outcome import DONE, Outcome, Patience, Status
from kvist.transfer.pagetable import Placement

both = pytest.mark.parametrize("capabilities", [LOCAL, WEAK], ids=["fenced", "weak"])


def evidence(status="done"):
    """A message of a writer has this in it."""
    return "\xa8evidence".encode("latin-1")


@both
def test_a_request_moves(capabilities):
    world = LocalWorld(capabilities=capabilities)
    sender, receiver = world.pair()
    outgoing = sender.offer(payload=b"first token")
    incoming = receiver.ask(sender)
    assert incoming.outcome is None and not incoming.quiescent
    world.run()
    assert outgoing.outcome == incoming.outcome == DONE
    assert incoming.quiescent and outgoing.quiescent and incoming.payload == b"first token"
    receiver.verify()
    assert incoming.byte_count == outgoing.byte_count == sender.stats.sent_bytes == receiver.stats.received_bytes
    assert (sender.stats.sent, receiver.stats.received, receiver.stats.open_sessions) == (1, 1, 0)


def test_the_receiver_may_ask_first():
    world = LocalWorld()
    sender, receiver = world.pair()
    incoming = receiver.ask(sender)
    world.run()
    assert incoming.outcome is None and receiver.untouched and sender.stats.remembered == 1
    sender.offer()
    world.run()
    assert incoming.outcome == DONE
    receiver.verify()


@pytest.mark.parametrize(("send", "receive"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_all_ranks_of_both_sides(send, receive):
    world = LocalWorld()
    senders = [world.process(f"s{i}", placement=Placement(i, send)) for i in range(send)]
    receivers = [world.process(f"r{i}", placement=Placement(i, receive)) for i in range(receive)]
    outgoing = []
    for sender in senders:
        sender.rank.fill()
        outgoing.append(sender.offer(receivers=receive))
    incoming = [receiver.ask(*senders) for receiver in receivers]
    world.run()
    assert [session.outcome for session in outgoing + incoming] == [DONE] * (send + receive)
    for receiver in receivers:
        receiver.verify()


def test_chunks_go_ahead_and_windows_come_last():
    world = LocalWorld()
    sender, receiver = world.pair()
    outgoing, incoming = sender.transceiver.send("r"), receiver.ask(sender)
    history, window = sender.rank.pages
    for begin in (0, 16, 24):
        sender.transceiver.add(outgoing, [history, None], begin, begin + (16 if begin == 0 else 8), last=False)
        world.run()
        assert incoming.outcome is None
    sent = receiver.rank.memory.copy()
    assert incoming.byte_count == 32 * 2 * 4 * 12
    sender.transceiver.add(outgoing, [history, None], 32, LENGTH, last=False)
    sender.transceiver.add(outgoing, [None, window], 0, LENGTH, last=True, payload=b"x")
    world.run()
    assert incoming.outcome == outgoing.outcome == DONE and incoming.payload == b"x"
    assert (receiver.rank.memory[sent != 0xA5] == sent[sent != 0xA5]).all()
    receiver.verify()


# Ownership


@both
def test_pages_of_the_sender_stay_until_the_last_write_is_answered(capabilities):
    world = LocalWorld(Fault("hold", "write"), capabilities=capabilities)
    sender, receiver = world.pair()
    outgoing, incoming = sender.offer(deadline_s=3), receiver.ask(sender)
    world.wait(4)
    assert outgoing.outcome.status is Status.TIMED_OUT and not outgoing.quiescent
    assert sender.transceiver.cancel(outgoing) is False
    world.network.release()
    world.run()
    assert outgoing.quiescent and sender.transceiver.cancel(outgoing)
    assert incoming.quiescent


def test_a_cancel_before_publication_frees_at_once():
    world = LocalWorld(Fault("hold", "message"))
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender)
    world.run()
    assert receiver.transceiver.cancel(incoming) is True
    receiver.poison()
    world.network.release()
    world.wait(30)
    assert (receiver.rank.memory == 0xEE).all() and not world.network.writes


@both
def test_a_cancel_during_the_write(capabilities):
    world = LocalWorld(Fault("hold", "write"), capabilities=capabilities)
    sender, receiver = world.pair()
    outgoing, incoming = sender.offer(), receiver.ask(sender)
    world.run()
    # With grants the write can be shut out; otherwise it has to be waited for.
    assert receiver.transceiver.cancel(incoming) is False
    assert receiver.transceiver.cancel(incoming) is False
    world.run()
    assert incoming.outcome == Outcome(Status.CANCELLED, "it was cancelled")
    assert incoming.quiescent == capabilities.grants
    assert receiver.stats.quarantined_pages == (0 if capabilities.grants else incoming.page_count)
    if incoming.quiescent:
        receiver.poison()
    world.network.release()
    world.run()
    assert incoming.quiescent and incoming.outcome.status is Status.CANCELLED
    assert receiver.transceiver.cancel(incoming) is True
    if capabilities.grants:
        assert (receiver.rank.memory == 0xEE).all()
    assert outgoing.quiescent and not outgoing.outcome.ok
    assert receiver.stats.received == 0 and receiver.stats.quarantined_pages == 0


def test_publication_that_fails_half_way():
    # The third of four writers cannot be told: the two before it are waited for, the others are not.
    world = LocalWorld(Fault("hold", "write"), capabilities=WEAK)
    senders = [world.process(f"s{i}", placement=Placement(i, 4)) for i in range(4)]
    receiver = world.process("receiver")
    for sender in senders:
        sender.rank.fill()
        sender.offer()
    transport, message = receiver.transport, receiver.transport.message

    def failing(peer, data):
        if peer.name == "s2" and b"publish" in data:
            raise TransferError("no")
        message(peer, data)

    transport.message = failing
    incoming = receiver.ask(*senders)
    world.run()
    assert incoming.outcome.reason.endswith("could not be told where to write")
    assert incoming.outcome.reason.startswith("'s2'") and not incoming.quiescent
    # s1 has written; the write of s0 is held.
    assert [partner.peer.name for partner in incoming.partners] == ["s0"]
    world.network.release()
    world.run()
    assert incoming.quiescent and {write.sender for write in world.network.writes} == {"s0", "s1"}


@both
def test_a_timeout_does_not_free_what_may_still_be_written(capabilities):
    world = LocalWorld(Fault("hold", "write"), capabilities=capabilities)
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender, deadline_s=2)
    world.wait(3)
    assert incoming.outcome == Outcome(Status.TIMED_OUT, "it did not end within 2 s")
    assert incoming.quiescent == capabilities.grants
    world.network.release()
    world.run()
    assert incoming.quiescent and incoming.outcome.status is Status.TIMED_OUT and receiver.stats.received == 0


@both
def test_evidence_that_is_lost_for_ever(capabilities):
    world = LocalWorld(Fault("drop", "message", contains=evidence(), count=1000), capabilities=capabilities)
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender, deadline_s=2)
    world.wait(2.5)
    assert incoming.outcome.status is Status.TIMED_OUT
    assert incoming.quiescent == capabilities.grants
    world.wait(30)
    # Without a fence nobody knows: quarantined and counted, and nothing more is asked of that peer.
    assert incoming.quiescent == capabilities.grants
    assert receiver.stats.quarantined_pages == (0 if capabilities.grants else incoming.page_count)
    if not capabilities.grants:
        world.kill(sender)
        world.run()
        assert incoming.quiescent and receiver.stats.quarantined_pages == 0


def test_the_last_word_is_asked_for_again():
    world = LocalWorld(Fault("drop", "message", contains=evidence()), capabilities=WEAK)
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender, deadline_s=2)
    world.wait(3)
    assert incoming.outcome.status is Status.TIMED_OUT and incoming.quiescent


def test_memory_is_not_protected_by_closing_a_connection():
    # Weak transports let writes through afterwards, so pages wait for the writer's last word, or for its death.
    world = LocalWorld(Fault("late", "write"), capabilities=WEAK)
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender, deadline_s=2)
    world.wait(3)
    assert not incoming.quiescent
    world.network.release()
    world.run()
    assert incoming.quiescent


# Evidence


def test_evidence_follows_the_data():
    world = LocalWorld(Fault("hold", "write"))
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender)
    world.run()
    assert incoming.byte_count == 0 and incoming.outcome is None
    world.network.release()
    world.run()
    assert incoming.outcome == DONE


def test_evidence_that_comes_twice():
    world = LocalWorld(Fault("duplicate", "message", contains=evidence()))
    senders = [world.process(f"s{i}", placement=Placement(i, 2)) for i in range(2)]
    receiver = world.process("receiver")
    for sender in senders:
        sender.rank.fill()
    senders[0].offer()
    incoming = receiver.ask(*senders)
    world.run()
    assert incoming.outcome is None and receiver.stats.odd_evidence == 1
    senders[1].offer()
    world.run()
    assert incoming.outcome == DONE
    receiver.verify()


def _tell(process, other, message):
    (peer,) = [p.peer for p in process.transceiver._partners.values() if p.peer.name == other.name]
    process.transport.message(peer, encode(message))


@both
def test_evidence_that_contradicts_itself(capabilities):
    world = LocalWorld(Fault("hold", "write", first=1), capabilities=capabilities)
    senders = [world.process(f"s{i}", placement=Placement(i, 2)) for i in range(2)]
    receiver = world.process("receiver")
    for sender in senders:
        sender.rank.fill()
        sender.offer()
    incoming = receiver.ask(*senders)
    world.run()
    _tell(senders[0], receiver, Evidence("r", incoming.attempt, 0, 1, "failed", reason="no"))
    world.run()
    assert not incoming.outcome.ok and incoming.outcome.reason.endswith("contradicts itself")
    assert receiver.stats.wrong_evidence + receiver.stats.failed >= 1
    world.network.release()
    world.run()
    # Nothing that it says settles it any more.
    assert incoming.quiescent == capabilities.grants


def test_evidence_of_somebody_who_was_not_asked():
    world = LocalWorld(Fault("hold", "write"))
    sender, receiver = world.pair()
    other = world.process("other")
    other.rank.fill()
    other.offer("q")
    assert receiver.ask(other, request="q", deadline_s=20)
    sender.offer()
    incoming = receiver.ask(sender)
    world.run()
    _tell(other, receiver, Evidence("r", incoming.attempt, 0, 1, "done", 0))
    world.run()
    assert incoming.outcome.reason.endswith("reports and was not asked to write")


def test_a_writer_without_anything_to_write_reports_too():
    # 4 ranks with replicas of 2 heads: two of them are not the ones that send.
    model = Model(spec_of(heads=2), length=LENGTH)
    world = LocalWorld()
    senders = [world.process(f"s{i}", placement=Placement(i, 4), model=model) for i in range(4)]
    receiver = world.process("receiver", model=model)
    for sender in senders:
        sender.rank.fill()
    sessions = [sender.offer() for sender in senders[:3]]
    incoming = receiver.ask(*senders)
    world.run()
    assert incoming.outcome is None
    sessions.append(senders[3].offer())
    world.run()
    assert incoming.outcome == DONE and [session.outcome for session in sessions] == [DONE] * 4
    assert sorted(session.byte_count > 0 for session in sessions) == [False, False, True, True]
    receiver.verify()


@both
def test_a_write_that_cannot_be_posted(capabilities):
    world = LocalWorld(Fault("fail", "write"), capabilities=capabilities)
    sender, receiver = world.pair()
    outgoing, incoming = sender.offer(), receiver.ask(sender)
    world.run()
    assert incoming.outcome == Outcome(
        Status.FAILED, f"{incoming._writers[0].partner.peer}: the transport refused to send it"
    )
    assert incoming.quiescent and outgoing.quiescent and not outgoing.outcome.ok


def test_an_error_of_the_sender_reaches_the_receiver_at_once():
    world = LocalWorld()
    sender, receiver = world.pair()
    sender.rank.pages[0][2] = -1
    sender.offer()
    incoming = receiver.ask(sender)
    world.run()
    assert "group target/History(): block 2 is wanted and not here" in incoming.outcome.reason
    assert incoming.quiescent and receiver.untouched


def test_evidence_of_an_older_attempt():
    world = LocalWorld(Fault("late", "message", contains=evidence()))
    sender, receiver = world.pair()
    sender.offer()
    first = receiver.ask(sender)
    world.run()
    receiver.transceiver.cancel(first)
    world.run()
    assert first.quiescent
    second = receiver.ask(sender)
    world.network.release()
    world.run()
    assert second.attempt != first.attempt and not second.outcome.ok and receiver.stats.odd_evidence == 1
    # A request that has ended at the sender is offered again, and then it works.
    sender.offer("r again")
    third = receiver.ask(sender, request="r again")
    world.run()
    assert third.outcome == DONE


# Peers


@both
def test_a_peer_that_dies_idle(capabilities):
    world = LocalWorld(capabilities=capabilities)
    sender, receiver = world.pair()
    incoming = receiver.ask(sender)
    world.run()
    world.kill(sender)
    world.run()
    assert incoming.outcome.reason.endswith("its process has ended") and incoming.quiescent
    assert receiver.stats.peers == 0


@both
@pytest.mark.parametrize("who", ["kill_sender", "kill_receiver"])
def test_a_peer_that_dies_in_the_middle_of_a_write(who, capabilities):
    world = LocalWorld(Fault(who, "write"), capabilities=capabilities)
    sender, receiver = world.pair()
    other = world.process("other")
    other.rank.fill()
    outgoing, incoming = sender.offer(), receiver.ask(sender)
    world.run()
    dead, alive = (sender, receiver) if who == "kill_sender" else (receiver, sender)
    session = incoming if alive is receiver else outgoing
    world.processes.remove(dead)
    world.run()
    assert not session.outcome.ok and session.quiescent
    # The survivor goes on with others.
    if alive is receiver:
        receiver.rank.memory[:] = 0xA5
        world.network.writes.clear()
        other.offer("s")
        again = receiver.ask(other, request="s")
        world.run()
        assert again.outcome == DONE
        receiver.verify()
    else:
        sender.offer("s")
        again = other.ask(sender, request="s")
        world.run()
        assert again.outcome == DONE


@both
def test_a_stalled_sender(capabilities):
    world = LocalWorld(Fault("hold", "write"), capabilities=capabilities)
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender, deadline_s=30)
    world.run()
    world.stall(sender)
    world.wait(6)
    assert "no sign of life for 5" in incoming.outcome.reason
    assert incoming.quiescent == (capabilities.grants or capabilities.close_is_fence)
    if not incoming.quiescent:
        refused = receiver.ask(sender, request="s")
        assert "no sign of life" in refused.outcome.reason and refused.quiescent
        world.resume(sender)
        world.network.release()
        world.wait(2)
        assert incoming.quiescent
        sender.offer("t")
        again = receiver.ask(sender, request="t")
        world.run()
        assert again.outcome == DONE


@both
def test_a_stalled_receiver(capabilities):
    world = LocalWorld(
        Fault("stall_receiver", "message", contains=b"publish", receiver="sender"), capabilities=capabilities
    )
    sender, receiver = world.pair()
    outgoing, incoming = sender.offer(deadline_s=30), receiver.ask(sender, deadline_s=3)
    world.wait(4)
    assert incoming.outcome.status is Status.TIMED_OUT
    world.resume(sender)
    world.wait(30)
    assert outgoing.quiescent and not outgoing.outcome.ok and incoming.quiescent


def test_a_peer_that_has_restarted():
    world = LocalWorld()
    sender, receiver = world.pair()
    stale = sender.hello()
    incoming = receiver.ask(sender)
    world.run()
    world.kill(sender)
    again = world.process("sender")
    again.rank.fill()
    world.run()
    assert not incoming.outcome.ok
    again.offer()
    dead = receiver.transceiver.receive("r2", receiver.rank.pages, LENGTH, [stale])
    world.run()
    assert "nobody is there" in dead.outcome.reason and dead.quiescent and receiver.untouched
    fresh = receiver.ask(again)
    world.run()
    assert fresh.outcome == DONE
    receiver.verify()


def test_nobody_asks():
    world = LocalWorld()
    sender, _ = world.pair()
    outgoing = sender.offer(deadline_s=5)
    world.wait(6)
    assert outgoing.outcome == Outcome(Status.TIMED_OUT, "it did not end within 5 s") and outgoing.quiescent


def test_nobody_offers():
    world = LocalWorld()
    sender, receiver = world.pair()
    incoming = receiver.ask(sender, deadline_s=5)
    world.wait(6)
    assert not incoming.outcome.ok and incoming.quiescent and sender.stats.remembered == 0
    outgoing = sender.offer()
    world.wait(30)
    assert outgoing.outcome.status is Status.TIMED_OUT


def test_who_asks_too_late_is_told_why():
    world = LocalWorld()
    sender, receiver = world.pair()
    outgoing = sender.offer()
    assert sender.transceiver.cancel(outgoing) is True
    world.run()
    incoming = receiver.ask(sender)
    world.run()
    assert incoming.outcome.reason.endswith("it was cancelled") and incoming.quiescent
    world.wait(70)
    assert sender.stats.remembered == 0


def test_the_sender_gives_up_before_it_writes():
    world = LocalWorld()
    sender, receiver = world.pair()
    outgoing = sender.transceiver.send("r")
    incoming = receiver.ask(sender)
    world.run()
    assert sender.transceiver.cancel(outgoing) is True
    world.run()
    assert incoming.outcome.reason.endswith("it was cancelled") and incoming.quiescent and receiver.untouched


@both
def test_the_sender_gives_up_after_some_pieces(capabilities):
    # What it has written stays written; that it writes no more is its last word, and settles it.
    world = LocalWorld(capabilities=capabilities)
    sender, receiver = world.pair()
    outgoing, incoming = sender.transceiver.send("r"), receiver.ask(sender)
    sender.transceiver.add(outgoing, [sender.rank.pages[0], None], 0, 16, last=False)
    world.run()
    assert incoming.byte_count > 0
    sender.transceiver.cancel(outgoing)
    world.run()
    assert incoming.outcome.reason.endswith("it was cancelled") and incoming.quiescent and outgoing.quiescent
    assert (receiver.stats.wrong_evidence, receiver.stats.quarantined_pages) == (0, 0)


def test_a_receiver_that_never_will_ask_says_so():
    world = LocalWorld()
    sender, receiver = world.pair()
    bad = world.process("bad", model=Model(spec_of(fingerprint="other"), length=LENGTH))
    outgoing = sender.offer()
    incoming = bad.ask(sender)
    world.run()
    assert "fingerprint of the target model: the sender has model, the receiver other" in incoming.outcome.reason
    assert incoming.quiescent and bad.untouched
    assert outgoing.outcome.status is Status.CANCELLED and outgoing.quiescent
    # Both work on with peers that fit.
    sender.offer("s")
    good = receiver.ask(sender, request="s")
    world.run()
    assert good.outcome == DONE


def test_request_ids_are_checked():
    world = LocalWorld(Fault("hold", "write"))
    sender, receiver = world.pair()
    sender.offer()
    incoming = receiver.ask(sender)
    with pytest.raises(RequestError) as error:
        sender.offer()
    assert str(error.value) == "request 'r' is being sent already\nhint: give each request its own id"
    with pytest.raises(RequestError) as error:
        receiver.ask(sender)
    assert str(error.value) == "request 'r' is being received already\nhint: give each request its own id"
    with pytest.raises(RequestError) as error:
        receiver.ask(request="s")
    assert str(error.value) == "request 's' has no sender"
    world.run()
    world.network.release()
    world.run()
    assert incoming.outcome == DONE


def test_messages_that_make_no_sense():
    world = LocalWorld()
    sender, receiver = world.pair()
    incoming = receiver.ask(sender)
    world.run()
    (peer,) = [partner.peer for partner in sender.transceiver._partners.values()]
    _tell(sender, receiver, Cancel("nothing", 99))
    _tell(sender, receiver, Evidence("nothing", 99, 0, 1, "done"))
    world.run()
    assert receiver.stats.odd_evidence == 1 and incoming.outcome is None
    sender.transport.message(peer, b"\xc1")
    world.run()
    assert "a message cannot be read" in incoming.outcome.reason and incoming.quiescent


def test_closing():
    world = LocalWorld(Fault("hold", "write"), capabilities=WEAK)
    sender, receiver = world.pair()
    outgoing, incoming = sender.offer(), receiver.ask(sender)
    world.run()
    with pytest.raises(TransferError) as error:
        receiver.transceiver.close(timeout_s=0.05)
    assert str(error.value) == (
        "1 request(s) are still being written or read\nhint: close again when their peers have ended"
    )
    world.network.release()
    world.run()
    for process in (receiver, sender):
        process.transceiver.close(timeout_s=0.05)
        process.transceiver.close(timeout_s=0.05)
    assert not incoming.outcome.ok and not outgoing.outcome.ok


def test_many_requests_with_cancellations():
    world = LocalWorld(patience=Patience(remember_s=1))
    sender, receiver = world.pair()
    rng = np.random.default_rng(0)
    # One page of each group is enough, and makes it quick.
    for process in (sender, receiver):
        process.rank.pages = [process.rank.pages[0][:1], process.rank.pages[1][:1]]
    outcomes = []
    for number in range(400):
        request = f"r{number}"
        cancels = rng.random() < 0.1
        incoming = receiver.transceiver.receive(request, receiver.rank.pages, 8, [sender.hello()])
        if cancels and rng.random() < 0.5:
            receiver.transceiver.cancel(incoming)
        outgoing = sender.transceiver.send(request)
        if cancels and rng.random() < 0.5:
            sender.transceiver.cancel(outgoing)
        sender.transceiver.add(outgoing, sender.rank.pages, 0, 8, last=True)
        world.run(2)
        if cancels:
            receiver.transceiver.cancel(incoming)
        outcomes.append((incoming, outgoing))
    world.wait(3)
    assert all(i.quiescent and o.quiescent for i, o in outcomes)
    assert sum(i.outcome.ok for i, _ in outcomes) > 300
    for process in (sender, receiver):
        stats = process.stats
        assert (stats.open_sessions, stats.quarantined_pages, stats.remembered) == (0, 0, 0)
        assert not process.transceiver._tokens and not process.transceiver._grants and not process.transceiver._attempts
