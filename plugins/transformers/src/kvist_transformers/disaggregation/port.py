"""Where requests leave an engine for other processes, and where they come in."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from kvist.errors import StateError
from kvist.scheduling import Scheduler
from kvist.sequence import Sequence
from kvist.transfer.background import Background
from kvist.transfer.outcome import DONE, Outcome, Patience, TransferStats
from kvist.transfer.pagetable import describe
from kvist.transfer.transceiver import Transceiver
from kvist.transfer.transfers import Receiving, Sending, Transfers
from kvist.transfer.transport import Region, Transport, host_bytes
from kvist_transformers.job import EngineJob

_PATIENCE = Patience()


@attrs.frozen
class Arrival:
    """One request's rows, when they have come or when it is sure that they will not.

    request: the job's number. tokens: of its prompt; reused: of them, in the cache here already. byte_count: really
    written. seconds: from asking to the end.
    """

    request: int
    tokens: int
    reused: int
    byte_count: int
    seconds: float
    outcome: Outcome


class Port:
    """One engine's. Implements :class:`kvist.scheduling.remote.Remote`; a thread of its own answers peers, everything
    else belongs to the engine's thread.

    transport: belongs to the port. The engine's cache lies in memory that this transport can use.
    notify: called in that thread when something has happened, so that an engine with nothing to do can step again.
    on_arrival: told of every request that came, or did not.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        patience: Patience = _PATIENCE,
        notify: Callable[[], None] = lambda: None,
        on_arrival: Callable[[Arrival], None] = lambda _: None,
    ) -> None:
        self._transport, self._patience = transport, patience
        #: Both may be set later.
        self.notify, self.on_arrival = notify, on_arrival
        self._region: Region | None = None
        self._offers: dict[str, Sending] = {}
        self._receiving: dict[EngineJob, Receiving] = {}
        #: Nobody waits for these any more, and their rows may have come all the same.
        self._unwanted: list[Receiving] = []

    # For the engine.

    def storage(self, byte_count: int, device: torch.device) -> torch.Tensor:
        """Memory for a cache, uint8 ``[byte_count]``; once."""
        if self._region is not None:
            raise StateError("this port has an engine already", hint="make a port for each engine")
        transport = self._transport
        if device.type == "cpu" and transport.capabilities.allocates:
            self._region = transport.allocate(byte_count)
            return torch.from_numpy(host_bytes(self._region.address, byte_count))
        memory = torch.zeros(byte_count, dtype=torch.uint8, device=device)
        self._region = transport.register(memory.data_ptr(), byte_count, device.type)
        return memory

    def attach(self, scheduler: Scheduler[EngineJob]) -> None:
        """Move requests of this scheduler from now on."""
        assert self._region is not None
        self._scheduler, self._manager = scheduler, scheduler.manager
        table = describe(self._manager.layout)
        self._transceiver = Transceiver(self._transport, self._region, table, patience=self._patience)
        self._transfers = Transfers(self._manager, self._transceiver)
        self._background = Background(self._transceiver, lambda: self.notify())

    def hello(self) -> bytes:
        """What other engines need to get requests from here."""
        return self._transceiver.hello()

    def stats(self) -> TransferStats:
        """Counters of the transceiver."""
        return self._transceiver.stats()

    def send(self, name: str, sequence: Sequence) -> None:
        """Offer what a sequence has computed, and close it."""
        self._offers[name] = self._transfers.send(name, sequence)

    def withdraw(self, name: str) -> None:
        """Nobody will ask for what was sent under this name: its pages need not wait. Ignores what is over."""
        offer = self._offers.get(name)
        if offer is not None:
            self._transfers.cancel(offer)

    def poll(self) -> None:
        """Give back what has been read, and let requests begin whose rows have come. Once per step."""
        if self._background.error is not None:
            self._background.stop()
        over = self._transfers.poll()
        if over:
            self._offers = {name: offer for name, offer in self._offers.items() if offer not in over}
        for job, receiving in list(self._receiving.items()):
            outcome = receiving.outcome
            if receiving.sequence is not None:
                # All that was asked for may have been here; then nobody waits for the other side's word.
                self._told(job, receiving, outcome or DONE)
                self._scheduler.landed(job, receiving.sequence)
            elif outcome is not None and not outcome.ok:
                self._told(job, receiving, outcome)
                self._scheduler.lost(job)
        for receiving in self._unwanted:
            if receiving in over and receiving.sequence is not None:
                self._manager.close(receiving.sequence)
        self._unwanted = [each for each in self._unwanted if each not in over]

    def close(self) -> None:
        """End all transfers, the thread and the transport. Raises TransferError while somebody may still write to the
        cache; try again when the peers have ended."""
        if self._region is None:
            self._transport.close()
            return
        self._background.stop()
        self._transceiver.close()
        self.poll()

    # For the scheduler.

    @property
    def open(self) -> int:
        return self._transfers.open

    def receive(self, job: EngineJob) -> None:
        assert job.arrival is not None
        self._receiving[job] = self._transfers.receive(
            job.arrival.name, job.tokens, job.arrival.hellos, job.scope, length=job.remote_tokens
        )

    def cancel(self, job: EngineJob) -> None:
        receiving = self._receiving.pop(job)
        self._transfers.cancel(receiving)
        if receiving.sequence is not None:
            self._manager.close(receiving.sequence)
        else:
            self._unwanted.append(receiving)

    def _told(self, job: EngineJob, receiving: Receiving, outcome: Outcome) -> None:
        del self._receiving[job]
        session, sequence = receiving.session, receiving.sequence
        seconds = max(0.0, session.ended_s - session.began_s) if receiving.outcome is not None else 0.0
        reused = 0 if sequence is None else sequence.reused
        arrival = Arrival(job.number, job.remote_tokens, reused, session.byte_count, seconds, outcome)
        self.on_arrival(arrival)
