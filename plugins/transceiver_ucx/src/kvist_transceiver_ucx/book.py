"""The connections of one end, by everything that they are looked up by. Its lock is the transport's."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable

from kvist.transfer.transport import Peer
from kvist_transceiver_ucx.connection import Connection
from kvist_transceiver_ucx.wire import Hello


class Book:
    """Guarded by ``lock``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self._ids = itertools.count()
        self._connections: dict[int, Connection] = {}

    def enter(self, hello: Hello, there: int = 0) -> Connection:
        """A new connection. Its key cannot be guessed, nor be mistaken for one of an earlier incarnation."""
        with self.lock:
            peer = Peer(next(self._ids), hello.identity, hello.name)
            connection = Connection(peer, secrets.randbits(63) + 1, hello, there)
            self._connections[peer.id] = connection
            return connection

    def live(self, identity: str) -> Connection | None:
        """The connection to this incarnation that has not ended."""
        with self.lock:
            for connection in self._connections.values():
                if connection.peer.identity == identity and not connection.ended and not connection.leaving:
                    return connection
            return None

    def all(self, identity: str) -> list[Connection]:
        """Connections to this incarnation that we know to be open there, or that have been."""
        with self.lock:
            return [each for each in self._connections.values() if each.peer.identity == identity and each.there]

    def of(self, peer: Peer) -> Connection | None:
        with self.lock:
            return self._connections.get(peer.id)

    def by_key(self, key: int) -> Connection | None:
        """By the key at this end."""
        return self._find(lambda connection: key != 0 and connection.key == key)

    def by_their_key(self, key: int) -> Connection | None:
        """By the key at the other end."""
        return self._find(lambda connection: connection.there == key)

    def watching(self, descriptor: int) -> list[Connection]:
        """Connections to the process that this descriptor stands for."""
        with self.lock:
            return [each for each in self._connections.values() if each.process == descriptor]

    def end(self, connection: Connection, reason: str) -> bool:
        """Nothing goes over it any more. Returns whether that was so already."""
        with self.lock:
            was = connection.ended
            if not was:
                connection.ended, connection.reason = True, reason
            return was

    def forget(self, connection: Connection) -> int | None:
        """Returns the descriptor of its process, if there is one to close."""
        with self.lock:
            found = self._connections.pop(connection.peer.id, None)
            return None if found is None else found.process

    def clear(self) -> list[int]:
        """Forget all; returns the descriptors to close."""
        with self.lock:
            left = [each.process for each in self._connections.values() if each.process is not None]
            self._connections.clear()
            return left

    def _find(self, which: Callable[[Connection], bool]) -> Connection | None:
        with self.lock:
            return next((each for each in self._connections.values() if which(each)), None)
