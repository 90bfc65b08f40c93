"""Engines on one local network, whose managers send and receive."""

from __future__ import annotations

from kvist.manager import PagedCacheManager
from kvist.spec import Window
from kvist.testing.engine import MIXES, Engine
from kvist.testing.values import make_layout, make_spec, tokens
from kvist.transfer.local import LOCAL, LocalTransport
from kvist.transfer.network import LocalNetwork
from kvist.transfer.outcome import Patience
from kvist.transfer.pagetable import describe
from kvist.transfer.transceiver import Transceiver
from kvist.transfer.transfers import Transfers
from kvist.transfer.transport import TransportContext

BLOCK = 4
MIXES = {**MIXES, "ring": (Window(3, ring=4),)}
WEAK = LOCAL.__class__(frozenset({"cpu"}), False, False, False, True, True, True)


class Node(Engine):
    """An engine whose manager sends and receives."""

    def __init__(self, network, name, mix, pages=60, capabilities=LOCAL):
        super().__init__(PagedCacheManager(make_layout(make_spec(BLOCK, *mix), pages)), hash(name) % 100)
        transport = LocalTransport(TransportContext(name), network, capabilities)
        layout = self.manager.layout
        region = transport.register(self.values.whole[0].ctypes.data, layout.arena_bytes)
        self.transceiver = Transceiver(
            transport, region, describe(layout), patience=Patience(request_s=10), clock=network.now_s
        )
        self.transfers = Transfers(self.manager, self.transceiver)

    def receive(self, request, length, *senders, more=1, first=0, **options):
        text = tokens(range(first, first + length + more))
        hellos = [sender.transceiver.hello() for sender in senders]
        receiving = self.transfers.receive(request, text, hellos, length=length, **options)
        self.audit()
        return receiving

    def taken(self, receiving):
        self.texts[id(receiving.sequence)] = receiving.sequence.tokens.copy()
        return receiving.sequence


class Nodes:
    def __init__(self, mix, *faults, **options):
        self.network = LocalNetwork(virtual=True, faults=faults)
        self.prefill, self.decode = (Node(self.network, name, mix, **options) for name in ("prefill", "decode"))

    def run(self, seconds=0):
        over = []
        for _ in range(8):
            for node in (self.prefill, self.decode):
                node.transceiver.poll()
                over += node.transfers.poll()
                node.audit()
            self.network.advance(seconds / 8)
        return over

    def drained(self):
        self.run()
        for node in (self.prefill, self.decode):
            assert node.transfers.open == 0
            node.drained()
