"""Tokens of what clients send, and the requests of the engine that are made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jinja2
import numpy as np

from kvist.spec import Scope
from kvist_transformers.checks import check_request
from kvist_transformers.engine import Engine
from kvist_transformers.request import Request, Sampling
from kvist_transformers.serving.errors import ApiError
from kvist_transformers.serving.protocol import CHAT_TOKENS, Body, ChatBody, CompletionBody

#: What a completion without ``max_tokens`` gets, as with OpenAI.
COMPLETION_TOKENS = 16


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """What ends an answer of the model, by its generation config, its config and its tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(found)


class Prompts:
    """Makes requests. Tokenizes in a thread of its own, so that a long prompt holds nobody up.

    ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, engine: Engine, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._ends = ends
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvist-tokenizer")

    async def of_completion(self, body: CompletionBody) -> list[list[int]]:
        """Tokens of each prompt."""
        texts = body.prompts
        return [await self._tokens(text) if isinstance(text, str) else text for text in texts]

    async def of_chat(self, body: ChatBody) -> list[int]:
        """The conversation in the model's template, with the beginning of an answer."""
        messages = [message.as_template_input() for message in body.messages]
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(
                400, "this model's tokenizer has no chat template", param="messages", hint="use /v1/completions"
            )
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ApiError(
                400,
                f"messages: the model's chat template refuses them: {error}",
                code="invalid_value",
                param="messages",
            ) from error
        # Templates write the special tokens themselves.
        return await self._tokens(text, add_special_tokens=False)

    async def _tokens(self, text: str, **how: bool) -> list[int]:
        loop = asyncio.get_running_loop()
        try:
            return list(await loop.run_in_executor(self._thread, lambda: self._tokenizer(text, **how).input_ids))
        except UnicodeError as error:
            raise ApiError(400, f"the text is not Unicode: {error}", code="invalid_value") from error

    def requests(self, body: Body, prompt: Sequence[int], max_tokens: int, logprobs: int | None) -> list[Request]:
        """One for each choice. Raises what ``engine.submit`` would raise, which nobody has to wait for."""
        # Of equal seeds all choices would be equal.
        base = Request(
            np.asarray(prompt),
            max_new_tokens=max_tokens,
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=body.top_k or 0,
                top_p=1.0 if body.top_p is None else body.top_p,
                seed=body.seed,
            ),
            stop_token_ids=frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self._ends),
            scope=Scope(salt=body.cache_salt or ""),
            priority=body.priority,
            logprobs=logprobs,
        )
        check_request(base, self._engine.spec)
        self._engine.layout.require_fit(len(base.tokens) + max_tokens - 1)
        if body.seed is None:
            return [base] * body.choice_count
        return [
            attrs.evolve(base, sampling=attrs.evolve(base.sampling, seed=body.seed + number))
            for number in range(body.choice_count)
        ]

    def room(self, prompt_tokens: int) -> int:
        """Longest answer to a chat that names no limit: what the model's positions and the cache leave."""
        limit = self._engine.spec.max_tokens
        room = CHAT_TOKENS if limit is None else min(CHAT_TOKENS, limit - prompt_tokens + 1)
        while room > 1 and not self._engine.layout.fits(prompt_tokens + room - 1):
            room //= 2
        return max(room, 1)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
