"""What a caller asks for and gets back."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import RequestError
from kvist.spec import Scope
from kvist.wishes import Wishes

TokenArray = npt.NDArray[np.int32]

#: Alternatives of which a request may ask the probability.
MOST_LOGPROBS = 20

#: Why a request ended; ``"moved"``: it goes on in another process.
FinishReason = Literal["stop", "length", "cancelled", "error", "moved"]


@attrs.frozen
class Sampling:
    """How to choose the next token. The default is greedy.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the ``top_k`` most likely tokens; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities sum to at least ``top_p``, after top_k.
    seed: with a seed, a request samples the same tokens alone and in any batch; ``None`` draws a seed.

    Raises RequestError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise RequestError(f"top_k={self.top_k} must be 0 (all tokens) or positive")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p} must be in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _token_array(tokens: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise RequestError(
            f"a prompt is a flat sequence of token ids, got an array of shape {array.shape} and dtype {array.dtype}",
            hint="tokenize the text first, and pass one request per prompt",
        )
    if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
        worst = int(array.max()) if array.max() > np.iinfo(np.int32).max else int(array.min())
        raise RequestError(f"token id {worst} does not fit 32 bits")
    return np.array(array, dtype=np.int32)


@attrs.frozen
class Request:
    """One prompt to continue.

    tokens: token ids of the prompt, not empty.
    max_new_tokens: most tokens to generate, at least 1.
    stop_token_ids: generation ends with the first of these; it is part of the output, as in transformers.
    scope: what beside the tokens makes content different; requests share prefixes only within equal scopes.
    logprobs: with each token give the logarithm of its probability and of so many alternatives, at most
        ``MOST_LOGPROBS``; ``None`` gives none.
    priority: from -10 to 10; a higher one goes first, as if it had come earlier.
    wishes: how long its tokens should stay in the cache.

    Raises RequestError for tokens that are not a flat sequence of ints, a bad ``max_new_tokens`` or ``logprobs``.
    """

    tokens: TokenArray = attrs.field(converter=_token_array, eq=attrs.cmp_using(np.array_equal))
    max_new_tokens: int = 64
    sampling: Sampling = attrs.field(factory=Sampling)
    stop_token_ids: frozenset[int] = attrs.field(default=frozenset(), converter=frozenset)
    scope: Scope = attrs.field(factory=Scope)
    priority: int = 0
    wishes: Wishes | None = None
    logprobs: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise RequestError(f"logprobs={self.logprobs} must be in 0 .. {MOST_LOGPROBS}")


@attrs.frozen
class Completion:
    """What a request gave.

    tokens: int32, the generated ids, including the stop token that ended it.
    reused_tokens: prompt tokens whose rows were already in the cache when the request first ran.
    computed_tokens: prompt tokens that were computed, recomputation after a pause included.
    pauses: how often the request lost its pages, to others or to a step that failed, and was recomputed.
    error: what went wrong where ``finish_reason`` is ``"error"``.
    """

    request_id: int
    prompt_tokens: int
    tokens: TokenArray
    finish_reason: FinishReason
    reused_tokens: int
    computed_tokens: int
    pauses: int = 0
    error: Exception | None = None


def draw_seed(sampling: Sampling) -> int:
    """The request's 64-bit seed."""
    return secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64)
