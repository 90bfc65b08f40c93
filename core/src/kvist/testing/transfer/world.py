"""Processes, as far as a transceiver can tell: each has a rank's cache, a transport and a transceiver, all in one
thread, with a clock that a test turns."""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kvist.spec import CacheSpec, Heads, History, Layer, Retention, RowFormat, Stream, Window
from kvist.testing.transfer.faulty import Faulty
from kvist.testing.transfer.values import ALONE, JUNK, Bytes, Model, Rank
from kvist.transfer.faults import Fault, FaultPlan
from kvist.transfer.incoming import Incoming
from kvist.transfer.outcome import Patience, TransferStats
from kvist.transfer.outgoing import Outgoing
from kvist.transfer.pagetable import Placement
from kvist.transfer.transceiver import Transceiver
from kvist.transfer.transport import Region, Transport, TransportContext, host_bytes

#: Tokens of the request that tests move.
LENGTH = 43
#: Seconds of the world's time within which everything has to happen.
LONG_S = 15.0


def spec_of(heads: int = 4, fingerprint: str = "model", dtype: str = "int16", block_tokens: int = 8) -> CacheSpec:
    """Two layers, one with a window."""
    row = RowFormat((heads, 6), dtype)
    retentions: list[Retention] = [History(), Window(12)]
    layers = [
        Layer(number, [Stream(name, row, retention, sharding=Heads(heads)) for name in ("k", "v")])
        for number, retention in enumerate(retentions)
    ]
    return CacheSpec(layers, block_tokens, fingerprint)


MODEL = Model(spec_of(), length=LENGTH)


def new_transport(factory: str, name: str) -> Transport:
    """``factory``: ``"package.module:Name"``."""
    module, _, attribute = factory.partition(":")
    made: Transport = getattr(importlib.import_module(module), attribute)(TransportContext(name))
    return made


def memory_of(transport: Transport, byte_count: int) -> tuple[Region, Bytes]:
    """Memory that peers can write to: the transport's where it has some, else our own."""
    if transport.capabilities.allocates:
        region = transport.allocate(byte_count)
        return region, host_bytes(region.address, byte_count)
    memory = np.zeros(byte_count, np.uint8)
    return transport.register(memory.ctypes.data, byte_count), memory


class Process:
    """A rank with a transceiver. ``rank.pages`` are its pages of the one request that tests move."""

    def __init__(
        self, world: World, name: str, *, model: Model = MODEL, placement: Placement = ALONE, **options: Any
    ) -> None:
        self.world, self.name, self.stalled = world, name, False
        self.transport = world.transport(name)
        regions = []

        def memory(byte_count: int) -> Bytes:
            region, found = memory_of(self.transport, byte_count)
            regions.append(region)
            return found

        seed = zlib.crc32(name.encode()) % 1000
        self.rank = Rank(model, placement=placement, seed=seed, memory=memory, **options)
        self.transceiver = Transceiver(
            self.transport, regions[0], self.rank.table, patience=world.patience, clock=world.now_s
        )
        self.length = model.length
        world.processes.append(self)

    @property
    def stats(self) -> TransferStats:
        return self.transceiver.stats()

    def hello(self) -> bytes:
        return self.transceiver.hello()

    def offer(self, request: str = "r", *, payload: bytes = b"", **options: Any) -> Outgoing:
        """Send the whole request in one piece."""
        session = self.transceiver.send(request, **options)
        self.transceiver.add(session, self.rank.pages, 0, self.length, last=True, payload=payload)
        return session

    def ask(self, *senders: Process, request: str = "r", **options: Any) -> Incoming:
        return self.transceiver.receive(
            request, self.rank.pages, self.length, [sender.hello() for sender in senders], **options
        )

    def verify(self) -> None:
        """All bytes are right and nothing else was touched; each was written once."""
        counts = np.zeros_like(self.rank.counts)
        for begin, end in self.world.written(self.name):
            counts[begin:end] += 1
        self.rank.counts = counts
        self.rank.verify()

    @property
    def untouched(self) -> bool:
        return bool((self.rank.memory == JUNK).all())

    def poison(self) -> None:
        """The pages belong to somebody else now."""
        self.rank.memory[:] = 0xEE

    @property
    def poisoned(self) -> bool:
        """Has nobody written there since?"""
        return bool((self.rank.memory == 0xEE).all())


class World:
    """make: a transport of a name. quiet_s: after so long without an event nothing is under way any more."""

    def __init__(
        self,
        make: Callable[[str], Transport],
        *faults: Fault,
        patience: Patience | None = None,
        quiet_s: float = 0.0,
    ) -> None:
        self.patience = patience or Patience(request_s=20.0)
        self.processes: list[Process] = []
        self.faults = FaultPlan(faults)
        self._make, self._quiet_s, self._now_s = make, quiet_s, 0.0
        self._transports: list[Faulty] = []

    def now_s(self) -> float:
        return self._now_s

    def transport(self, name: str) -> Transport:
        """A new one, with the faults of this world."""
        made = Faulty(self._make(name), name, self.faults, self.now_s)
        self._transports.append(made)
        return made

    def process(self, name: str, **options: Any) -> Process:
        return Process(self, name, **options)

    def pair(self, **options: Any) -> tuple[Process, Process]:
        """A sender with everything, and a receiver."""
        sender, receiver = self.process("sender", **options), self.process("receiver", **options)
        sender.rank.fill()
        return sender, receiver

    def transfer(
        self, *, payload: bytes = b"", offer_s: float | None = None, ask_s: float | None = None
    ) -> tuple[Process, Process, Outgoing, Incoming]:
        """A pair, and a request that the one offers and the other has asked for; nothing has happened yet. offer_s,
        ask_s: their deadlines."""
        sender, receiver = self.pair()
        outgoing = sender.offer(payload=payload, deadline_s=offer_s)
        return sender, receiver, outgoing, receiver.ask(sender, deadline_s=ask_s)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Let everything happen that can without time passing, or until something is so."""
        began_s = quiet_since_s = time.monotonic()
        quiet = 0
        while True:
            seen = sum(each.seen for each in self._transports)
            for process in self.processes:
                if not process.stalled:
                    process.transceiver.poll()
            now_s = time.monotonic()
            if until is not None and until():
                return
            if sum(each.seen for each in self._transports) != seen:
                quiet_since_s, quiet = now_s, 0
                continue
            quiet += 1
            if until is None and quiet > 1 and now_s - quiet_since_s >= self._quiet_s:
                return
            assert until is None or now_s - began_s < LONG_S, f"it has not happened within {LONG_S:g} s"
            time.sleep(0.001 if self._quiet_s else 0.0)
            if until is not None and not self._quiet_s and quiet > 3:
                raise AssertionError("it does not happen")

    def wait(self, seconds: float, step: float = 1.0) -> None:
        """Let time pass."""
        self.run()
        for _ in range(round(seconds / step)):
            self._now_s += step
            self.run()

    def release(self) -> None:
        """Let go of what faults hold."""
        for transport in self._transports:
            transport.release()

    def written(self, name: str) -> list[tuple[int, int]]:
        """Ranges of bytes that were written to a process, in order."""
        found: list[tuple[int, int]] = []
        for transport in self._transports:
            for sent in transport.sent:
                if sent.receiver == name:
                    begins = sent.fragments.destinations
                    found += zip(begins.tolist(), (begins + sent.fragments.byte_counts).tolist())
        return found

    def remove(self, process: Process) -> None:
        """It ends in an orderly way, and nothing of it runs any more."""
        self.processes.remove(process)
        process.transceiver.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()
        for process in self.processes:
            process.stalled = False
            for partner in list(process.transceiver._partners.values()):
                process.transport.disconnect(partner.peer)
        until_s = time.monotonic() + 5.0
        left = list(self.processes)
        while left and time.monotonic() < until_s:
            for process in list(left):
                try:
                    process.transceiver.poll(0.01 if self._quiet_s else 0.0)
                    process.transport.close()
                    left.remove(process)
                except Exception:  # What went wrong is said by the test.
                    continue
