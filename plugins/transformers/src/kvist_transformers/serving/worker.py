"""The thread that owns the engine. The event loop hands it work through a queue and is told of all tokens of a step in
one wake-up."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import numpy as np

from kvist.errors import KvistError
from kvist_transformers.engine import Engine
from kvist_transformers.handle import Handle, Times
from kvist_transformers.request import Completion, Request, TokenArray
from kvist_transformers.sampling import TokenLogprobs

logger = logging.getLogger("kvist.serve")
T = TypeVar("T")

#: Steps that may fail one after the other before the engine counts as broken.
MOST_FAILURES = 3
#: Seconds until an engine is asked again that can compute nothing now although it has something to do.
_PAUSE_S = 0.002


class EngineError(KvistError):
    """The engine failed while it computed a request, or cannot compute anything any more."""


@attrs.frozen(eq=False)
class Update:
    """What a step gave a request.

    reused_tokens: of the prompt, those that were in the cache when the request first ran.
    logprobs: one for each token where the request asks for them. completion: the result of a request that has ended.
    error: why a request ended without a result.
    """

    tokens: list[int]
    reused_tokens: int = 0
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    completion: Completion | None = None
    times: Times | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Is it the request's last one?"""
        return self.completion is not None or self.error is not None


@attrs.define(eq=False)
class Ticket:
    """A request in the worker. ``sink`` is called in the event loop, with at least one update, the last one once."""

    request: Request
    sink: Callable[[Update], None]
    ended: bool = False
    #: The engine thread's own.
    handle: Handle | None = None
    fresh: list[int] = attrs.Factory(list)
    given: int = 0
    unwanted: bool = False
    #: Its name in another process that computes its prompt, and the tokens that were in that one's cache.
    name_elsewhere: str | None = None
    reused_elsewhere: int | None = None

    def note(self, _: Handle, tokens: TokenArray) -> None:
        """New tokens; ``engine.submit`` is given this."""
        self.fresh.extend(tokens.tolist())


def _cancelled(ticket: Ticket) -> Update:
    """For one that the engine does not have."""
    nothing = np.zeros(0, np.int32)
    return Update([], completion=Completion(-1, len(ticket.request.tokens), nothing, "cancelled", 0, 0))


@attrs.define
class Routes:
    """Where prompts were sent, of a worker beside another process. near: they stayed. far: to the other process. lost:
    they came back, or their rows did not come, and they were computed here after all. open: is the process there?"""

    near: int = 0
    far: int = 0
    lost: int = 0
    open: bool = True


class Worker:
    """Runs an engine in a thread of its own. All methods are for the event loop's thread, from :meth:`start` on.

    engine: the worker's from now on; closed by :meth:`stop`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        #: Requests that have not ended.
        self.in_flight = 0
        #: Why nothing can be computed any more.
        self.failure: Exception | None = None
        #: Where prompts are computed; ``None`` if always here.
        self.routes: Routes | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)
        # The engine thread's own.
        self._live: list[Ticket] = []
        self._failures = 0
        self._stalled = self._woken = False
        self._stopping = False
        self._after_step: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin. In the event loop that gets the updates."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, request: Request, sink: Callable[[Update], None]) -> Ticket:
        """Queue a request. Raises EngineError when the engine is broken."""
        self._require_health()
        ticket = Ticket(request, sink)
        self.in_flight += 1
        self._inbox.put(lambda: self._submit(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request soon; what it computed stays reusable. Does nothing when it has ended."""
        if not ticket.ended:
            self._inbox.put(lambda: self._cancel(ticket))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The answer to a question about the engine, between two steps. Raises what it raises, or EngineError."""
        self._require_health()
        assert self._loop is not None
        loop, answer = self._loop, self._loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)

        def run() -> None:
            value, error = None, None
            try:
                if self.failure is not None:
                    raise EngineError(f"the engine is broken: {self.failure}", hint=_RESTART)
                value = question(self.engine)
            except Exception as raised:
                error = raised
            loop.call_soon_threadsafe(settle, value, error)

        self._inbox.put(run)
        return await answer

    async def after_each_step(self, watcher: Callable[[], None], on: bool) -> None:
        """Call ``watcher`` in the engine's thread after each step and all that may change the cache; or no more."""
        await self.ask(lambda _: (self._after_step.append if on else self._after_step.remove)(watcher))

    async def stop(self) -> None:
        """Cancel what is left, close the engine, end the thread. Idempotent."""
        if self._thread.is_alive():
            self._inbox.put(self._stop)
            await asyncio.to_thread(self._thread.join)

    def wake(self) -> None:
        """Have the engine step even if it has nothing to compute: something else has moved on. Any thread."""
        self._inbox.put(self._wake)

    def _require_health(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine is broken: {self.failure}", hint=_RESTART)

    def _receive(self, updates: list[tuple[Ticket, Update]]) -> None:
        """In the event loop."""
        for ticket, update in updates:
            if ticket.ended:
                continue
            if update.last:
                ticket.ended = True
                self.in_flight -= 1
            ticket.sink(update)

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                self._break(error)
        try:
            for ticket in list(self._live):
                self._cancel(ticket)
            self._deliver(self._progress() + [(ticket, _cancelled(ticket)) for ticket in self._take_away()])
            self._close()
        except Exception as error:
            self._break(error)

    def _turn(self) -> None:
        """Do what the event loop wants, compute a step, tell of it."""
        self._take_work()
        self._stalled = False
        failed: list[tuple[Ticket, Update]] = []
        if self.failure is None and (self._woken or not self.engine.idle):
            self._woken = False
            try:
                self._stalled = not self.engine.step() and not self.engine.idle
                self._failures = 0
            except Exception as error:
                failed = self._step_failed(error)
        self._deliver(failed + self._progress())
        if self.failure is None:
            for watcher in list(self._after_step):
                watcher()

    def _take_work(self) -> None:
        """Waits for something while the engine has nothing to do."""
        try:
            if self.engine.idle or self.failure is not None:
                self._inbox.get()()
            elif self._stalled:
                self._inbox.get(timeout=_PAUSE_S)()
            while not self._stopping:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _take_away(self) -> list[Ticket]:
        """Requests that are elsewhere, and are forgotten."""
        return []

    def _close(self) -> None:
        self.engine.close()

    def _wake(self) -> None:
        self._woken = True

    def _stop(self) -> None:
        self._stopping = True

    def _submit(self, ticket: Ticket) -> None:
        try:
            if self.failure is not None:
                raise EngineError(f"the engine is broken: {self.failure}", hint=_RESTART)
            self._begin(ticket)
        except Exception as error:
            self._deliver([(ticket, Update([], error=error))])

    def _begin(self, ticket: Ticket) -> None:
        """Raises what ``engine.submit`` raises."""
        ticket.handle = self.engine.submit(ticket.request, ticket.note)
        self._live.append(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        ticket.unwanted = True
        if ticket.handle is not None:
            ticket.handle.cancel()

    def _progress(self) -> list[tuple[Ticket, Update]]:
        """What is new since the last time."""
        found = []
        ended = False
        for ticket in self._live:
            handle = ticket.handle
            assert handle is not None
            done = handle.done
            if not ticket.fresh and not done:
                continue
            end = ticket.given + len(ticket.fresh)
            logprobs = handle.logprobs[ticket.given : end]
            ended = ended or done
            reused = handle.reused_tokens if ticket.reused_elsewhere is None else ticket.reused_elsewhere
            completion = attrs.evolve(handle.completion(), reused_tokens=reused) if done else None
            update = Update(ticket.fresh, reused, logprobs, completion, handle.times if done else None)
            found.append((ticket, update))
            ticket.given, ticket.fresh = end, []
        if ended:
            self._live = [ticket for ticket in self._live if ticket.handle is not None and not ticket.handle.done]
        return found

    def _deliver(self, updates: list[tuple[Ticket, Update]]) -> None:
        if updates:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._receive, updates)
            except RuntimeError:
                # The loop has ended without stop(): nobody is left to be told.
                self._stopping = True

    def _step_failed(self, error: Exception) -> list[tuple[Ticket, Update]]:
        """End those whose computation may have failed; those who have not begun wait on."""
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise error
        logger.error("a step of the engine failed", exc_info=error)
        affected = [ticket for ticket in self._live if ticket.handle is not None and ticket.handle.running]
        # With nobody running it was about all who wait.
        affected = affected or list(self._live)
        for ticket in affected:
            self._cancel(ticket)
        self._live = [ticket for ticket in self._live if ticket not in affected]
        told = EngineError(f"the engine failed: {type(error).__name__}: {error}", hint="try again")
        return [(ticket, Update([], error=told)) for ticket in affected]

    def _break(self, error: Exception) -> None:
        """Nothing can be computed any more: everybody ends."""
        logger.error("the engine is broken", exc_info=error)
        self.failure = error
        told = EngineError(f"the engine is broken: {type(error).__name__}: {error}", hint=_RESTART)
        live, self._live = self._live + self._take_away(), []
        self._deliver([(ticket, Update([], error=told)) for ticket in live])


_RESTART = "see the server's log, and restart it"
