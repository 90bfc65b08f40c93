"""Transports and transceivers with a fault each: the local transport changed, or one text of Kvist's own replaced.

``make()`` gives a context manager: while it is entered, the suite that it returns meets the fault.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import msgspec
from kit.mutants.base import Mutant
from kit.mutants.planted import planted

from kvist.testing.transfer import TransceiverTests, TransportTests
from kvist.transfer.local import LocalTransport
from kvist.transfer.transport import Done, IncompatibleError, Peer, PeerDown, TransportContext


class LocalAuthor:
    """What the author of the local transport says about it."""

    factory = "kvist.transfer.local:LocalTransport"
    between_processes = False
    quiet_s = 0.0

    def kill(self, transport):
        transport.network.kill(transport)


class Unchecked(LocalTransport):
    """Takes grants, and looks at none."""

    def refusal(self, link, fragments, grant):
        return ""


class LateWrites(LocalTransport):
    """Writes when it is polled, and lets messages go ahead."""

    early = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.later = []

    def write(self, peer, fragments, grant, token):
        if self.early:
            self.events.append(Done(token))
        self.later.append((peer, fragments, grant, token))

    def poll(self, timeout_s):
        if self.early and self.events:
            return super().poll(timeout_s)
        later, self.later = self.later, []
        for each in later:
            super().write(*each)
        return super().poll(timeout_s)


class DoneTooEarly(LateWrites):
    """Says that a write is done once it has taken it."""

    early = True


class ForgetsNothings(LocalTransport):
    """A write of nothing needs no answer, does it?"""

    def write(self, peer, fragments, grant, token):
        if len(fragments):
            super().write(peer, fragments, grant, token)


class LosesTheLast(LocalTransport):
    """One fragment too few."""

    def write(self, peer, fragments, grant, token):
        count = max(1, len(fragments) - 1)
        arrays = (each[:count] for each in (fragments.sources, fragments.destinations, fragments.byte_counts))
        regions = fragments.source_region, fragments.destination_region
        super().write(peer, type(fragments)(*arrays, *regions), grant, token)


class NeverDown(LocalTransport):
    """Keeps it for itself that a peer has gone."""

    def poll(self, timeout_s):
        return [event for event in super().poll(timeout_s) if not isinstance(event, PeerDown)]


class GoesByName(LocalTransport):
    """Connects to whoever has the name."""

    def connect(self, hello):
        with contextlib.suppress(msgspec.DecodeError):
            name = msgspec.msgpack.decode(hello)["name"]
            found = [end for end in self.network._ends.values() if end.name == name]
            hello = found[-1].hello() if found else hello
        return super().connect(hello)


class Credulous(LocalTransport):
    """Takes anything for a hello."""

    def connect(self, hello):
        try:
            return super().connect(hello)
        except IncompatibleError:
            return Peer(99, "somebody", "somebody")


class OneForAll(LocalTransport):
    """Has an identity that it was given."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.network.leave(self)
        self.identity = "always the same"
        self.network.join(self)


class DiesOfForks(LocalTransport):
    """Sends nothing any more once its process has forked."""

    born: ClassVar[int] = 0

    def write(self, peer, fragments, grant, token):
        if self.born == _forks:
            super().write(peer, fragments, grant, token)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.born = _forks


_forks = 0


def _forked():
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_forked)


class Sound(LocalAuthor, TransportTests, TransceiverTests):
    """Both suites over the local transport."""


@contextlib.contextmanager
def _stranger(transport: type[LocalTransport]) -> Iterator[type]:
    class Strange(Sound):
        def transport(self, name):
            return transport(TransportContext(name))

    yield Strange


@contextlib.contextmanager
def _planted(file: str, old: str, new: str) -> Iterator[type]:
    with planted(f"transfer/{file}", old, new):
        yield Sound


_STRANGERS = (
    ("TR-02", Unchecked),
    ("TR-07", Unchecked),
    ("TR-10", Unchecked),
    ("TR-12", DoneTooEarly),
    ("TR-14", ForgetsNothings),
    ("TR-18", LateWrites),
    ("TR-19", NeverDown),
    ("TR-20", NeverDown),
    ("TR-22", GoesByName),
    ("TR-23", Credulous),
    ("TR-26", LosesTheLast),
    ("TR-37", OneForAll),
    ("TR-40", DiesOfForks),
)

_PLANTED = (
    (
        "TR-01",
        "pages are free at the end",
        "outgoing.py",
        "return self.outcome is not None and not any(each.writing for each in self._deliveries.values())",
        "return self.outcome is not None",
    ),
    (
        "TR-03",
        "waits for the untold",
        "incoming.py",
        "all(writer.settled or not writer.told for",
        "all(writer.settled for",
    ),
    ("TR-04", "tells nobody", "incoming.py", "self._post.say(writer.partner, Cancel(self.request, 0))", "pass"),
    (
        "TR-05",
        "thinks that it told",
        "incoming.py",
        "writer.told = self._post.say(writer.partner, publish)",
        "writer.told = self._post.say(writer.partner, publish) or True",
    ),
    ("TR-06", "cancelled is free", "transceiver.py", "return session.quiescent", "return True"),
    (
        "TR-08",
        "what is published cannot be cancelled",
        "incoming.py",
        '"""End it, unless it has ended."""\n        self._end(outcome, now_s)',
        '"""End it, unless it has ended."""\n        self._published or self._end(outcome, now_s)',
    ),
    (
        "TR-09",
        "no deadline",
        "switchboard.py",
        "if session.outcome is None and now_s >= session.deadline_s:",
        "if session.outcome is not None and now_s < 0:",
    ),
    ("TR-11", "publishes anything", "transfers.py", "if not outcome.ok:", "if outcome is None:"),
    ("TR-13", "counts repetitions as lies", "incoming.py", "self.odd += 1", "self.wrong += 1"),
    ("TR-15", "fails silently", "outgoing.py", "self._post.say(delivery.partner, last_word)", "pass"),
    ("TR-16", "raises in the loop", "outgoing.py", "except Exception as error:", "except ZeroDivisionError as error:"),
    (
        "TR-17",
        "goes by the request",
        "switchboard.py",
        "session = self._attempts.get(message.attempt)",
        "session = self._incoming.get(message.request)",
    ),
    ("TR-21", "patience without end", "switchboard.py", "if silent_s >= self._patience.silent_s and", "if False and"),
    ("TR-24", "does not say no", "incoming.py", "self._post.say(writer.partner, Cancel(self.request, 0))", "pass"),
    (
        "TR-25",
        "a sender has time",
        "switchboard.py",
        "if session.outcome is None and now_s >= session.deadline_s:",
        "if session.outcome is None and now_s >= session.deadline_s and isinstance(session, Incoming):",
    ),
    (
        "TR-27",
        "layers are alike",
        "pagetable.py",
        "return self.domain, self.layer, self.stream",
        "return self.domain, 0, self.stream",
    ),
    ("TR-28", "always the first", "mapping.py", "(other.replica + turn) % replicas", "other.replica % replicas"),
    ("TR-29", "chunks repeat", "mapping.py", "ours[: span[0] // self._piece_tokens] = False", "pass"),
    (
        "TR-30",
        "cuts across sections",
        "pagetable.py",
        "begin = total + self.shard * share",
        "begin = self.shard * share",
    ),
    (
        "TR-31",
        "side caches stay",
        "compatibility.py",
        "if part.key in known:",
        "if part.key in known and part.tokens_per_row == 1:",
    ),
    ("TR-32", "sends all it has", "mapping.py", "wanted = (destinations != NO_PAGE) & ours", "wanted = ours"),
    (
        "TR-33",
        "wants what it has room for",
        "mapping.py",
        "there if length is None else there[: -(-length // piece_tokens)]",
        "there",
    ),
    (
        "TR-34",
        "asks for drafts of a model that nobody has",
        "compatibility.py",
        "for part in group.parts if group.domain in domains else ():",
        "for part in group.parts:",
    ),
    (
        "TR-35",
        "takes any model",
        "compatibility.py",
        "if sender.fingerprints[domain] != receiver.fingerprints[domain]",
        "if domain is None",
    ),
    (
        "TR-36",
        "blocks in a row",
        "mapping.py",
        "// per_block % count == self._sender.context_rank",
        "// per_block // count == self._sender.context_rank",
    ),
    ("TR-38", "closes in the midst", "transceiver.py", "if self._sessions:", "if self._sessions is None:"),
    ("TR-39", "forgets nothing", "switchboard.py", "if now_s >= until_s:", "if now_s < 0:"),
)

MUTANTS = [
    *(Mutant(f"{kind.__name__} {clause}", clause, partial(_stranger, kind)) for clause, kind in _STRANGERS),
    *(Mutant(name, clause, partial(_planted, file, old, new)) for clause, name, file, old, new in _PLANTED),
]
