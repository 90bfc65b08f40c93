"""What goes wrong on a local network, said beforehand, so that it goes wrong every time in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import attrs

Kind: TypeAlias = Literal["write", "answer", "message"]
Action: TypeAlias = Literal[
    "hold", "late", "drop", "duplicate", "overtake", "delay", "fail", "kill_sender", "kill_receiver", "stall_receiver"
]


@attrs.frozen
class Fault:
    """One thing that goes wrong with the operations that it matches.

    action:
        ``hold``: it, and all behind it on its way, wait until ``network.release()``;
        ``late``: it waits so, and those behind it pass;
        ``drop``: it never arrives;
        ``duplicate``: it arrives twice;
        ``overtake``: it arrives before everything that is under way there;
        ``delay``: it, and all behind it, take ``delay_s`` longer;
        ``fail``: a write is refused before anything was sent;
        ``kill_sender``, ``kill_receiver``: that process dies, half of the write's fragments done;
        ``stall_receiver``: that process stops until ``network.resume()``.
    kind: a ``write`` on its way to memory, the ``answer`` on its way back, or a ``message``.
    first, count: of the operations that it matches, counted from 0.
    sender, receiver: names of transports; empty for any.
    contains: bytes that a message has in it.
    """

    action: Action
    kind: Kind
    first: int = 0
    count: int = 1
    sender: str = ""
    receiver: str = ""
    contains: bytes = b""
    delay_s: float = 0.0

    def matches(self, kind: Kind, sender: str, receiver: str, data: bytes) -> bool:
        """Is this an operation that the fault is about?"""
        return (
            kind == self.kind
            and self.sender in ("", sender)
            and self.receiver in ("", receiver)
            and self.contains in data
        )


class FaultPlan:
    """Faults, and how many operations each has seen. Of several that are due the first one counts."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._seen = [[fault, 0] for fault in faults]

    def add(self, fault: Fault) -> None:
        """One more; it counts operations from now on."""
        self._seen.append([fault, 0])

    def due(self, kind: Kind, sender: str, receiver: str, data: bytes = b"") -> Fault | None:
        """Note an operation. Returns what goes wrong with it."""
        found = None
        for entry in self._seen:
            fault, seen = entry
            assert isinstance(fault, Fault) and isinstance(seen, int)
            if fault.matches(kind, sender, receiver, data):
                entry[1] = seen + 1
                if found is None and fault.first <= seen < fault.first + fault.count:
                    found = fault
        return found
