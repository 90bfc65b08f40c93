"""One write to a peer whose memory is not ours to reach: messages, which its own progress thread copies.

UCX has puts for this, too. Over TCP it makes them of messages that it acknowledges in the receiver's process, and it
aborts that process when the writer has been killed meanwhile (seen with UCX 1.22).
"""

from __future__ import annotations

from collections import deque

import attrs

from kvist.transfer.cutting import cut
from kvist.transfer.transport import Fragments, host_bytes
from kvist_transceiver_ucx import declarations as d
from kvist_transceiver_ucx.ucp import Endpoint, Memory, Request, UcxError
from kvist_transceiver_ucx.wire import WRITE, Frame, header

#: Bytes and fragments of one message.
FRAME_BYTES, FRAME_FRAGMENTS = 256 << 10, 1024
#: Messages under way at once.
WINDOW = 16


@attrs.define(eq=False)
class Sent:
    """A write that has been accepted, and that the peer copies. Only the progress thread touches it.

    copied: has it said so?
    """

    token: int
    fragments: Fragments
    memory: Memory
    grant: int
    copied: bool = False
    begun: bool = False
    _frames: deque[tuple[int, Fragments]] | None = None
    _sends: deque[Request] = attrs.Factory(deque)

    @property
    def posted(self) -> bool:
        """Has all of it been given to UCX?"""
        return self._frames is not None and not self._frames

    @property
    def done(self) -> bool:
        """Are all its bytes there, and has UCX let go of what it sent?"""
        return self.copied and not self._sends

    def post(self, endpoint: Endpoint, there: int) -> bool:
        """Send as many messages as may be. ``there``: the connection's key at the peer. Returns whether more could be
        sent at once: no, UCX has to send some first. Raises UcxError."""
        if self._frames is None:
            self._frames = deque(enumerate(cut(self.fragments, FRAME_BYTES, FRAME_FRAGMENTS)))
        while self._frames and len(self._sends) < WINDOW:
            index, part = self._frames.popleft()
            last = not self._frames
            frame = Frame(self.grant, part.destination_region, index, last, part.destinations, part.byte_counts)
            self.begun = True
            request = endpoint.send(header(WRITE, there, self.token), frame.packed(self._gathered(part)))
            if request is not None:
                self._sends.append(request)
        return False

    def reap(self, endpoint: Endpoint) -> None:
        """Look what has been sent. Raises UcxError for what has failed."""
        while self._sends:
            status = self._sends[0].poll()
            if status is None:
                break
            self._sends.popleft()
            if status != d.OK:
                raise UcxError(endpoint.worker.context.library, status, "write")

    def drained(self) -> bool:
        """After the endpoint was closed: does UCX read our memory no more? It has copies only."""
        self._sends = deque(request for request in self._sends if request.poll() is None)
        return not self._sends

    def left(self) -> list[Request]:
        """What UCX still sends of a write that has its answer. The caller asks about it from now on."""
        left = list(self._sends)
        self._sends.clear()
        return left

    def _gathered(self, part: Fragments) -> list[memoryview]:
        ours = memoryview(host_bytes(self.memory.address, self.memory.byte_count))
        ends = part.sources + part.byte_counts
        return [ours[begin:end] for begin, end in zip(part.sources.tolist(), ends.tolist())]
