"""What a disk store says of itself."""

from __future__ import annotations

from typing import Literal

import attrs

#: Why content can not be found any more. evicted: others needed the room. cleared: all of it was dropped, by
#: ``clear()``. failed: it could not be read, or is damaged.
Reason = Literal["evicted", "cleared", "failed"]


@attrs.frozen
class DiskStats:
    """What the store holds now, and counters since it was opened, which never decrease.

    used_bytes: what own files take from the budget; ``foreign_bytes``, of other formats, comes on top.
    undeletable_bytes: the part of ``used_bytes`` in files that nobody finds any more and that could not be removed.
    misses: ``get`` found nothing intact.
    damaged: entries dropped because their file was missing, unreadable or not intact.
    evicted: entries that made room; ``foreign_evicted`` of other formats.
    write_errors: blocks not kept because the file system refused.
    pages: for each group, entries that have a part of it.
    """

    entries: int
    used_bytes: int
    undeletable_bytes: int
    budget_bytes: int
    foreign_entries: int
    foreign_bytes: int
    hits: int
    misses: int
    stored: int
    evicted: int
    foreign_evicted: int
    damaged: int
    write_errors: int
    pages: tuple[int, ...]


@attrs.frozen
class Cleared:
    """What ``clear`` removed, and what it could not: ``left_*`` are files that stay, though nobody finds them now."""

    entries: int
    bytes: int
    left_entries: int
    left_bytes: int


@attrs.frozen
class Change:
    """Parts of a block that can be found from now on, or with a ``reason`` no more. ``groups``: as bits."""

    key: bytes
    groups: int
    reason: Reason | None = None
