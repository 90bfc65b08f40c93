"""Two processes, one that computes prompts and one that generates answers, and requests that go through both."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from types import TracebackType

import attrs

from kvist.errors import KvistError
from kvist_transformers.disaggregation.worker import (
    Answer,
    Arrival,
    Broken,
    Command,
    Decode,
    Ended,
    Prefill,
    Ready,
    Settings,
    Stop,
    Stopped,
    main,
)
from kvist_transformers.request import Request

#: A process that says nothing for so long is given up.
_SILENT_S = 300.0


class WorkerError(KvistError):
    """One of the processes has ended, or cannot go on."""


@attrs.frozen
class Answered:
    """One request that went through both. first_token_s: from when it was asked. prefill_computed, prefill_reused:
    prompt tokens in the first process. arrival: in the second one; ``None`` if it ended with its first token."""

    tokens: list[int]
    first_token_s: float
    seconds: float
    prefill_computed: int
    prefill_reused: int
    decode_computed: int = 0
    arrival: Arrival | None = None


class Pair:
    """Use it as a context manager, which ends both processes in any case."""

    def __init__(self, prefill: Settings, decode: Settings) -> None:
        self._ends = [ProcessEnd(prefill), ProcessEnd(decode)]
        try:
            self._prefill, self._decode = self._ends
            for end in self._ends:
                ready = end.get()
                assert isinstance(ready, Ready)
                end.hello = ready.hello
        except BaseException:
            self._kill()
            raise

    def answer(self, requests: Mapping[str, Request]) -> dict[str, Answered]:
        """All at once, by name; names are never used twice. Raises WorkerError."""
        began_s = time.perf_counter()
        for name, request in requests.items():
            self._prefill.put(Prefill(name, request))
        first: dict[str, tuple[Ended, float]] = {}
        answered: dict[str, Answered] = {}
        while len(answered) < len(requests):
            for end in self._waited():
                ended = end.get()
                assert isinstance(ended, Ended)
                if ended.error:
                    raise WorkerError(f"{end.name}: request {ended.name!r} failed: {ended.error}")
                name, now_s = ended.name, time.perf_counter() - began_s
                if end is self._prefill:
                    first[name] = ended, now_s
                    if ended.reason == "moved":
                        self._decode.put(Decode(name, requests[name], ended.tokens, self._prefill.hello))
                        continue
                before, first_s = first[name]
                moved = end is self._decode
                answered[name] = Answered(
                    ended.tokens,
                    first_s,
                    now_s,
                    before.computed,
                    before.reused,
                    ended.computed if moved else 0,
                    ended.arrival,
                )
        return answered

    def stop(self) -> dict[str, str]:
        """End both. Returns for each what it had left, empty if nothing."""
        # The one that is written to first: then nobody waits for it.
        leaks = {}
        for end in reversed(self._ends):
            end.put(Stop())
        for end in self._ends:
            stopped = end.get()
            assert isinstance(stopped, Stopped)
            leaks[end.name] = stopped.leaks
        return leaks

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _waited(self) -> list[ProcessEnd]:
        by_connection = {end.connection: end for end in self._ends}
        ready = wait(list(by_connection), _SILENT_S)
        if not ready:
            raise WorkerError(f"nothing was heard from either process for {_SILENT_S:g} s")
        return [by_connection[each] for each in ready if isinstance(each, Connection)]

    def _kill(self) -> None:
        for end in self._ends:
            end.close()


class ProcessEnd:
    """The parent's end of one process."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.hello = settings.name, b""
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(settings, theirs), name=settings.name, daemon=True)
        self._process.start()
        theirs.close()

    def put(self, command: Command) -> None:
        """Raises WorkerError when the process has ended."""
        try:
            self.connection.send(command)
        except OSError as error:
            raise WorkerError(f"the {self.name} process has ended") from error

    def get(self, silent_s: float | None = _SILENT_S) -> Answer:
        """Its next answer. Raises WorkerError when there is none in ``silent_s`` seconds, or ever."""
        try:
            if not self.connection.poll(silent_s):
                raise WorkerError(f"the {self.name} process did not answer for {silent_s} s")
            answer: Answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"the {self.name} process has ended") from error
        if isinstance(answer, Broken):
            raise WorkerError(f"the {self.name} process cannot go on:\n{answer.text}")
        return answer

    def close(self) -> None:
        """End the process in any case."""
        self._process.join(0.5)
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self.connection.close()
