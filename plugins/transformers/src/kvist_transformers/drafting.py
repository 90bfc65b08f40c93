"""Guesses at the tokens that come next: who makes them, and how many are worth a try.

A guess costs a row of the step that checks it. What is generated does not depend on guesses: the model chooses after
every row as it would have without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np

from kvist.errors import SpecError
from kvist.spec import Scope
from kvist_transformers.request import TokenArray

_NONE: TokenArray = np.empty(0, np.int32)


@attrs.frozen(eq=False)
class Draftable:
    """One request that could have drafts in the next step.

    number: its own in the engine. tokens: int32, prompt and all that was generated. scope: of its prompt. most: drafts
    wanted at most.
    """

    number: int
    tokens: TokenArray
    scope: Scope
    most: int


class Drafter(Protocol):
    """Proposes drafts. The engine that it is given to calls it, from its own thread.

    most: the longest draft it makes for one request, at least 1. vocab_size: its tokens are below it; ``None`` when it
    drafts only tokens that it was shown.
    """

    most: int
    vocab_size: int | None

    def propose(self, rows: Sequence[Draftable]) -> list[TokenArray]:
        """For each row the tokens (int32) that may come next, at most ``row.most`` of them, perhaps none."""

    def forget(self, number: int) -> None:
        """A request has ended."""

    def close(self) -> None:
        """The engine is closed. Idempotent."""


class PromptLookup:
    """Drafts what followed the same tokens earlier in the request: quotations, code that is edited, lists. Needs no
    model; the search costs microseconds per thousand tokens.

    most: longest draft. ngram: how many of the newest tokens have to occur earlier; the newest such place counts.
    look_back: tokens that are searched, at most.

    Raises SpecError for numbers below 1.
    """

    vocab_size = None

    def __init__(self, most: int = 8, *, ngram: int = 2, look_back: int = 16384) -> None:
        if min(most, ngram, look_back) < 1:
            raise SpecError(f"PromptLookup(most={most}, ngram={ngram}, look_back={look_back}) needs numbers from 1 on")
        self.most = most
        self._ngram = ngram
        self._look_back = look_back

    def propose(self, rows: Sequence[Draftable]) -> list[TokenArray]:
        return [self._after(row.tokens[-self._look_back :], row.most) for row in rows]

    def forget(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _after(self, tokens: TokenArray, most: int) -> TokenArray:
        starts = len(tokens) - self._ngram
        if starts < 1:
            return _NONE
        same = tokens[:starts] == tokens[starts]
        for offset in range(1, self._ngram):
            same &= tokens[offset : starts + offset] == tokens[starts + offset]
        places = np.flatnonzero(same)
        if not len(places):
            return _NONE
        end = int(places[-1]) + self._ngram
        return tokens[end : end + most]


class DraftLengths:
    """How many drafts each request gets: twice as many after a step in which all were right, half as many after one in
    which none was, and a rest after several of those, so that text which cannot be guessed costs little.

    most: for any request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lengths: dict[int, int] = {}
        self._rests: dict[int, tuple[int, int]] = {}

    def next(self, number: int) -> int:
        """Drafts for a request's next step; 0 while it rests."""
        left, length = self._rests.get(number, (0, 0))
        if left:
            self._rests[number] = (left - 1, length)
            return 0
        return self._lengths.setdefault(number, min(4, self._most))

    def learn(self, number: int, drafted: int, accepted: int) -> None:
        """What came of a request's drafts."""
        length = self._lengths[number]
        if accepted:
            self._rests.pop(number, None)
            if accepted == drafted:
                self._lengths[number] = min(2 * max(length, 1), self._most)
        elif length > 1:
            self._lengths[number] = length // 2
        else:
            rest = min(2 * self._rests.get(number, (0, 1))[1], 32)
            self._rests[number] = (rest, rest)

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._lengths.pop(number, None)
        self._rests.pop(number, None)
