"""What a model keeps: streams of rows, how long they are needed, and the layers they belong to.

Nothing here knows a model, allocates memory or imports torch. A plugin's *spec factory* turns a model
config into a :class:`CacheSpec`; everything else in Kvist is derived from it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, runtime_checkable

import attrs

from kvist.errors import SpecError

#: Bytes of one element. The only list of element types in Kvist; names are torch's without the prefix.
ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}

#: Half-open ranges ``(begin, end)`` of block ordinals, ascending and disjoint.
Spans = tuple[tuple[int, int], ...]


def ceil_div(value: int, unit: int) -> int:
    """``value / unit``, rounded up."""
    return -(-value // unit)


@runtime_checkable
class Retention(Protocol):
    """How long rows are needed. The core never asks *which* retention it has, only these questions.

    Implementations are frozen and compare by value: streams with equal retentions share a group.
    All methods are pure; ``length`` counts computed tokens, so the next query stands at position ``length``.
    """

    @property
    def exact(self) -> bool:
        """``False``: one page per block of rows. ``True``: one mutable page per sequence, whose snapshots are valid at
        exactly the token position they were taken at; a page then has one row of each stream."""

    @property
    def ring(self) -> int:
        """0: a page has the rows of a whole block. Otherwise the rows of the last so many tokens of its block that are
        written, the row of position ``p`` in slot ``p % ring``. Others then resume where a block ends, or a sequence
        did: inside a block the ring holds later rows already."""

    @property
    def most_drafts(self) -> int | None:
        """Drafts per step that can be taken back without loss, ``None`` for any number."""

    @property
    def draft_pages(self) -> bool:
        """Only for ``exact``: does a row with drafts write the state after each query token to a page of its own? If
        ``False``, such a row has one page as any other, and the page itself tells what is valid: the next step begins
        at the position up to which tokens were accepted."""

    def live(self, length: int, block_tokens: int) -> Spans:
        """Blocks among those below ``length`` that the query at ``length`` or any later one may read."""

    def required(self, length: int, block_tokens: int) -> Spans:
        """Blocks that must be present to resume a sequence at ``length``.

        Unless ``exact``, the ones of these below a shorter length are required at the shorter length too. If
        ``exact``, the one block whose end is the position of the snapshot.
        """

    def droppable(self, length: int, rollback: int, block_tokens: int) -> Spans:
        """Blocks never read again, even after the last ``rollback`` tokens are taken back."""


@attrs.frozen
class History:
    """Every row is needed for as long as the sequence lives: full attention."""

    @property
    def exact(self) -> bool:
        return False

    @property
    def ring(self) -> int:
        return 0

    @property
    def most_drafts(self) -> int | None:
        return None

    @property
    def draft_pages(self) -> bool:
        return False

    def live(self, length: int, block_tokens: int) -> Spans:
        return ((0, ceil_div(length, block_tokens)),) if length else ()

    def required(self, length: int, block_tokens: int) -> Spans:
        return self.live(length, block_tokens)

    def droppable(self, length: int, rollback: int, block_tokens: int) -> Spans:
        return ()


@attrs.frozen(repr=False)
class Window:
    """The query at position ``p`` reads the first ``sinks`` tokens and positions ``p - tokens + 1 .. p``.

    tokens: window in tokens, the query's own position included, at least 1.
    sinks: leading tokens that never leave, 0 for none.
    ring: keep only the rows of a block's last so many tokens, see :attr:`Retention.ring`; 0 keeps all. For windows
        much shorter than a block, and backends that read the rows of the step's own tokens from its inputs. What it
        has beyond ``tokens`` is room for drafts.
    """

    tokens: int = attrs.field()
    sinks: int = 0
    ring: int = 0

    def __attrs_post_init__(self) -> None:
        if self.tokens < 1:
            raise SpecError(f"Window(tokens={self.tokens}): a window holds at least the query's own token")
        if self.sinks < 0:
            raise SpecError(f"Window(sinks={self.sinks}): the number of sink tokens cannot be negative")
        if self.ring and (self.ring < self.tokens or self.sinks):
            raise SpecError(
                f"Window(tokens={self.tokens}, sinks={self.sinks}, ring={self.ring}): a ring holds at least the "
                "window, and no sinks",
                hint="make the ring as long as the window and the drafts of a step",
            )

    @property
    def exact(self) -> bool:
        return False

    def __repr__(self) -> str:
        ring = f", ring={self.ring}" if self.ring else ""
        return f"Window(tokens={self.tokens}, sinks={self.sinks}{ring})"

    @property
    def most_drafts(self) -> int | None:
        return self.ring - self.tokens if self.ring else None

    @property
    def draft_pages(self) -> bool:
        return False

    def live(self, length: int, block_tokens: int) -> Spans:
        end = ceil_div(length, block_tokens)
        # The next query brings its own row, so only the last tokens - 1 rows below ``length`` are read again.
        begin = max(0, length + 1 - self.tokens) // block_tokens
        sink_end = min(ceil_div(self.sinks, block_tokens), end)
        if begin <= sink_end:
            return ((0, end),) if end else ()
        spans = ((0, sink_end), (begin, end))
        return tuple((low, high) for low, high in spans if low < high)

    def required(self, length: int, block_tokens: int) -> Spans:
        return self.live(length, block_tokens)

    def droppable(self, length: int, rollback: int, block_tokens: int) -> Spans:
        length = max(0, length - rollback)
        begin = max(0, length + 1 - self.tokens) // block_tokens
        sink_end = ceil_div(self.sinks, block_tokens)
        end = min(begin, ceil_div(length, block_tokens))
        return ((sink_end, end),) if sink_end < end else ()


@attrs.frozen
class State:
    """One page per sequence that every step overwrites: recurrent state, convolution tails.

    Resuming at a length needs a copy of the page that was made when exactly so many tokens were computed. The copy
    made at the end of a block is filed under that block.
    """

    @property
    def exact(self) -> bool:
        return True

    @property
    def ring(self) -> int:
        return 0

    @property
    def most_drafts(self) -> int | None:
        return None

    @property
    def draft_pages(self) -> bool:
        return True

    def live(self, length: int, block_tokens: int) -> Spans:
        return ()

    def required(self, length: int, block_tokens: int) -> Spans:
        end = ceil_div(length, block_tokens)
        return ((end - 1, end),) if length else ()

    def droppable(self, length: int, rollback: int, block_tokens: int) -> Spans:
        return ()


@attrs.frozen
class Replicated:
    """Every tensor-parallel rank holds the whole row."""


@attrs.frozen
class Heads:
    """Axis 0 of the row is ``count`` heads, split evenly over tensor-parallel ranks."""

    count: int


@attrs.frozen
class Sections:
    """Axis 0 of the row is a concatenation of parts of these sizes, each split over the ranks on its own."""

    sizes: tuple[int, ...]


Sharding = Replicated | Heads | Sections


@attrs.frozen
class ScaleFormat:
    """Quantisation scales stored with a row: ``count`` elements of ``dtype`` per row."""

    count: int
    dtype: str = "float32"

    @property
    def row_bytes(self) -> int:
        return self.count * _element_bytes(self.dtype, "scale")


def _sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


@attrs.frozen
class RowFormat:
    """One row: ``shape`` elements of ``dtype`` (a key of :data:`ELEMENT_BYTES`), plus optional inline scales."""

    shape: tuple[int, ...] = attrs.field(converter=_sizes)
    dtype: str
    scale: ScaleFormat | None = None

    def __attrs_post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise SpecError(f"RowFormat(shape={self.shape}): every axis needs at least one element")
        _element_bytes(self.dtype, "row")

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return _element_bytes(self.dtype, "row")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its scales, before any padding a backend's page layout adds."""
        return self.element_count * self.element_bytes + (self.scale.row_bytes if self.scale else 0)


def _element_bytes(dtype: str, what: str) -> int:
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        raise SpecError(
            f"unknown {what} dtype {dtype!r}", hint=f"use one of {', '.join(sorted(ELEMENT_BYTES))}"
        ) from None


@attrs.frozen
class Stream:
    """One kind of row that a layer stores.

    name: unique in its layer, e.g. ``"k"``, ``"v"``, ``"index_k"``.
    row: format of one row.
    retention: how long rows are needed.
    tokens_per_row: tokens one row stands for (1, or e.g. 4 and 128 for compressed rows).
    sharding: how tensor-parallel ranks split the row.
    continued: may a sequence resume inside a row's tokens? So it is where another stream keeps what the row is made
        from, and the backend makes it when its last token comes. Otherwise reuse ends where rows are whole.
    """

    name: str
    row: RowFormat
    retention: Retention
    tokens_per_row: int = 1
    sharding: Sharding = Replicated()
    continued: bool = False

    def __attrs_post_init__(self) -> None:
        if self.tokens_per_row < 1:
            raise SpecError(f"stream {self.name!r}: tokens_per_row={self.tokens_per_row} must be at least 1")


def _streams(streams: Iterable[Stream]) -> tuple[Stream, ...]:
    return tuple(streams)


@attrs.frozen
class Layer:
    """One layer that keeps something. ``id`` is the model's own layer number."""

    id: int
    streams: tuple[Stream, ...] = attrs.field(converter=_streams)

    def __attrs_post_init__(self) -> None:
        names = [stream.name for stream in self.streams]
        if not names:
            raise SpecError(f"layer {self.id} has no streams", hint="leave layers that keep nothing out of the spec")
        if len(set(names)) != len(names):
            raise SpecError(f"layer {self.id} names a stream twice: {names}")


def _layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    return tuple(layers)


@attrs.frozen
class CacheSpec:
    """Everything one model keeps.

    layers: the layers that keep something, unique ids.
    block_tokens: tokens per block, a multiple of every stream's ``tokens_per_row``.
    fingerprint: digest of what makes rows of this model different from another's (weights, dtype, ...).
    domain: ``"target"``, or another name for a draft model; groups never span domains.
    max_tokens: longest sequence the model can serve, in tokens; ``None`` for no limit of its own.
    vocab_size: token ids are below this; ``None`` when unknown, then ids are only checked to be >= 0.
    """

    layers: tuple[Layer, ...] = attrs.field(converter=_layers)
    block_tokens: int
    fingerprint: str
    domain: str = "target"
    max_tokens: int | None = None
    vocab_size: int | None = None

    def __attrs_post_init__(self) -> None:
        if not self.layers:
            raise SpecError("a cache spec needs at least one layer")
        if self.block_tokens < 1:
            raise SpecError(f"block_tokens={self.block_tokens} must be at least 1")
        ids = [layer.id for layer in self.layers]
        if len(set(ids)) != len(ids):
            raise SpecError(f"layer ids are not unique: {sorted(ids)}")
        for layer in self.layers:
            for stream in layer.streams:
                if self.block_tokens % stream.tokens_per_row:
                    raise SpecError(
                        f"layer {layer.id} stream {stream.name!r}: block_tokens={self.block_tokens} is not a multiple "
                        f"of tokens_per_row={stream.tokens_per_row}",
                        hint=f"use a multiple of {stream.tokens_per_row}",
                    )

    def only(self, stream_names: Collection[str]) -> CacheSpec:
        """The same spec with these streams only, for what serves a part of it; layers left without any are dropped.

        Raises SpecError when no layer has any of them.
        """
        kept = [(layer.id, [each for each in layer.streams if each.name in stream_names]) for layer in self.layers]
        return attrs.evolve(self, layers=[Layer(id_, streams) for id_, streams in kept if streams])


def _media(items: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(items)


@attrs.frozen(cache_hash=True)
class Scope:
    """Everything beside the tokens and the model that makes content different. Equal scopes share, others never.

    adapter: digest of adapter *weights* (not a name), empty for none.
    salt: tenant or session salt, empty for none.
    media: ``(token position, digest)`` of each media item in the prompt.
    """

    adapter: str = ""
    salt: str = ""
    media: tuple[tuple[int, str], ...] = attrs.field(default=(), converter=_media)

    def digest(self) -> bytes:
        """32 bytes, equal in every process for equal content."""
        hasher = hashlib.sha256()
        parts = [self.adapter, self.salt, *(f"{position}:{digest}" for position, digest in self.media)]
        for part in parts:
            data = part.encode()
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        return hasher.digest()
