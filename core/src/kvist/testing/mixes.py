"""What the cache machine is tried on: mixes of retentions, unequal pages, two domains, arenas of any tightness."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from kvist.errors import CapacityError
from kvist.layout import Layout
from kvist.policies import LeastRecentlyUsed, ReuseRate
from kvist.restore import RestorePolicy
from kvist.spec import CacheSpec, History, Layer, Retention, RowFormat, Spans, State, Stream, Window
from kvist.testing.reads import reads
from kvist.testing.under_test import ManagerFactory, ManagerUnderTest

#: Gives an integer from 0 to one below its argument: a random generator, or Hypothesis.
Draw = Callable[[int], int]


@attrs.frozen
class Chunk:
    """A retention that the core has never seen: the query at ``p`` reads its own chunk of ``tokens`` positions. At the
    beginning of a chunk nothing at all is required."""

    tokens: int

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

    def first_read(self, query: int) -> int:
        """The first position that the query reads."""
        return query - query % self.tokens

    def live(self, length: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
        begin, end = self.first_read(length) // block_tokens, -(-length // block_tokens)
        return ((begin, end),) if begin < end else ()

    def required(self, length: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
        return self.live(length, block_tokens)

    def droppable(self, length: int, rollback: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
        end = self.first_read(max(0, length - rollback)) // block_tokens
        return ((0, end),) if end else ()


@reads.register(Chunk)
def _reads_chunk(retention: Chunk, query: int) -> Spans:
    return ((retention.first_read(query), query + 1),)


@attrs.frozen
class Checkpoint(State):
    """A state that takes drafts back by itself: a page has the position and the state of a checkpoint, and what came
    after each of up to ``inputs`` tokens since, so that a step's own position says how many of them are valid."""

    inputs: int

    @property
    def most_drafts(self) -> int | None:
        return self.inputs

    @property
    def draft_pages(self) -> bool:
        return False


@attrs.frozen
class Kind:
    """One stream: its retention, tokens per row, whether it belongs to the draft model, and its width in rows of 64
    bytes per token when pages are to be unequal."""

    retention: Retention
    tokens_per_row: int = 1
    draft: bool = False
    width: int = 1


MIXES: dict[str, tuple[Kind, ...]] = {
    "history": (Kind(History()),),
    "window": (Kind(Window(5)),),
    "sinks": (Kind(Window(4, sinks=3)),),
    "state": (Kind(State(), width=3),),
    "chunk": (Kind(Chunk(5)),),
    "ring": (Kind(History(), width=3), Kind(Window(2, ring=3))),
    "history+window": (Kind(History(), width=2), Kind(Window(6))),
    "history+state": (Kind(History()), Kind(State(), width=3)),
    "checkpoint": (Kind(Checkpoint(3)),),
    "history+checkpoint": (Kind(History()), Kind(Checkpoint(4), width=3)),
    "history+chunk": (Kind(History()), Kind(Chunk(6), width=3)),
    "history+sinks+window": (Kind(History(), width=3), Kind(Window(7, sinks=3)), Kind(Window(2), width=2)),
    "history+window+state": (Kind(History()), Kind(Window(4), width=2), Kind(State(), width=3)),
    "window+state": (Kind(Window(3), width=2), Kind(State())),
    "compressed": (Kind(History(), 2), Kind(History(), 4), Kind(Window(6), 2, width=3)),
    "two domains": (Kind(History(), width=3), Kind(History(), draft=True), Kind(Window(3), draft=True)),
}


#: What a manager's factory takes beside the layout, by name.
OPTIONS = frozenset({"restore", "backoff_tokens", "eviction", "tiers"})


def spec_of(
    kinds: Iterable[Kind], block: int, *, unequal: bool = True, **options: Any
) -> tuple[CacheSpec, list[CacheSpec]]:
    """The spec of the target and those of drafts, with one layer for each kind.

    unequal: pages of different sizes, as far as the kinds' widths differ.
    """
    target: list[Layer] = []
    drafts: list[Layer] = []
    for number, kind in enumerate(kinds):
        width = 16 * (kind.width if unequal else 1) * kind.tokens_per_row
        if kind.retention.exact and not unequal:
            width *= block  # A page of one row, as large as the others' pages.
        stream = Stream("kv", RowFormat((width,), "float32"), kind.retention, kind.tokens_per_row)
        (drafts if kind.draft else target).append(Layer(number, (stream,)))
    others = [CacheSpec(tuple(drafts), block, "machine", domain="draft")] if drafts else []
    return CacheSpec(tuple(target), block, "machine", **options), others


def layout_of(spec: CacheSpec, drafts: Sequence[CacheSpec], memory: int) -> Layout:
    """A layout with ``memory`` bytes, or with a little more where nothing would fit into that."""
    step = max(group.page_bytes for group in Layout.build(spec, 1 << 30, drafts=drafts).groups)
    while True:
        try:
            return Layout.build(spec, memory, drafts=drafts)
        except CapacityError:
            memory += step


@attrs.frozen
class Setup:
    """Everything a run starts from; prints what is needed to start it again."""

    mix: str
    kinds: tuple[Kind, ...] = attrs.field(repr=False)
    block: int
    pages: int
    unequal: bool
    every_blocks: int | None
    backoff: int
    vocab: int
    max_tokens: int | None
    policy: str
    listened: bool
    floor: int
    noise: int

    @classmethod
    def choose(
        cls, draw: Draw, mixes: Mapping[str, tuple[Kind, ...]] = MIXES, options: Collection[str] = OPTIONS
    ) -> Setup:
        """options: those that the manager's factory takes, of :data:`OPTIONS`."""
        mix = list(mixes)[draw(len(mixes))]
        kinds = mixes[mix]
        block = block_of(kinds) or 1 + draw(4)
        pages = (2, 4, 8, 30)[draw(4)] * len(kinds) * 4 // block + draw(6)
        return cls(
            mix,
            kinds,
            block,
            pages,
            unequal=draw(3) > 0,
            every_blocks=(None, None, 1, 2)[draw(4)] if "restore" in options else None,
            backoff=(0, 0, 0, 2)[draw(4)] if "backoff_tokens" in options else 0,
            vocab=2 + draw(3),
            max_tokens=(None, None, 40)[draw(3)],
            policy=("", "", "used", "rate")[draw(4)] if "eviction" in options else "",
            listened=not draw(4),
            floor=(0, 0, 0, 3)[draw(4)],
            noise=draw(1 << 16),
        )

    def manager(self, factory: ManagerFactory) -> ManagerUnderTest:
        """A manager of its own for each run, with the options that were chosen."""
        spec, drafts = spec_of(
            self.kinds, self.block, unequal=self.unequal, max_tokens=self.max_tokens, vocab_size=self.vocab
        )
        largest = max(group.page_bytes for group in Layout.build(spec, 1 << 30, drafts=drafts).groups)
        layout = layout_of(spec, drafts, (self.pages + 1) * (64 * self.block if self.unequal else largest))
        if self.floor:
            with contextlib.suppress(CapacityError):
                # Where the arena is too small for it, there is none.
                layout = layout.with_floors({layout.groups[-1].name: self.floor})
        chosen: dict[str, Any] = {
            "restore": None if self.every_blocks is None else RestorePolicy(self.every_blocks),
            "backoff_tokens": self.backoff,
            "eviction": {"": None, "used": LeastRecentlyUsed(), "rate": ReuseRate(memory=64)}[self.policy],
        }
        # A factory that does not take an option is not given it.
        manager = factory(layout, **{name: value for name, value in chosen.items() if value})
        if self.noise % 4:
            manager.shuffle_free_pages(np.random.default_rng(self.noise))
        return manager


def block_of(kinds: Iterable[Kind]) -> int | None:
    """The smallest block that whole rows of several tokens, and rings, fit into; ``None`` when any block will do."""
    kinds = list(kinds)
    rows = math.lcm(*(kind.tokens_per_row for kind in kinds))
    rings = max(kind.retention.ring for kind in kinds)
    return rows * -(-(rings + 1) // rows) if rings else rows if rows > 1 else None
