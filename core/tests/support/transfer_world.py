"""Processes on one local network, in its virtual time: its faults are part of what is sent, its processes can die."""

from __future__ import annotations

import attrs

from kvist.testing.transfer.world import LENGTH, MODEL, Process, World, spec_of
from kvist.transfer.local import LOCAL, LocalTransport
from kvist.transfer.network import LocalNetwork
from kvist.transfer.transport import TransportContext

__all__ = ["LENGTH", "LOCAL", "MODEL", "WEAK", "LocalWorld", "Process", "spec_of"]

#: Promises less than any real transport: nothing but the death of a process ends its writes.
WEAK = attrs.evolve(LOCAL, grants=False, close_is_fence=False, target_must_progress=True)


class LocalWorld(World):
    def __init__(self, *faults, capabilities=LOCAL, patience=None):
        self.network = LocalNetwork(virtual=True, faults=faults)
        self.capabilities = capabilities
        super().__init__(self.local, patience=patience)

    def local(self, name):
        return LocalTransport(TransportContext(name), self.network, self.capabilities)

    def transport(self, name):
        return self.local(name)

    def now_s(self):
        return self.network.now_s()

    def written(self, name):
        return [(write.begin, write.end) for write in self.network.writes if write.receiver == name]

    def run(self, rounds=6):
        for _ in range(rounds):
            for process in self.processes:
                if not process.transport.stalled:
                    process.transceiver.poll()

    def wait(self, seconds, step=0.5):
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
