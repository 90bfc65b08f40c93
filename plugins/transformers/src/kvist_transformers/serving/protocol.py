"""The bodies of requests. Fields that are not here are ignored, but those that would change the answer are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvist.wishes import MOST_PRIORITY
from kvist_transformers.request import MOST_LOGPROBS
from kvist_transformers.serving.errors import ApiError

#: Choices of one request.
MOST_CHOICES = 128
#: Strings that may end an answer.
MOST_STOPS = 16
#: Longest answer where a chat request names no limit.
CHAT_TOKENS = 1024

_Token = Annotated[int, Field(strict=True)]


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk without choices says how many tokens there were."""

    include_usage: bool = False


class Body(BaseModel):
    """What both kinds of requests have.

    top_k, stop_token_ids, ignore_eos, cache_salt and priority are not OpenAI's: the ``top_k`` most likely tokens are
    drawn from, 0 for all; ``stop_token_ids`` end the answer as the model's own do, unless ``ignore_eos``; requests
    share what is cached only with requests of equal ``cache_salt``; a higher ``priority`` goes first.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: str | list[str] | None = None
    stop_token_ids: list[_Token] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)

    @property
    def choice_count(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Strings that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Is a chunk about usage to be streamed?"""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises ApiError for what is well formed but not served here."""
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise ApiError(400, f"stop: at most {MOST_STOPS} strings, none of them empty", param="stop")
        for name, neutral in _NOT_SERVED.items():
            value = (self.model_extra or {}).get(name)
            if value and value != neutral:
                raise ApiError(
                    400, f"{name}: not served here", code="unsupported_value", param=name, hint="leave the field out"
                )


#: Fields that change an answer and are not served, with the value beside null and 0 that asks for nothing.
_NOT_SERVED: dict[str, Any] = {
    "best_of": 1,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "audio": None,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "min_p": 0,
    "min_tokens": 0,
}


class CompletionBody(Body):
    """Of ``/v1/completions``. logprobs: alternatives beside each token. echo: the prompt's text comes first."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or tokens."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list))
        return list(prompt) if several else [prompt]

    def check(self) -> None:
        super().check()
        if not self.prompts:
            raise ApiError(400, "prompt: an empty list", param="prompt", hint="send at least one prompt")
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400,
                "echo with logprobs: a prompt's logarithms are not served",
                param="echo",
                hint="leave one out",
            )


class Message(BaseModel):
    """One message of a chat. Parts of its content must be text."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """What chat templates expect. Raises ApiError for parts that are not text."""
        content = self.content
        if isinstance(content, list):
            for part in content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ApiError(
                        400, f"messages: a part of type {part.get('type')!r} is not served here", param="messages"
                    )
            content = "".join(part["text"] for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(Body):
    """Of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs", param="top_logprobs", hint="set logprobs to true")


Kind = Literal["completion", "chat"]
