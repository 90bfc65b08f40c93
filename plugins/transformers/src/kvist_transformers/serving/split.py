"""Prompts computed in a process of their own: the router between it and the engine that generates.

The engine's own thread routes: it knows what its cache has of a prompt. Where that leaves little to compute, the
request stays; otherwise the other process computes the prompt, and its rows come over a transport.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np

from kvist.errors import KvistError, TransferError
from kvist.registry import default_registry
from kvist.transfer.transport import TransportContext
from kvist_transformers.disaggregation.pair import ProcessEnd, WorkerError
from kvist_transformers.disaggregation.port import Arrival, Port
from kvist_transformers.disaggregation.worker import Cancel, Ended, Prefill, Ready, Settings, Stop
from kvist_transformers.engine import Engine
from kvist_transformers.handle import Handle
from kvist_transformers.job import Source
from kvist_transformers.request import Completion, TokenArray
from kvist_transformers.serving.worker import Routes, Ticket, Update, Worker

logger = logging.getLogger("kvist.serve")

#: A prompt of which so many tokens are not cached here is computed here: sending its rows would cost more.
LEAST_TOKENS = 32


def make_port(scheme: str) -> Port:
    """For the engine that generates. scheme: the transport's. Raises PluginError for an unknown one."""
    entry = default_registry().transceiver(scheme)
    return Port(entry.resolve(entry.info.factory)(TransportContext("decode")))


class SplitWorker(Worker):
    """A worker beside a process that computes prompts. When that process ends, everything is computed here.

    engine: has a port. prefill: what the process is made from. Raises WorkerError when it cannot begin.
    """

    def __init__(self, engine: Engine, port: Port, prefill: Settings) -> None:
        super().__init__(engine)
        port.notify, port.on_arrival = self.wake, self._arrived
        self.routes = self._routes = Routes()
        self._end = ProcessEnd(prefill)
        ready = self._end.get()
        assert isinstance(ready, Ready)
        self._hello = ready.hello
        self._reader = threading.Thread(target=self._read, name="kvist-prefill", daemon=True)
        # The engine thread's own.
        self._away: dict[str, Ticket] = {}
        self._count = 0

    def start(self) -> None:
        super().start()
        self._reader.start()

    async def stop(self) -> None:
        await super().stop()
        self._end.close()

    # ------------------------------------------------------------------ in the engine's thread

    def _begin(self, ticket: Ticket) -> None:
        request = ticket.request
        # Logarithms of the first token would stay where it is chosen.
        if not self._routes.open or request.logprobs is not None or self._lacks(ticket) < LEAST_TOKENS:
            self._routes.near += 1
            super()._begin(ticket)
            return
        self._count += 1
        name = str(self._count)
        self._away[name], ticket.name_elsewhere = ticket, name
        self._routes.far += 1
        try:
            self._end.put(Prefill(name, request))
        except WorkerError as error:
            self._lost(error)

    def _lacks(self, ticket: Ticket) -> int:
        """Tokens of the prompt that are not cached here."""
        request = ticket.request
        return len(request.tokens) - self.engine.manager.probe(request.tokens, request.scope)

    def _cancel(self, ticket: Ticket) -> None:
        super()._cancel(ticket)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """The other process need not compute it, nor keep it for the engine here."""
        if ticket.name_elsewhere is not None and self._routes.open:
            try:
                self._end.put(Cancel(ticket.name_elsewhere))
            except WorkerError as error:
                self._lost(error)

    def _take_away(self) -> list[Ticket]:
        away, self._away = self._away, {}
        return list(away.values())

    def _computed(self, ended: Ended) -> None:
        """The other process has ended with a request."""
        ticket = self._away.pop(ended.name, None)
        if ticket is None:
            return
        if ended.error:
            logger.warning("a prompt could not be computed elsewhere: %s", ended.error)
            self._routes.lost += 1
            self._compute_here(ticket)
            return
        ticket.reused_elsewhere = ended.reused
        if ended.reason != "moved":
            tokens = np.array(ended.tokens, np.int32)
            completion = Completion(-1, len(ticket.request.tokens), tokens, ended.reason, ended.reused, ended.computed)
            self._deliver([(ticket, Update(ended.tokens, ended.reused, completion=completion))])
            return
        skipped = len(ended.tokens)

        def note(handle: Handle, tokens: TokenArray) -> None:
            nonlocal skipped
            again, skipped = min(skipped, len(tokens)), max(0, skipped - len(tokens))
            ticket.note(handle, tokens[again:])

        try:
            source = Source(ended.name, (self._hello,))
            ticket.handle = self.engine.adopt(ticket.request, source, np.array(ended.tokens, np.int32), note)
        except KvistError as error:
            self._forget(ticket)
            self._deliver([(ticket, Update([], error=error))])
            return
        self._live.append(ticket)
        # Nobody has to wait for the rows to see the first token.
        ticket.fresh = list(ended.tokens)
        if ticket.unwanted:
            self._cancel(ticket)

    def _arrived(self, arrival: Arrival) -> None:
        if not arrival.outcome.ok:
            logger.warning("a prompt's rows did not come and are computed here: %s", arrival.outcome.reason)
            self._routes.lost += 1

    def _lost(self, error: Exception) -> None:
        """The other process is gone: compute here what it had."""
        if self._routes.open and not self._stopping:
            logger.error("the prefill process has ended; prompts are computed here from now on", exc_info=error)
        self._routes.open = False
        for ticket in self._take_away():
            self._routes.lost += 1
            self._compute_here(ticket)

    def _compute_here(self, ticket: Ticket) -> None:
        try:
            super()._begin(ticket)
        except Exception as error:
            self._deliver([(ticket, Update([], error=error))])
        else:
            if ticket.unwanted:
                super()._cancel(ticket)

    def _close(self) -> None:
        self._stop_far()
        try:
            super()._close()
        except TransferError:
            # It may have been writing; now it can not any more.
            self._end.close()
            super()._close()

    def _stop_far(self) -> None:
        try:
            if self._routes.open:
                self._end.put(Stop())
        except WorkerError:
            pass  # it has ended already

    # ------------------------------------------------------------------ in a thread of its own

    def _read(self) -> None:
        try:
            while True:
                answer: Any = self._end.get(silent_s=None)
                if not isinstance(answer, Ended):
                    return
                self._inbox.put(lambda answer=answer: self._computed(answer))
        except WorkerError as error:
            self._inbox.put(lambda error=error: self._lost(error))
