"""Processes on one local network, in virtual time: each has a rank's cache, a transport and a transceiver."""

from __future__ import annotations

import attrs
import numpy as np
from transfer_values import JUNK, Model, Rank

from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream, Window
from kvist.transfer.local import LOCAL, LocalTransport
from kvist.transfer.network import LocalNetwork
from kvist.transfer.outcome import Patience
from kvist.transfer.pagetable import Placement
from kvist.transfer.transceiver import Transceiver
from kvist.transfer.transport import TransportContext

LENGTH = 43
#: Promises less than any real transport: nothing but the death of a process ends its writes.
WEAK = attrs.evolve(LOCAL, grants=False, close_is_fence=False, target_must_progress=True)


def spec_of(heads=4, fingerprint="model", dtype="int16"):
    row = RowFormat((heads, 6), dtype)
    layers = [
        Layer(number, [Stream(name, row, retention, sharding=Heads(heads)) for name in ("k", "v")])
        for number, retention in enumerate((History(), Window(12)))
    ]
    return CacheSpec(layers, 8, fingerprint)


MODEL = Model(spec_of(), length=LENGTH)


class Process:
    """A rank with a transceiver. ``rank.pages`` are its pages of the one request that tests move."""

    def __init__(self, world, name, *, capabilities=None, model=MODEL, placement=None, transport=None, **options):
        self.world, self.name = world, name
        self.rank = Rank(model, placement=placement or Placement(), seed=hash(name) % 1000, **options)
        self.transport = transport or LocalTransport(
            TransportContext(name), world.network, capabilities or world.capabilities
        )
        region = self.transport.register(self.rank.memory.ctypes.data, len(self.rank.memory))
        self.transceiver = Transceiver(
            self.transport, region, self.rank.table, patience=world.patience, clock=world.network.now_s
        )
        world.processes.append(self)

    @property
    def stats(self):
        return self.transceiver.stats()

    def hello(self):
        return self.transceiver.hello()

    def offer(self, request="r", *, payload=b"", **options):
        """Send the whole request in one piece."""
        session = self.transceiver.send(request, **options)
        self.transceiver.add(session, self.rank.pages, 0, LENGTH, last=True, payload=payload)
        return session

    def ask(self, *senders, request="r", **options):
        return self.transceiver.receive(
            request, self.rank.pages, LENGTH, [sender.hello() for sender in senders], **options
        )

    def verify(self):
        """All bytes are right and nothing else was touched."""
        counts = np.zeros_like(self.rank.counts)
        for write in self.world.network.writes:
            if write.receiver == self.name:
                counts[write.begin : write.end] += 1
        self.rank.counts = counts
        self.rank.verify()

    @property
    def untouched(self):
        return bool((self.rank.memory == JUNK).all())

    def poison(self):
        """The pages belong to somebody else now."""
        self.rank.memory[:] = 0xEE


class World:
    def __init__(self, *faults, capabilities=LOCAL, patience=None):
        self.network = LocalNetwork(virtual=True, faults=faults)
        self.capabilities = capabilities
        self.patience = patience or Patience(request_s=20.0)
        self.processes = []

    def process(self, name, **options):
        return Process(self, name, **options)

    def pair(self, **options):
        """A sender with everything, and a receiver."""
        sender, receiver = self.process("sender", **options), self.process("receiver", **options)
        sender.rank.fill()
        return sender, receiver

    def run(self, rounds=6):
        """Let everything happen that can without time passing."""
        for _ in range(rounds):
            for process in self.processes:
                if not process.transport.stalled:
                    process.transceiver.poll()

    def wait(self, seconds, step=0.5):
        """Let time pass."""
        self.run()
        for _ in range(round(seconds / step)):
            self.network.advance(step)
            self.run(2)
        self.run()

    def kill(self, process):
        self.processes.remove(process)
        self.network.kill(process.transport)

    def stall(self, process):
        self.network.stall(process.transport)

    def resume(self, process):
        self.network.resume(process.transport)
