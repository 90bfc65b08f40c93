"""Text from tokens as they come: whole characters only, and nothing beyond a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: What decoders put where bytes are no character, or not yet.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
#: Tokens of the prompt that the first generated ones are decoded with, for decoders that drop a leading space.
_CONTEXT_TOKENS = 8

Decode = Callable[[list[int]], str]


def decoder(tokenizer: Any) -> Decode:
    """Text of tokens without special ones, and without the clean-up that would change text already given out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one sequence, piece by piece. What all pieces give together is what ``decode`` gives for all tokens,
    but for bytes at the end that are no whole character."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # Tokens that are decoded together, the first ``_read`` of which only as context; ``_given`` is out already.
        self._window = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._read = len(self._window)
        self._given = decode(self._window).rstrip(_UNKNOWN) if self._window else ""

    def push(self, token: int) -> str:
        """What one more token adds; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_UNKNOWN)
        if len(whole) <= len(self._given):
            return ""
        piece = whole[len(self._given) :]
        if len(whole) == len(text):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._given = self._decode(self._window)
        else:
            self._given = whole
        return piece


class StopStrings:
    """Cuts text before the first of some strings, wherever the pieces begin and end."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """What is certain to come before every stop string. Empty once one is found."""
        if not self._stops or self.found:
            return "" if self.found else piece
        text = self._held + piece
        at = min((index for index in map(text.find, self._stops) if index >= 0), default=-1)
        if at >= 0:
            self.found, self._held = True, ""
            return text[:at]
        keep = next(
            (
                count
                for count in range(min(self._longest - 1, len(text)), 0, -1)
                if any(stop.startswith(text[-count:]) for stop in self._stops)
            ),
            0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
