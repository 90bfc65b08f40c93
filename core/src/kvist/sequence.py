"""One request's view: its tokens, its lengths, and its row in every group's page table."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Literal, TypeGuard

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import RequestError, StateError
from kvist.layout import Group, Layout
from kvist.prefix.extent import Extent
from kvist.spec import CacheSpec, Scope, ceil_div
from kvist.step import NO_PAGE, IntArray
from kvist.wishes import ByBlock

if TYPE_CHECKING:
    from kvist.batch import DecodeBatch


class Tables:
    """Page tables: one int32 ``[slot, block ordinal]`` array per group, a slot per open sequence.

    Arrays are replaced, never moved, when they grow: a step keeps the ones it was given.
    """

    def __init__(self, group_count: int) -> None:
        self.arrays: list[IntArray] = [np.full((0, 64), NO_PAGE, np.int32) for _ in range(group_count)]
        #: Read-only views of the arrays, for steps.
        self.views: tuple[IntArray, ...] = ()
        #: Entries in every row.
        self.columns = 0
        self._free: list[int] = []
        self._resize(16, 64)

    def acquire(self) -> int:
        """An unused slot, every entry NO_PAGE."""
        if not self._free:
            rows, columns = self.arrays[0].shape
            self._resize(2 * rows, columns)
        return self._free.pop()

    def clear(self, slot: int, count: int) -> None:
        """Make the first ``count`` entries of a row NO_PAGE."""
        for array in self.arrays:
            array[slot, :count] = NO_PAGE

    def release(self, slot: int) -> None:
        """Give a cleared slot back."""
        self._free.append(slot)

    def ensure_blocks(self, block_count: int) -> None:
        """Make every row at least ``block_count`` entries long."""
        rows, columns = self.arrays[0].shape
        if block_count > columns:
            self._resize(rows, max(block_count, 2 * columns))

    def _resize(self, rows: int, columns: int) -> None:
        old_rows = self.arrays[0].shape[0]
        for group, old in enumerate(self.arrays):
            array = np.full((rows, columns), NO_PAGE, np.int32)
            array[:old_rows, : old.shape[1]] = old
            self.arrays[group] = array
        self.columns = columns
        self.views = tuple(array.view() for array in self.arrays)
        for view in self.views:
            view.flags.writeable = False
        self._free.extend(range(rows - 1, old_rows - 1, -1))


_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_NO_OUTPUT: IntArray = np.empty(0, np.int32)


#: Later than any tick of a decode batch.
_NEVER = 1 << 62


@attrs.frozen(eq=False)
class Sources:
    """Pages that the sequence's next step copies into pages of its own: the first rows of a block, a state's snapshot.

    pages: page per group, NO_PAGE where there is nothing to copy; leased where the group is sparse. extent: held.
    """

    pages: list[int]
    extent: Extent


@attrs.define(eq=False)
class FromBelow:
    """What the tiers below the device have for a sequence.

    length: tokens it could reuse if their content came up. limit: it cannot reuse more. base: computed tokens when this
    was found out. loading: is it on its way? host_tokens, disk_tokens: of the tokens it then has, those that came up
    from there.
    """

    length: int
    limit: int
    base: int
    loading: bool = False
    host_tokens: int = 0
    disk_tokens: int = 0


class Sequence:
    """Made by ``manager.open`` and ``manager.fork``; only the manager changes its lengths and pages.

    ``committed <= computed <= reserved``: tokens whose ids are known and whose rows are final, tokens whose rows are
    written, and tokens for which there are pages. ``scheduled`` counts the tokens of steps in flight as well.
    """

    # Most start as the class has them, which makes a sequence in half the time.
    #: Tokens taken from the prefix index when the sequence was opened.
    reused = 0
    #: Leading tokens that the index knew then, and the group without which more of them had been reused.
    matched = 0
    limited_by: Group | None = None
    #: How many more.
    lost = 0
    #: Blocks that have a page, or had one until the group dropped it.
    block_count = 0
    #: Positions where a prefill chunk must end for a snapshot of the states, ascending.
    chunk_ends: SequenceOf[int] = ()
    closed = False
    #: Are its rows on their way from another process? Then nothing can be done with it.
    arriving = False
    #: Tokens of its prompt that came from there.
    received = 0

    # For the manager.
    #: Restore points not published yet, ascending.
    points: SequenceOf[int] = ()
    #: Published tokens, the extent in which they end, which the sequence holds, and leading blocks whose pages of dense
    #: groups are the prefix tree's.
    published = 0
    tip: Extent | None = None
    shared = 0
    #: May others find what it computes?
    shares = True
    #: How long its blocks should stay.
    wishes: ByBlock = ()
    sources: Sources | None = None
    #: Where there are tiers below the device.
    below: FromBelow | None = None
    #: For the eviction policy: the mark of the deepest extent it claimed, and the first block that it added.
    claimed_mark = -1
    first_key: tuple[int, bytes] | None = None
    #: Pages in each exact group's table row.
    state_columns = 0
    batch: DecodeBatch | None = None
    joined_tick = 0
    left_tick = _NEVER
    #: Tokens of single runs in flight, and is it unknown how many of them will stay?
    ahead = 0
    undecided = False
    closing = False
    #: What the sequence had computed when it was suspended, -1 while it is not.
    suspended_at = -1
    #: For statistics: where its tokens came from when it was made or last resumed, how many it then had without
    #: computing them, and has it computed any since, as far as they are counted?
    origin: Literal["opened", "forked", "resumed"] = "opened"
    claimed = 0
    started = False
    #: Tokens it had computed, of those it still knows, when it was suspended since it last computed any.
    had = 0
    _computed = 0
    _output = _NO_OUTPUT

    def __init__(self, layout: Layout, scope: Scope, slot: int, prompt: IntArray) -> None:
        self.layout = layout
        self.scope = scope
        #: Row in every table, until the sequence is closed.
        self.slot = slot
        self.prompt = prompt
        #: Tokens whose ids are known, computed or not.
        self.known = self.prompt_length = len(prompt)
        #: For the manager: single runs in flight by step id, and snapshots not published yet, by position.
        self.flights: list[int] = []
        self.snapshots: dict[int, list[int]] = {}

    @property
    def tokens(self) -> IntArray:
        """int32 ``[known]``: the prompt and everything given to ``extend``. Do not write to it."""
        return self.tokens_from(0)

    def tokens_from(self, start: int) -> IntArray:
        """The known tokens from position ``start`` on; a view where they lie in one piece."""
        if self.known == self.prompt_length:
            return self.prompt[start:]
        output = self._output[: self.known - self.prompt_length]
        if start >= self.prompt_length:
            return output[start - self.prompt_length :]
        return np.concatenate((self.prompt[start:], output))

    @property
    def computed(self) -> int:
        """Tokens whose rows are written."""
        batch = self.batch
        if batch is None:
            return self._computed
        return self._computed + max(0, min(batch.ticks, self.left_tick) - self.joined_tick)

    @property
    def scheduled(self) -> int:
        """Tokens whose rows are written when all steps in flight are completed, drafts of theirs included."""
        batch = self.batch
        if batch is None:
            return self._computed + self.ahead
        return self._computed + min(batch.started, self.left_tick) - self.joined_tick

    @property
    def in_flight(self) -> bool:
        """Is a committed step with this sequence not completed yet?"""
        return self.scheduled != self.computed

    @property
    def has_left(self) -> bool:
        """Did the sequence leave its batch while a step was in flight?"""
        return self.left_tick != _NEVER

    @property
    def suspended(self) -> bool:
        """Are its pages given up, until ``manager.resume``?"""
        return self.suspended_at >= 0

    @property
    def loadable(self) -> int:
        """Tokens it could have without computing them if ``manager.load`` brought them up; ``computed`` if no more."""
        return self.computed if self.below is None else max(self.computed, self.below.length)

    @property
    def loading(self) -> bool:
        """Is content on its way up? Then nothing can be planned for it until ``manager.poll`` has taken that in."""
        return self.below is not None and self.below.loading

    @property
    def committed(self) -> int:
        """Tokens that are both known and computed: what others may reuse."""
        return min(self.known, self.computed)

    @property
    def reserved(self) -> int:
        """Tokens for which pages are allocated."""
        return max(self.block_count * self.layout.block_tokens, self.computed)

    def next_end(self, limit: int) -> int:
        """Where the next prefill chunk should end: the largest position up to ``limit`` that does not pass one at which
        a snapshot of the states is to be taken. A chunk that passes it is computed all the same, and others resume
        earlier."""
        scheduled = self.scheduled
        for end in self.chunk_ends:
            if end > scheduled:
                return min(end, limit)
        return limit

    def shorten(self, known: int) -> None:
        """For the manager: forget the token ids from position ``known`` on."""
        if known < self.prompt_length:
            self.prompt = self.prompt[:known]
            self.prompt_length = known
        # A new array: the prefix index may keep the old one.
        self._output = self._output[: known - self.prompt_length].copy()
        self.known = known
        self.had = min(self.had, known)

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Make more token ids known, e.g. sampled ones. Copies them; cheap; not tied to any step.

        Raises RequestError for ids outside the vocabulary, StateError on a closed sequence.
        """
        if self.closed:
            raise StateError("extend() on a closed sequence")
        added = as_tokens(tokens, self.layout.spec.vocab_size)
        length = self.known - self.prompt_length
        end = length + len(added)
        if end > len(self._output):
            grown = np.empty(max(end, 2 * length), np.int32)
            grown[:length] = self._output[:length]
            self._output = grown
        self._output[length:end] = added
        self.known += len(added)

    def advance(self, count: int) -> None:
        """For the manager: ``count`` more rows are written."""
        self._computed += count

    def rebase(self, computed: int) -> None:
        """For the manager: leave any batch with ``computed`` rows written."""
        self.batch = None
        self.left_tick = _NEVER
        self._computed = computed

    def settle(self) -> None:
        """For the manager: forget a batch that was left, once its last step with this sequence is completed."""
        if self.batch is not None and self.left_tick <= self.batch.ticks:
            self.rebase(self.computed)

    def blocks_for(self, length: int) -> int:
        return ceil_div(length, self.layout.block_tokens)


def as_tokens(tokens: npt.ArrayLike, vocab_size: int | None) -> npt.NDArray[np.integer]:
    """``tokens`` as a one-dimensional integer array, perhaps the caller's own.

    Raises RequestError for other shapes, other types and ids out of range.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise RequestError("token ids are a ragged list", hint="give one flat list or array of ids") from None
    if array.ndim != 1:
        raise RequestError(f"token ids have shape {array.shape}", hint="give one flat list or array of ids")
    if not len(array):
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise RequestError(f"token ids are {array.dtype}, not integers")
    limit = vocab_size if vocab_size is not None else 2**31
    if _is_int32(array):
        # One pass instead of two: read as unsigned, a negative id is larger than any limit.
        wrong = int(np.maximum.reduce(array.view(_UINT32))) >= limit
    else:
        wrong = True
    if wrong and ((array < 0) | (array >= limit)).any():
        where = int(np.flatnonzero((array < 0) | (array >= limit))[0])
        raise RequestError(
            f"token id {array[where]} at position {where} is outside 0..{limit - 1}",
            hint="tokenize with the tokenizer of this model",
        )
    return array


def as_prompt(tokens: npt.ArrayLike, spec: CacheSpec) -> npt.NDArray[np.integer]:
    """``tokens`` as :func:`as_tokens` gives them. Raises RequestError also for none, and for too many."""
    prompt = as_tokens(tokens, spec.vocab_size)
    if not len(prompt):
        raise RequestError("the prompt is empty", hint="give at least one token")
    if spec.max_tokens is not None and len(prompt) > spec.max_tokens:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the model takes at most {spec.max_tokens}",
            hint="shorten the prompt",
        )
    return prompt


def frozen_tokens(tokens: npt.NDArray[np.integer]) -> IntArray:
    """``tokens`` itself if it is a read-only int32 array, otherwise a read-only copy."""
    if _is_int32(tokens) and not tokens.flags.writeable and tokens.flags.c_contiguous:
        return tokens
    frozen = tokens.astype(np.int32)
    frozen.flags.writeable = False
    return frozen


def _is_int32(array: npt.NDArray[np.integer]) -> TypeGuard[IntArray]:
    return array.dtype is _INT32 or array.dtype == _INT32
