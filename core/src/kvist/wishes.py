"""How long requests wish their blocks to stay in the cache. Soft: a wish changes who goes first, never what fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs

from kvist.errors import RequestError

#: Priorities lie between minus this and this.
MOST_PRIORITY = 10
#: Longer than any cache lives.
FOREVER = 1 << 62


@attrs.frozen
class Wish:
    """priority: from -10 to 10; 0 is what a block without a wish has, and the lowest goes first.
    lifetime_tokens: the priority counts until all requests together have had so many tokens since the block was last
    used, and is 0 then; by default it always counts.

    Raises RequestError for values out of range.
    """

    priority: int = 0
    lifetime_tokens: int = FOREVER

    def __attrs_post_init__(self) -> None:
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise RequestError(
                f"Wish(priority={self.priority}) is outside {-MOST_PRIORITY}..{MOST_PRIORITY}",
                hint="only the order of priorities matters: use fewer of them",
            )
        if self.lifetime_tokens < 1:
            raise RequestError(
                f"Wish(lifetime_tokens={self.lifetime_tokens}) must be at least 1", hint="leave the wish out"
            )


#: What a block has that nobody made a wish for.
NO_WISH = Wish()


def strongest(*wishes: Wish) -> Wish:
    """The one of the highest priority, of equal ones the longest."""
    return max(wishes, key=lambda wish: (wish.priority, wish.lifetime_tokens))


@attrs.frozen
class Wishes:
    """Of one request. Raises RequestError for an empty range, or one that begins before the prompt.

    prompt: ``(first, stop, wish)`` for token positions ``first .. stop - 1`` of the prompt, in any order. Tokens in
        several ranges have the strongest wish of them, those in none have no wish.
    output: for all tokens after the prompt.

    A block has the strongest wish of its tokens. A block that several requests share has the strongest wish of all that
    used it since it was cached, no wish being one of priority 0.
    """

    prompt: tuple[tuple[int, int, Wish], ...] = ()
    output: Wish = NO_WISH

    def __attrs_post_init__(self) -> None:
        for first, stop, _ in self.prompt:
            if not 0 <= first < stop:
                raise RequestError(f"Wishes for the tokens {first} to {stop} of a prompt: there are none")

    def by_block(self, prompt_length: int, block_tokens: int) -> ByBlock:
        """The wishes of a sequence's blocks."""
        clipped = [
            (first, min(stop, prompt_length), wish) for first, stop, wish in self.prompt if first < prompt_length
        ]
        cuts = sorted({0, prompt_length, *(end for first, stop, _ in clipped for end in (first, stop))})
        pieces = [
            (low, high, strongest(*covering) if covering else NO_WISH)
            for low, high in pairwise(cuts)
            for covering in [[wish for first, stop, wish in clipped if first <= low < stop]]
        ]
        pieces.append((prompt_length, FOREVER, self.output))
        found: list[tuple[int, Wish]] = []
        for begin in sorted(
            {block for low, _, _ in pieces for block in (low // block_tokens, -(-low // block_tokens))}
        ):
            # Between two of these blocks none begins or ends, so the first block speaks for all.
            inside, behind = begin * block_tokens, (begin + 1) * block_tokens
            wish = strongest(*(wish for low, high, wish in pieces if low < behind and inside < high))
            if not found or found[-1][1] != wish:
                found.append((begin, wish))
        return tuple(found)


#: Ascending: from this block on, this wish.
ByBlock = tuple[tuple[int, Wish], ...]


def spans(wishes: Sequence[tuple[int, Wish]], low: int, high: int) -> Iterator[tuple[int, int, Wish]]:
    """Blocks ``low .. high - 1`` as ranges of one wish each, in order; without wishes one range that has none."""
    if not wishes:
        yield low, high, NO_WISH
    for number, (begin, wish) in enumerate(wishes):
        end = wishes[number + 1][0] if number + 1 < len(wishes) else high
        if max(low, begin) < min(high, end):
            yield max(low, begin), min(high, end), wish
