"""The engines that the demo runs side by side: Kvist, and transformers' own two ways of generating.

Each answers one wave of prompts at a time, so that all of them work through the same turns in the same order.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs
import torch

from kvist_transformers.engine import Engine
from kvist_transformers.request import Request


@attrs.frozen
class Limits:
    """How the engines may run: the same for all."""

    max_new_tokens: int
    stop_token_id: int
    max_batch_tokens: int = 512
    cache_tokens: int = 4096


class Peer(Protocol):
    """One engine over one run of the workload."""

    def answer(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """New tokens of each prompt of a wave, including the stop token where one ended it."""


class KvistPeer:
    """Kvist. reused, computed and times are in the engine's stats."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self._limits = limits
        #: Reused prompt tokens of each request, in order.
        self.reused: list[int] = []

    def answer(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """All prompts at once; the engine batches them."""
        stop = frozenset({self._limits.stop_token_id})
        requests = [
            Request(prompt, max_new_tokens=self._limits.max_new_tokens, stop_token_ids=stop) for prompt in prompts
        ]
        completions = self.engine.generate(requests)
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        self.reused += [completion.reused_tokens for completion in completions]
        return [completion.tokens.tolist() for completion in completions]


class GeneratePeer:
    """``model.generate`` with its default cache, one prompt after the other."""

    def __init__(self, model: Any, limits: Limits) -> None:
        self._model = model
        self._limits = limits

    def answer(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Padding would change the rounding, so prompts are not batched."""
        return [self._one(prompt) for prompt in prompts]

    def _one(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._limits.max_new_tokens,
                do_sample=False,
                eos_token_id=self._limits.stop_token_id,
                pad_token_id=self._limits.stop_token_id,
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


class GenerateBatchPeer:
    """transformers' continuous batching with block sharing, kept alive over the waves so that it can reuse prefixes.

    Settings are the best measured on a CPU: ``sdpa``, pages of 16 tokens, no double buffering.
    """

    def __init__(self, model: Any, limits: Limits) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._limits = limits
        self._stack = contextlib.ExitStack()
        generation = GenerationConfig(
            max_new_tokens=limits.max_new_tokens,
            do_sample=False,
            eos_token_id=limits.stop_token_id,
            pad_token_id=limits.stop_token_id,
        )
        batching = ContinuousBatchingConfig(
            page_size=16,
            num_blocks=limits.cache_tokens // 16,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=64,
            allow_block_sharing=True,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        self._manager = self._stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=batching, block=True, timeout=5, warmup=False
            )
        )

    def answer(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """All prompts at once. Raises RuntimeError when the peer fails, with its own error."""
        names = self._manager.add_requests(inputs=list(prompts), max_new_tokens=self._limits.max_new_tokens)
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"generate_batch failed: {result.error}")
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("generate_batch stopped before it answered every prompt")
        return [found[name] for name in names]

    def close(self) -> None:
        """Stop its thread."""
        self._stack.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without warnings and progress bars."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        hf_logging.enable_progress_bar()
        hf_logging.set_verbosity(verbosity)


def timed_answer(peer: Peer, prompts: Sequence[list[int]]) -> tuple[list[list[int]], float]:
    """The answers and the seconds they took."""
    begin = time.perf_counter()
    answers = peer.answer(prompts)
    return answers, time.perf_counter() - begin
