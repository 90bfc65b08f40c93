"""OpenAI's objects, whole and in chunks, from the pieces of a generation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from kvist_transformers.serving.generation import Piece, TokenInfo, Usage
from kvist_transformers.serving.text import Decode


class Form(Protocol):
    """What one kind of answer looks like."""

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Chunks that come before the first piece of ``count`` choices."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A piece as a chunk."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, where it is wanted."""

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """The answer in one, from all pieces of each choice."""


@attrs.define
class _Answer:
    """What both forms share. text_of: of single tokens, special ones included."""

    model: str
    text_of: Decode
    object_name: str = ""
    prefix: str = ""
    id: str = attrs.field(init=False)
    created: int = attrs.field(init=False, factory=lambda: int(time.time()))

    def __attrs_post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def _object(self, name: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        body = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return body if usage is None else {**body, "usage": usage.as_json()}


@attrs.define
class CompletionForm(_Answer):
    """``/v1/completions``. echoes: for each choice the text that comes before the answer."""

    echoes: Sequence[str] = ()
    prefix: str = "cmpl"

    def opening(self, count: int) -> list[dict[str, Any]]:
        pieces = [Piece(index, "", [], None) for index in range(count) if self.echoes]
        return [self._object("text_completion", [self._choice([piece], self.echoes[piece.index])]) for piece in pieces]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._object("text_completion", [self._choice([piece])])

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._object("text_completion", [], usage)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        echoes = self.echoes or [""] * len(choices)
        return self._object("text_completion", list(map(self._choice, choices, echoes)), usage)

    def _choice(self, pieces: Sequence[Piece], echo: str = "") -> dict[str, Any]:
        infos = [info for piece in pieces for info in piece.tokens]
        return {
            "index": pieces[-1].index,
            "text": echo + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(infos) if infos else None,
            "finish_reason": pieces[-1].reason,
        }

    def _logprobs(self, infos: Sequence[TokenInfo]) -> dict[str, Any]:
        return {
            "tokens": [self.text_of([info.token]) for info in infos],
            "token_logprobs": [info.logprobs.logprob for info in infos],
            # The chosen token is always among them, the likeliest of those that are spelled alike.
            "top_logprobs": [
                {
                    self.text_of([token]): value
                    for token, value in [(info.token, info.logprobs.logprob), *reversed(info.logprobs.top)]
                }
                for info in infos
            ],
            "text_offset": [info.offset for info in infos],
        }


@attrs.define
class ChatForm(_Answer):
    """``/v1/chat/completions``."""

    prefix: str = "chatcmpl"

    def opening(self, count: int) -> list[dict[str, Any]]:
        choices = [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for index in range(count)
        ]
        return [self._object("chat.completion.chunk", [choice]) for choice in choices]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.reason,
        }
        return self._object("chat.completion.chunk", [choice])

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._object("chat.completion.chunk", [], usage)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        made = [
            {
                "index": pieces[-1].index,
                "message": {
                    "role": "assistant",
                    "content": "".join(piece.text for piece in pieces),
                    "refusal": None,
                },
                "logprobs": self._logprobs([info for piece in pieces for info in piece.tokens]),
                "finish_reason": pieces[-1].reason,
            }
            for pieces in choices
        ]
        return self._object("chat.completion", made, usage)

    def _logprobs(self, infos: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not infos:
            return None
        content = [
            {
                **self._token(info.token, info.logprobs.logprob),
                "top_logprobs": [self._token(token, value) for token, value in info.logprobs.top],
            }
            for info in infos
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text_of([token])
        # A part of a character has no text of its own.
        known = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}
