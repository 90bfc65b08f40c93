"""Clauses about peers that end, stop or come back, and about what is left when all is over."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import TransferError
from kvist.testing.transfer.author import TransportAuthor
from kvist.testing.transfer.remote import Remote
from kvist.testing.transfer.values import Model
from kvist.testing.transfer.world import LENGTH, spec_of
from kvist.transfer.faults import Fault
from kvist.transfer.outcome import DONE, Patience, Status


class PartnerTests(TransportAuthor):
    """Part of :class:`kvist.testing.transfer.TransceiverTests`."""

    @pytest.mark.clause("TR-19")
    def test_a_peer_that_ends_idle(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            incoming = receiver.ask(sender)
            world.run()
            world.remove(sender)
            world.run(lambda: incoming.quiescent)
            assert incoming.outcome is not None and not incoming.outcome.ok
            world.run(lambda: receiver.stats.peers == 0)

    @pytest.mark.clause("TR-20")
    def test_survivors_go_on_with_others(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            sender, receiver = world.pair()
            other = world.process("other")
            other.rank.fill()
            sender.offer()
            incoming = receiver.ask(sender)
            world.run()
            for partner in list(sender.transceiver._partners.values()):
                sender.transport.disconnect(partner.peer)
            world.processes.remove(sender)
            world.run(lambda: incoming.quiescent)
            other.offer("s")
            again = receiver.ask(other, request="s")
            world.run(lambda: again.outcome is not None)
            assert again.outcome == DONE
            receiver.verify()
            world.processes.append(sender)

    @pytest.mark.clause("TR-19", "TR-20")
    @pytest.mark.slow
    @pytest.mark.parametrize("who", ["sender", "receiver"])
    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a write"])
    def test_a_process_that_is_killed(self, who: str, busy: bool) -> None:
        self.require_processes()
        with Remote(self.factory, "sender", fill=True) as sender, Remote(self.factory, "receiver") as receiver:
            other = Remote(self.factory, "other", fill=True)
            with other:
                dead, alive = (sender, receiver) if who == "sender" else (receiver, sender)
                hello = sender.call("hello")
                if busy:
                    sender.call("offer_many", "r", 200)
                receiver.call("ask_many", "r", [hello], 200, 20.0)
                if busy:
                    receiver.until("some_done", "r", timeout_s=10)
                dead.kill()
                if who == "receiver":
                    # Of the rest it cannot know that nobody will ask for it.
                    alive.until("alone", timeout_s=10)
                    alive.call("give_up")
                alive.until("all_ended", timeout_s=15)
                assert alive.call("leaks") == []
                # The survivor goes on with others.
                if who == "sender":
                    other.call("offer", "s")
                    receiver.call("ask", "s", other.call("hello"), 10.0)
                    receiver.until("all_ended", timeout_s=15)
                    assert receiver.call("outcome", "s") == "done" and receiver.call("verify")
                else:
                    sender.call("offer", "s")
                    other.call("ask", "s", hello, 10.0)
                    other.until("all_ended", timeout_s=15)
                    assert other.call("outcome", "s") == "done"

    @pytest.mark.clause("TR-21")
    def test_a_peer_that_stalls(self) -> None:
        with self.world(Fault("hold", "write"), patience=Patience(request_s=60)) as world:
            sender, receiver, _, incoming = world.transfer()
            world.run()
            sender.stalled = True
            world.wait(7)
            assert incoming.outcome is not None and "no sign of life" in incoming.outcome.reason
            capabilities = receiver.transport.capabilities
            assert incoming.quiescent is (capabilities.grants or capabilities.close_is_fence)
            sender.stalled = False
            world.release()
            world.run(lambda: incoming.quiescent)

    @pytest.mark.clause("TR-21")
    @pytest.mark.slow
    @pytest.mark.parametrize("who", ["sender", "receiver"])
    def test_a_process_that_is_stopped(self, who: str) -> None:
        self.require_processes()
        with Remote(self.factory, "sender", fill=True) as sender, Remote(self.factory, "receiver") as receiver:
            stopped, alive = (sender, receiver) if who == "sender" else (receiver, sender)
            hello = sender.call("hello")
            sender.call("offer_many", "r", 300)
            receiver.call("ask_many", "r", [hello], 300, 6.0)
            receiver.until("some_done", "r", timeout_s=10)
            stopped.stop()
            alive.call("start_no_more")
            if who == "receiver":
                # It cannot know that nobody will ask for the rest. What it sends is its own again all the same.
                alive.call("give_up")
                alive.until("all_ended", timeout_s=15)
            alive.until("all_decided", timeout_s=15)
            stopped.go_on()
            stopped.call("start_no_more")
            sender.call("give_up")
            alive.until("all_ended", timeout_s=15)
            stopped.until("all_ended", timeout_s=15)
            assert alive.call("leaks") == stopped.call("leaks") == []

    @pytest.mark.clause("TR-22", "TR-23")
    def test_a_peer_that_has_restarted(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            stale = sender.hello()
            incoming = receiver.ask(sender)
            world.run()
            world.remove(sender)
            again = world.process("sender")
            again.rank.fill()
            world.run(lambda: incoming.quiescent)
            again.offer()
            dead = receiver.transceiver.receive("r2", receiver.rank.pages, LENGTH, [stale])
            world.run(lambda: dead.quiescent)
            assert dead.outcome is not None and not dead.outcome.ok and receiver.untouched
            fresh = receiver.ask(again)
            world.run(lambda: fresh.outcome is not None)
            assert fresh.outcome == DONE
            receiver.verify()

    @pytest.mark.clause("TR-24")
    def test_nobody_offers(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            incoming = receiver.ask(sender, deadline_s=5)
            world.wait(6)
            assert incoming.outcome is not None and not incoming.outcome.ok and incoming.quiescent
            assert sender.stats.remembered == 0

    @pytest.mark.clause("TR-24")
    def test_a_receiver_that_never_will_ask_says_so(self) -> None:
        with self.world() as world:
            sender, _ = world.pair()
            bad = world.process("bad", model=Model(spec_of(fingerprint="other"), length=LENGTH))
            outgoing = sender.offer()
            bad.ask(sender)
            world.run(lambda: outgoing.quiescent)
            assert outgoing.outcome is not None and outgoing.outcome.status is Status.CANCELLED

    @pytest.mark.clause("TR-25")
    def test_nobody_asks(self) -> None:
        with self.world() as world:
            sender, _ = world.pair()
            outgoing = sender.offer(deadline_s=5)
            world.wait(6)
            assert outgoing.outcome is not None and outgoing.outcome.status is Status.TIMED_OUT and outgoing.quiescent

    @pytest.mark.clause("TR-35")
    def test_a_peer_that_does_not_fit(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            for name, model, reason in (
                ("other", Model(spec_of(fingerprint="other"), length=LENGTH), "fingerprint"),
                ("wide", Model(spec_of(dtype="int32"), length=LENGTH), "int32"),
                ("heads", Model(spec_of(heads=8), length=LENGTH), "sections"),
            ):
                bad = world.process(name, model=model)
                sender.offer(name)
                refused = bad.ask(sender, request=name)
                world.run(lambda: refused.outcome is not None)  # noqa: B023
                assert refused.outcome is not None and reason in refused.outcome.reason, refused.outcome
                assert bad.untouched and refused.quiescent
            sender.offer("good")
            good = receiver.ask(sender, request="good")
            world.run(lambda: good.outcome is not None)
            assert good.outcome == DONE
            receiver.verify()

    @pytest.mark.clause("TR-38")
    def test_closing_waits_for_what_is_under_way(self) -> None:
        with self.world(Fault("hold", "write")) as world:
            sender, receiver, _, incoming = world.transfer()
            world.run()
            if receiver.transport.capabilities.grants:
                with pytest.raises(TransferError):
                    sender.transceiver.close(timeout_s=0.05)
            else:
                with pytest.raises(TransferError):
                    receiver.transceiver.close(timeout_s=0.05)
            world.release()
            world.run(lambda: incoming.quiescent)
            world.run()
            for process in (receiver, sender):
                process.transceiver.close()
                process.transceiver.close()
            world.processes.clear()

    @pytest.mark.clause("TR-39")
    def test_many_requests_with_cancellations(self) -> None:
        self._many(120)

    def _many(self, count: int) -> None:
        rng = np.random.default_rng(0)
        with self.world(patience=Patience(remember_s=1)) as world:
            sender, receiver = world.pair()
            # One page of each group is enough.
            for process in (sender, receiver):
                process.rank.pages = [pages[:1] for pages in process.rank.pages]
            done = 0
            for number in range(count):
                request, cancels = f"r{number}", rng.random() < 0.1
                incoming = receiver.transceiver.receive(request, receiver.rank.pages, 8, [sender.hello()])
                if cancels and rng.random() < 0.5:
                    receiver.transceiver.cancel(incoming)
                outgoing = sender.transceiver.send(request)
                if cancels and rng.random() < 0.5:
                    sender.transceiver.cancel(outgoing)
                sender.transceiver.add(outgoing, sender.rank.pages, 0, 8, last=True)
                if cancels:
                    receiver.transceiver.poll()
                    receiver.transceiver.cancel(incoming)
                world.run(lambda: incoming.quiescent and outgoing.quiescent)  # noqa: B023
                assert incoming.outcome is not None
                done += incoming.outcome.ok
            world.wait(3)
            assert done >= 0.8 * count
            for process in (sender, receiver):
                stats = process.stats
                assert (stats.open_sessions, stats.quarantined_pages, stats.remembered) == (0, 0, 0)
                assert stats.sent + stats.received + stats.failed == count, "a session is still known"
