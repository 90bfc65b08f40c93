"""Events on their way from the thread that sees them to the one that polls."""

from __future__ import annotations

import threading

from kvist.errors import TransferError
from kvist.transfer.transport import Done, Event, Failed


class Mailbox:
    """What happened, in order, and which writes have no answer yet. For any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._unanswered: set[int] = set()
        self._woken = False
        self._error: BaseException | None = None

    def expect(self, token: int) -> None:
        """A write that is to be answered."""
        with self._changed:
            self._unanswered.add(token)

    @property
    def unanswered(self) -> int:
        """Writes without an answer; none can come any more after a defect."""
        return len(self._unanswered) if self._error is None else 0

    def say(self, *events: Event) -> None:
        """These happened."""
        with self._changed:
            for event in events:
                if isinstance(event, Done | Failed):
                    self._unanswered.discard(event.token)
            self._events += events
            self._changed.notify_all()

    def broke(self, error: BaseException) -> None:
        """Nothing will happen any more."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wake(self) -> None:
        """Make the ``poll`` in progress, or the next one, return at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last call. Raises TransferError when nothing will happen any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._woken or self._error is not None, timeout_s)
            self._woken = False
            events, self._events = self._events, []
            if self._error is not None and not events:
                raise TransferError(
                    f"the transport has stopped: {type(self._error).__name__}: {self._error}",
                    hint="this is a defect of the transport; close it and make a new one",
                ) from self._error
            return events
