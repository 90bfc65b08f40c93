"""The connections of a TCP transport, and the thread that owns them. Where peers may write is in ``tcp_grants``."""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from kvist.errors import TransferError
from kvist.transfer import tcp_wire as wire
from kvist.transfer.mailbox import Mailbox
from kvist.transfer.tcp_grants import Grants
from kvist.transfer.transport import (
    Closed,
    Connected,
    Done,
    Failed,
    Fragments,
    IncompatibleError,
    Int64Array,
    Message,
    Peer,
    PeerDown,
    Region,
    Revoked,
)

#: Calls on one socket before the others get their turn.
_TURN = 4
_PAUSE_S = 0.02


class Connections:
    """All connections of one end. ``tell`` and ``peer_of`` are for any thread; the rest is what that thread does.

    It sleeps until something can be sent or taken in, or something is told. ours: the hello of this end. memory: of its
    regions.
    """

    def __init__(
        self,
        ours: Callable[[], wire.Hello],
        memory: list[memoryview],
        mailbox: Mailbox,
        listener: socket.socket,
        longest: int,
    ) -> None:
        self._ours, self.memory, self._mailbox, self._listener, self._longest = ours, memory, mailbox, listener, longest
        self._scheme, self._identity = ours().scheme, ours().identity
        self._lock = threading.Lock()
        self._known: dict[str, Peer] = {}
        self._peer_ids = itertools.count()
        self._links: dict[int, wire.Link] = {}
        self._strangers: list[wire.Link] = []
        self._grants = Grants(memory)
        self._commands: deque[Callable[[], None]] = deque()
        self._ending = False
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"kvist-{self._scheme}", daemon=True)
        self._thread.start()

    # For any thread.

    def tell(self, command: Callable[[], None]) -> None:
        """Let the thread do this, after all that it was told before."""
        self._commands.append(command)
        with suppress(BlockingIOError):  # Full: it is awake anyway.
            os.write(self._ring, b"\0")

    def peer_of(self, told: wire.Hello) -> Peer:
        """The peer with this hello; connects to it if there is no connection that lives."""
        with self._lock:
            peer = self._known.get(told.identity)
            if peer is None:
                try:
                    link = wire.Link(socket.socket(wire.family(told.host)))
                except OSError as error:
                    raise TransferError(f"cannot connect to {told.name!r}: {wire.reason_of(error)}") from error
                link.peer = peer = self._known[told.identity] = self._new_peer(told)
                self.tell(lambda: self._dial(link, peer, told))
            return peer

    def forget(self, peer: Peer) -> None:
        """Connect anew when somebody asks for it again."""
        with self._lock:
            if self._known.get(peer.identity) is peer:
                del self._known[peer.identity]

    def close(self) -> None:
        """End the thread, and all connections. Once."""
        self.tell(self._end)
        self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Close what this process has, without a word to anybody. Also for the child of a fork, which has no thread and
        must not keep its parent's connections alive."""
        for each in (self._listener, *(link.socket for link in [*self._links.values(), *self._strangers])):
            each.close()
        self._selector.close()
        os.close(self._bell)
        os.close(self._ring)

    # What other transports change.

    def write_item(self, link: wire.Link, fragments: Fragments, grant: int, token: int) -> wire.Item:
        """What to send for a write."""
        ranges = wire.packed_ranges(fragments.destinations, fragments.byte_counts)
        parts = wire.parts_of(self.memory[fragments.source_region], fragments.sources, fragments.byte_counts)
        region, size = fragments.destination_region, fragments.byte_count
        header = wire.Header(wire.WRITE, 0, region, len(fragments), token, grant, size)
        return wire.FrameItem(header, memoryview(ranges), *parts, token=token)

    def detach(self, link: wire.Link) -> None:
        """Nothing of a peer is accessed any more."""

    # The thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                for key, mask in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, wire.Link):
                        self._serve(key.data, mask)
                    else:
                        with suppress(BlockingIOError):
                            os.read(self._bell, 4096)
                # Between any two turns of any connection: what is revoked is revoked in the midst of a write.
                while self._commands:
                    self._commands.popleft()()
        except BaseException as error:  # Kept for whoever polls: a thread has nobody to raise it to.
            self._mailbox.broke(error)

    def _end(self) -> None:
        self._ending = True

    def _new_peer(self, told: wire.Hello) -> Peer:
        return Peer(next(self._peer_ids), told.identity, told.name)

    # Beginnings.

    def _accept(self) -> None:
        try:
            link = wire.Link(self._listener.accept()[0])
        except BlockingIOError:
            return  # It has gone again.
        except OSError:
            # No descriptor is free. The connection waits, and so do we: the listener stays ready.
            time.sleep(_PAUSE_S)
            return
        self._strangers.append(link)
        self._open(link)

    def _dial(self, link: wire.Link, peer: Peer, told: wire.Hello) -> None:
        link.dialling = True
        self._links[peer.id] = link
        self._open(link)
        number = link.socket.connect_ex((told.host, told.port))
        if number not in (0, errno.EINPROGRESS):
            return self._lost(link, f"it cannot be reached: {os.strerror(number)}")
        self._greet(link, told.identity)

    def _open(self, link: wire.Link) -> None:
        link.socket.setblocking(False)
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.frames = self._frames(link)
        link.run = next(link.frames)
        self._watch(link, selectors.EVENT_READ)

    def _greet(self, link: wire.Link, meant: str) -> None:
        data = msgspec.msgpack.encode(wire.Greeting(self._ours(), meant))
        link.out.append(wire.data_item(wire.HELLO, data))
        self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _met(self, link: wire.Link, data: bytearray) -> None:
        """The other end has said who it is, and whom it wants."""
        greeting = wire.read_greeting(data, self._scheme)
        told = greeting.hello
        if greeting.meant != self._identity or (link.peer is not None and told.identity != link.peer.identity):
            raise IncompatibleError(f"{told.name!r} has the address of another one, which has ended")
        link.told = told
        if link.peer is None:
            with self._lock:
                link.peer = self._new_peer(told)
                self._known.setdefault(told.identity, link.peer)
            self._strangers.remove(link)
            self._links[link.peer.id] = link
            self._greet(link, told.identity)
        self._mailbox.say(Connected(link.peer))
        link.out.extend(link.waiting)
        link.waiting.clear()
        self._flush(link)

    # Sending.

    def message(self, peer: Peer, data: bytes) -> None:
        self._queue(self._links.get(peer.id), wire.data_item(wire.MESSAGE, data))

    def write(self, peer: Peer, fragments: Fragments, grant: int, token: int) -> None:
        """Begin one."""
        link = self._links.get(peer.id)
        if link is None or link.down or link.failed:
            self._mailbox.say(Failed(token, f"{peer} is gone", in_doubt=False))
        else:
            link.writes[token] = item = self.write_item(link, fragments, grant, token)
            self._queue(link, item)

    def _queue(self, link: wire.Link | None, item: wire.Item) -> None:
        if link is None or link.down or link.failed:
            return
        if link.told is None:
            link.waiting.append(item)
            return
        link.out.append(item)
        if len(link.out) == 1:
            self._flush(link)

    def _flush(self, link: wire.Link) -> None:
        """Send what can be sent, for a while."""
        try:
            for _ in range(_TURN):
                if not link.out:
                    break
                item = link.out[0]
                outcome: Done | Failed | None = None
                try:
                    if not item.step(link.socket):
                        continue
                    if item.token is not None and not item.answered:
                        outcome = Done(item.token)
                except TransferError as error:
                    assert item.token is not None
                    outcome = Failed(item.token, error.message, in_doubt=item.begun)
                link.out.popleft()
                if outcome is not None:
                    del link.writes[outcome.token]
                    self._mailbox.say(outcome)
        except BlockingIOError:
            pass
        except OSError as error:
            return self._lost(link, wire.reason_of(error))
        self._watch(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0))

    # Receiving.

    def _serve(self, link: wire.Link, mask: int) -> None:
        """Some turns for one connection."""
        if link.down:
            return
        if link.dialling and mask & selectors.EVENT_WRITE:
            link.dialling = False
            if number := link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return self._lost(link, f"it cannot be reached: {os.strerror(number)}")
        if mask & selectors.EVENT_WRITE:
            self._flush(link)
        if mask & selectors.EVENT_READ and not link.down:
            self._take_in(link)

    def _take_in(self, link: wire.Link) -> None:
        try:
            for _ in range(_TURN):
                if not link.run.receive(link.socket):
                    reason = "it has ended" if link.told else "it has ended, or another one has its address"
                    return self._lost(link, link.failed or reason)
                while not link.run.left:
                    link.run = next(link.frames)
                if link.down:
                    return
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(link, link.failed or wire.reason_of(error))
        except TransferError as error:
            self._fail(link, error.message)

    def _frames(self, link: wire.Link) -> Iterator[wire.Run]:
        """What comes next, again and again; whoever asks for more has filled the last one."""
        while True:
            data = bytearray(wire.HEADER_BYTES)
            yield wire.Run([memoryview(data)])
            header = wire.Header.unpack(data, self._longest)
            if (header.kind == wire.HELLO) != (link.told is None):
                raise TransferError("it sent a hello in the midst, or something else before it")
            if header.kind == wire.WRITE:
                ranges = bytearray(header.count * wire.RANGE_BYTES)
                yield wire.Run([memoryview(ranges)])
                yield self._grants.land(link, header, ranges)
                self._answer(link, header.token)
                continue
            body = bytearray(header.byte_count)
            yield wire.Run([memoryview(body)])
            if header.kind == wire.HELLO:
                self._met(link, body)
            elif header.kind == wire.MESSAGE:
                assert link.peer is not None
                self._mailbox.say(Message(link.peer, bytes(body)))
            elif link.writes.pop(header.token, None) is not None:
                reason, doubt = body.decode(errors="replace"), header.code != wire.REFUSED
                done = header.code == wire.DONE
                self._mailbox.say(Done(header.token) if done else Failed(header.token, reason, in_doubt=doubt))

    def _answer(self, link: wire.Link, token: int) -> None:
        code = (wire.DOUBTFUL if link.doubt else wire.REFUSED) if link.refused else wire.DONE
        reason = link.refused.encode()
        link.landing = None
        header = wire.Header(wire.ANSWER, code, token=token, byte_count=len(reason))
        self._queue(link, wire.FrameItem(header, memoryview(reason)))

    def give(self, peer: Peer, grant: int, region: Region, begins: Int64Array, ends: Int64Array) -> None:
        """Let the peer write there. ``begins`` ascend."""
        link = self._links.get(peer.id)
        if link is not None and not link.down:
            self._grants.give(link, grant, region, begins, ends)

    def revoke(self, grant: int) -> None:
        """Let nobody write under it any more."""
        self._grants.revoke(grant)
        self._mailbox.say(Revoked(grant))

    # Ends.

    def _fail(self, link: wire.Link, reason: str) -> None:
        """Talk no more to a peer that cannot be understood. It is down when its end has closed, too: until then it may
        go on with what it was doing."""
        if link.peer is None:
            return self._lost(link, reason)
        link.failed = reason
        link.out.clear()
        link.frames = self._nothing()
        link.run = next(link.frames)
        with suppress(OSError):
            link.socket.shutdown(socket.SHUT_WR)
        self._watch(link, selectors.EVENT_READ)

    def _nothing(self) -> Iterator[wire.Run]:
        while True:
            yield wire.discarded(1 << 20)

    def _lost(self, link: wire.Link, reason: str) -> None:
        """Nothing comes from the other end any more."""
        if link.down:
            return
        self._shut(link)
        if link.peer is None:
            self._strangers.remove(link)
            return
        self.forget(link.peer)
        self._mailbox.say(PeerDown(link.peer, reason))
        self._unsent(link, reason)

    def disconnect(self, peer: Peer) -> None:
        """Have nothing to do with it any more."""
        link = self._links.pop(peer.id, None)
        if link is not None:
            if not link.down:
                self._shut(link)
            self._unsent(link, "the connection was closed")
            self._mailbox.say(Closed(peer))

    def _shut(self, link: wire.Link) -> None:
        link.down = True
        self._watch(link, 0)
        link.socket.close()
        link.out.clear()
        link.waiting.clear()
        self._grants.forget(link)
        self.detach(link)

    def _unsent(self, link: wire.Link, reason: str) -> None:
        writes, link.writes = link.writes, {}
        self._mailbox.say(*(Failed(token, reason, in_doubt=item.begun) for token, item in writes.items()))

    def _watch(self, link: wire.Link, mask: int) -> None:
        if mask == link.watched:
            return
        if not mask:
            self._selector.unregister(link.socket)
        elif link.watched:
            self._selector.modify(link.socket, mask, link)
        else:
            self._selector.register(link.socket, mask, link)
        link.watched = mask
