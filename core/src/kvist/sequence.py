"""One request's view: its tokens, its lengths, and its row in every group's page table."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import RequestError, StateError
from kvist.layout import Layout
from kvist.prefix.extent import Extent
from kvist.prefix.tree import Cursor
from kvist.spec import CacheSpec, Scope, ceil_div
from kvist.step import NO_PAGE, IntArray

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

    def release(self, slot: int, block_count: int) -> None:
        """Give a slot back whose first ``block_count`` entries were used."""
        for array in self.arrays:
            array[slot, :block_count] = NO_PAGE
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


_INT32 = np.dtype(np.int32)
_NO_OUTPUT: IntArray = np.empty(0, np.int32)


@attrs.frozen(eq=False)
class Partial:
    """A leased block whose first rows the sequence's next step copies into a page of its own.

    pages: page per group, NO_PAGE where the group needs none. extent: where the block is published.
    """

    sequence: Sequence
    pages: list[int]
    extent: Extent


class Sequence:
    """Made by ``manager.open``; only the manager changes its lengths and pages.

    ``committed <= computed <= reserved``: tokens whose ids are known and whose rows are final, tokens whose rows are
    written, and tokens for which there are pages.
    """

    __slots__ = (
        "_computed",
        "_output",
        "batch",
        "block_count",
        "closed",
        "closing",
        "cursor",
        "in_flight",
        "joined_tick",
        "known",
        "layout",
        "partial",
        "prompt",
        "prompt_length",
        "published",
        "reused",
        "scope",
        "slot",
        "started",
        "tip",
    )

    def __init__(self, layout: Layout, scope: Scope, slot: int, prompt: IntArray) -> None:
        self.layout = layout
        self.scope = scope
        #: Row in every table, until the sequence is closed.
        self.slot = slot
        self.prompt = prompt
        self.prompt_length = len(prompt)
        #: Tokens whose ids are known, computed or not.
        self.known = len(prompt)
        self._output = _NO_OUTPUT
        self._computed = 0
        #: Tokens taken from the prefix index when the sequence was opened.
        self.reused = 0
        #: Blocks that have a page, or had one until the group dropped it.
        self.block_count = 0
        self.published = 0
        #: The deepest extent that the sequence claimed or published, and where its next publication continues.
        self.tip: Extent | None = None
        self.cursor: Cursor | None = None
        self.partial: Partial | None = None
        self.batch: DecodeBatch | None = None
        self.joined_tick = 0
        self.in_flight = False
        self.closing = False
        self.closed = False
        self.started = False

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
        return self._computed if batch is None else self._computed + batch.ticks - self.joined_tick

    @property
    def committed(self) -> int:
        """Tokens that are both known and computed: what others may reuse."""
        return min(self.known, self.computed)

    @property
    def reserved(self) -> int:
        """Tokens for which pages are allocated."""
        return max(self.block_count * self.layout.block_tokens, self.computed)

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
        self._computed = computed

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
        wrong = int(array.view(np.uint32).max()) >= limit if array.flags.c_contiguous else True
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
