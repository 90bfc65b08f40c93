"""What two transceivers say to each other. Bytes of a cache never travel here."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np

from kvist.errors import TransferError
from kvist.step import IntArray


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Said first, by both. table: of :class:`~kvist.transfer.pagetable.PageTable`; region: where its pages are."""

    table: bytes
    region: int


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """The receiver's pages, to one writer.

    attempt: the receiver's number, never used twice. turn: which of several writers with the same bytes sends them.
    length: tokens that are wanted. pages: per group of the receiver int32 ``[blocks]``, positional, little-endian.
    remaining_s: seconds that the receiver goes on waiting.
    """

    request: str
    attempt: int
    grant: int
    turn: int
    length: int
    pages: tuple[bytes, ...]
    remaining_s: float


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The receiver does not want a request any more, or will never ask for it (attempt 0)."""

    request: str
    attempt: int


class Evidence(msgspec.Struct, frozen=True, tag="evidence"):
    """What became of one piece of what a writer was to write; sent only after its bytes are in the receiver's memory.

    pieces: how many there are in all, said with the last one and 0 with others. status: of a piece ``"done"``; the
    others are a writer's last word, after which it writes nothing more. After ``"doubt"`` bytes may still arrive.
    ``"over"`` answers a ``Cancel`` of what is not going on here any more.
    payload: small data that rides with the last piece, e.g. the first token.
    """

    request: str
    attempt: int
    piece: int
    pieces: int
    status: Literal["done", "failed", "doubt", "over"]
    byte_count: int = 0
    reason: str = ""
    payload: bytes = b""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life, while requests are open."""


Wire: TypeAlias = Describe | Publish | Cancel | Evidence | Alive

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Wire] = msgspec.msgpack.Decoder(Describe | Publish | Cancel | Evidence | Alive)


def encode(message: Wire) -> bytes:
    """For :meth:`Transport.message`."""
    return _encoder.encode(message)


def decode(data: bytes) -> Wire:
    """Raises TransferError for what is no message of this version."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise TransferError(f"a message cannot be read: {error}") from error


def packed(pages: IntArray) -> bytes:
    """Page ids for the wire."""
    return pages.astype("<i4", copy=False).tobytes()


def unpacked(data: bytes) -> IntArray:
    """Page ids from the wire."""
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
