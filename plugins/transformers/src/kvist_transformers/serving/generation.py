"""Answers being generated: the updates of some requests become text, logarithms and reasons to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Literal

import attrs

from kvist_transformers.request import Request
from kvist_transformers.sampling import TokenLogprobs
from kvist_transformers.serving.errors import ApiError
from kvist_transformers.serving.text import Decode, Detokenizer, StopStrings
from kvist_transformers.serving.worker import Ticket, Update, Worker


@attrs.frozen
class TokenInfo:
    """A generated token: its id, where its text begins in the answer, and its logarithms."""

    token: int
    offset: int
    logprobs: TokenLogprobs


@attrs.frozen
class Piece:
    """More of one choice. ``tokens`` only where logarithms are wanted; ``reason`` with the last piece."""

    index: int
    text: str
    tokens: list[TokenInfo]
    reason: Literal["stop", "length"] | None


@attrs.define
class Usage:
    """Tokens of all choices. A prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice:
    """One answer to one prompt. ``counts_prompt``: are the prompt's tokens counted with this choice?"""

    def __init__(self, index: int, request: Request, decode: Decode, stops: Sequence[str], counts_prompt: bool) -> None:
        self.index = index
        self.request = request
        self.counts_prompt = counts_prompt
        self.ended = False
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._text = Detokenizer(decode, request.tokens.tolist())
        self._stops = StopStrings(stops)
        self._length = 0
        self._infos: list[TokenInfo] = []

    def take(self, update: Update) -> Piece | None:
        """What an update adds; ``None`` while nothing can be told. Raises what ended the request without a result."""
        if update.error is not None:
            raise update.error
        self.cached_tokens = update.reused_tokens
        parts = []
        for number, token in enumerate(update.tokens):
            self.completion_tokens += 1
            if update.logprobs:
                self._infos.append(TokenInfo(token, self._length, update.logprobs[number]))
            if token in self.request.stop_token_ids:
                continue
            text = self._text.push(token)
            self._length += len(text)
            parts.append(self._stops.push(text))
            if self._stops.found:
                break
        reason: Literal["stop", "length"] | None = None
        completion = update.completion
        if self._stops.found:
            reason = "stop"
        elif completion is not None:
            if completion.error is not None:
                raise completion.error
            if completion.finish_reason not in ("stop", "length"):
                raise ApiError(503, "the request was cancelled", code="cancelled", hint="the server is shutting down")
            parts.append(self._stops.finish())
            reason = completion.finish_reason
        self.ended = reason is not None
        text = "".join(parts)
        if not text and reason is None:
            return None
        infos, self._infos = self._infos, []
        return Piece(self.index, text, infos, reason)


class Generation:
    """All choices of one HTTP request, in the worker from :meth:`begin` on.

    noted: told of every update.

    ``async for`` gives their pieces as they come, and raises what ends one of them. :meth:`close` in any case.
    """

    def __init__(self, worker: Worker, choices: Sequence[Choice], noted: Callable[[Update], None]) -> None:
        self.choices = choices
        self._worker = worker
        self._noted = noted
        self._tickets: list[Ticket] = []
        self._updates: asyncio.Queue[tuple[Choice, Update]] = asyncio.Queue()

    def begin(self) -> None:
        """Queue the requests. Raises EngineError when the engine is broken."""
        for choice in self.choices:
            self._tickets.append(self._worker.submit(choice.request, partial(self._receive, choice)))

    def _receive(self, choice: Choice, update: Update) -> None:
        self._noted(update)
        self._updates.put_nowait((choice, update))

    async def __aiter__(self) -> AsyncIterator[Piece]:
        left = len(self.choices)
        while left:
            choice, update = await self._updates.get()
            if choice.ended:
                continue
            piece = choice.take(update)
            if choice.ended:
                left -= 1
                if not update.last:
                    # A stop string: the engine does not know them.
                    self._worker.cancel(self._tickets[self.choices.index(choice)])
            if piece is not None:
                yield piece

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    @property
    def usage(self) -> Usage:
        """So far."""
        usage = Usage()
        for choice in self.choices:
            usage.completion_tokens += choice.completion_tokens
            if choice.counts_prompt:
                usage.prompt_tokens += len(choice.request.tokens)
                usage.cached_tokens += choice.cached_tokens
        return usage
