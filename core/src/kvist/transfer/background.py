"""A thread that keeps a transceiver going while its engine computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kvist.errors import TransferError
from kvist.transfer.transceiver import Transceiver


class Background:
    """Polls ``transceiver`` until it is stopped; nobody else may poll it meanwhile. Use it as a context manager, or
    call ``stop``. It sleeps until something happens or is due.

    after: called in the thread whenever something has happened or was due, and when the thread ends by an error; it
    must not wait for anything.
    error: what ended it too early, ``None`` while all is well.
    """

    def __init__(self, transceiver: Transceiver, after: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._after = after
        self._transceiver = transceiver
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-transfer", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, which then does not run any more. Idempotent. Raises TransferError with the error that had
        ended it before."""
        self._stopping.set()
        self._transceiver.transport.wake()
        self._thread.join(timeout_s)
        if self.error is not None:
            raise TransferError(f"transfers had stopped: {type(self.error).__name__}: {self.error}") from self.error

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._transceiver.poll(60.0)
                self._after()
        except BaseException as error:  # Kept for whoever stops it: a thread has nobody to raise it to.
            self.error = error
            self._after()
