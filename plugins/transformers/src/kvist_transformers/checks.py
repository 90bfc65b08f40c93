"""Which requests are refused at once, and in which words."""

from __future__ import annotations

import numpy as np

from kvist.errors import RequestError
from kvist.spec import CacheSpec
from kvist_transformers.request import Completion, Request, TokenArray


def check_request(request: Request, spec: CacheSpec) -> None:
    """Raises RequestError for an empty prompt, a token id outside the vocabulary or more tokens than the model has
    positions.
    """
    tokens = request.tokens
    if not len(tokens):
        raise RequestError("the prompt is empty", hint="send at least one token, e.g. the model's start token")
    end = np.iinfo(np.int32).max if spec.vocab_size is None else spec.vocab_size
    outside = np.flatnonzero((tokens < 0) | (tokens >= end))
    if len(outside):
        at = int(outside[0])
        raise RequestError(
            f"token id {tokens[at]} at position {at} is outside the vocabulary of {end} tokens",
            hint="tokenize with the model's own tokenizer",
        )
    # The last generated token is never fed back.
    length = len(tokens) + request.max_new_tokens - 1
    if spec.max_tokens is not None and length > spec.max_tokens:
        raise RequestError(
            f"a prompt of {len(tokens)} tokens and {request.max_new_tokens} new ones take {length} positions, "
            f"the model has {spec.max_tokens}",
            hint="shorten the prompt or lower max_new_tokens",
        )


def refused(request: Request, error: Exception) -> Completion:
    """The completion of a request that never ran."""
    return Completion(-1, len(request.tokens), np.zeros(0, np.int32), "error", 0, 0, error=error)


def check_given(request: Request, given: TokenArray) -> None:
    """Raises RequestError unless a request that was ``given`` these tokens elsewhere has begun and not ended."""
    left = request.max_new_tokens - len(given)
    if not len(given) or left < 1 or not request.stop_token_ids.isdisjoint(given.tolist()):
        raise RequestError(
            f"adopt() of a request with {len(given)} of {request.max_new_tokens} tokens, which has "
            f"{'ended' if len(given) else 'not begun'}",
            hint="adopt what prefill() ended as 'moved', with the tokens of its completion",
        )
