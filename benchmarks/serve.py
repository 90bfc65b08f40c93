"""A chat service on a real model beside vLLM on a CPU and transformers' own batching: same weights, dtype, threads.

Conversations of two turns share a system prompt of about 450 tokens; 1, 8 or 32 of them run at a time. Every turn gets
32 new tokens, greedily; what is counted is new tokens by the time of both turns, prompts included. Each run has another
system prompt, so that a cache knows nothing of it before. Engines take turns and run alone; vLLM is in its own
process, compiled, with its own choices (`benchmarks/peers/vllm_engine.py`). `serve.second_turn_ttft` is the time from
the second question to its first token, in a single conversation; `serve.over_generate_batch` has 8 at a time. Kvist
runs as `kvist serve` does, without HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import attrs
import harness
from peers.setup import DEFAULT_FOLDER, HERE, python_of
from records import Figure, paired, without_peer

CONCURRENCY = (1, 8, 32)
FIGURES = (
    "serve.over_vllm_cpu_1",
    "serve.over_vllm_cpu_8",
    "serve.over_vllm_cpu_32",
    "serve.over_generate_batch",
    "serve.second_turn_ttft",
)
VLLM, GENERATE_BATCH = "vLLM-CPU", "transformers generate_batch"
DTYPE, NEW_TOKENS, MAX_SEQUENCES, MAX_TOKENS = "bfloat16", 32, 64, 2048
_DRIVER = HERE / "vllm_engine.py"


class Engine(Protocol):
    """Whatever answers."""

    def answer(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, and the seconds that all of them took together."""


class KvistEngine:
    """Kvist, in this process."""

    def __init__(self, model: Any) -> None:
        from kvist_transformers import Engine

        self._engine = Engine(model, memory="1GiB", max_sequences=MAX_SEQUENCES, pack_weights=True)

    def answer(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        from kvist_transformers import Request

        begin = time.perf_counter()
        completions = self._engine.generate([Request(prompt, max_new_tokens=new_tokens) for prompt in prompts])
        seconds = time.perf_counter() - begin
        return [completion.tokens.tolist() for completion in completions], seconds


class GenerateBatch:
    """transformers' continuous batching with prefix sharing, in this process on a model of its own."""

    def __init__(self, model: Any) -> None:
        from kvist_transformers.peers import GenerateBatchPeer, Limits

        # A token that no answer has: nothing ends early.
        limits = Limits(NEW_TOKENS, stop_token_id=model.config.vocab_size - 1, cache_tokens=32 * 1024)
        self._peer = GenerateBatchPeer(model, limits)

    def answer(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        assert new_tokens == NEW_TOKENS
        begin = time.perf_counter()
        answers = self._peer.answer(prompts)
        return answers, time.perf_counter() - begin

    def close(self) -> None:
        self._peer.close()


class VllmEngine:
    """vLLM in its own process and environment. Raises RuntimeError with its last words when it ends."""

    def __init__(self, folder: str, threads: int) -> None:
        how = {
            "model": folder,
            "dtype": DTYPE,
            "threads": threads,
            "max_sequences": MAX_SEQUENCES,
            "max_tokens": MAX_TOKENS,
        }
        python = os.environ.get("KVIST_PEERS_PYTHON") or python_of(DEFAULT_FOLDER)
        self._process = subprocess.Popen(
            [python, _DRIVER, json.dumps(how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if sys.stderr.isatty() else None,
            text=True,
        )
        self.versions = self._read()

    def answer(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        return reply["answers"], reply["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with exit code {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@attrs.frozen
class Chat:
    """The workload as token ids."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def first(self, run: int, count: int) -> list[list[int]]:
        """First turns of ``count`` conversations; ``run`` makes the system prompt another one."""
        from kvist_transformers.workload import SYSTEM, WAVES

        system = self.encode(f"<|im_start|>system\nNotice {run}. {' '.join(SYSTEM.split())}<|im_end|>\n")
        texts = [turn.text for turn in WAVES[0]]
        return [[*system, *self._question(f"({n}) {texts[n % len(texts)]}")] for n in range(count)]

    def second(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
        """Their second turns, after the answers that the engine itself gave."""
        from kvist_transformers.workload import WAVES

        texts, end = [turn.text for turn in WAVES[1]], self.encode("<|im_end|>\n")
        return [
            [*prompt, *answer, *end, *self._question(texts[n % len(texts)])]
            for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def _question(self, text: str) -> list[int]:
        return self.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def converse(self, engine: Engine, run: int, count: int) -> float:
        """Seconds per new token of ``count`` conversations at a time."""
        prompts = self.first(run, count)
        answers, first = engine.answer(prompts, NEW_TOKENS)
        more, second = engine.answer(self.second(prompts, answers), NEW_TOKENS)
        return (first + second) / sum(map(len, [*answers, *more]))

    def second_ttft(self, engine: Engine, run: int) -> float:
        """Seconds to the first token of a second turn."""
        prompts = self.first(run, 1)
        answers, _ = engine.answer(prompts, NEW_TOKENS)
        return engine.answer(self.second(prompts, answers), 1)[1]


@contextlib.contextmanager
def _vllm(folder: str, threads: int) -> Iterator[VllmEngine | str]:
    """The peer, or why it is not there."""
    if not (os.environ.get("KVIST_PEERS_PYTHON") or python_of(DEFAULT_FOLDER).exists()):
        yield "run benchmarks/peers/setup.py"
        return
    harness.progress("serve: starting vLLM, which compiles the model the first time")
    try:
        engine = VllmEngine(folder, threads)
    except RuntimeError as error:
        yield str(error)
        return
    with engine:
        yield engine


def _per_second(seconds: float) -> float:
    return 1 / seconds


def _milliseconds(seconds: float) -> float:
    return 1e3 * seconds


def measure(options: argparse.Namespace) -> list[Figure]:
    # Threads that wait for each other must not spin while another engine runs. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    import torch

    from kvist_transformers import models
    from kvist_transformers.peers import quiet

    with quiet():
        folder = models.prepare()
        ours = KvistEngine(models.load_model(folder, DTYPE))
        theirs = GenerateBatch(models.load_model(folder, DTYPE))
    chat = Chat(models.load_tokenizer(folder))
    rounds = 1 if options.quick else 5
    figures: list[Figure] = []
    numbers = iter(range(1, 1 << 20))

    def turns(what: str, peer: Any, run: Any) -> tuple[list[float], list[float]]:
        """Interleaved runs after one of each that does not count. Who begins changes from round to round."""
        taken: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            harness.progress(f"serve: {what}, round {number} of {rounds}")
            pair = [(ours, 0), (peer, 1)] if number % 2 else [(peer, 1), (ours, 0)]
            for engine, which in pair if peer is not None else [(ours, 0)]:
                seconds = run(engine, next(numbers))
                if number:
                    taken[which].append(seconds)
        return taken

    def figure(
        name: str, unit: str, scale: Any, taken: tuple[list[float], list[float]], peer: str, **more: Any
    ) -> Figure:
        # The ratio is one of times; the values are shown in the unit.
        why = more.pop("why", "")
        made = (
            paired(name, unit, taken[0], peer, taken[1], **more)
            if taken[1]
            else without_peer(name, unit, taken[0], peer, why, **more)
        )
        return attrs.evolve(
            made,
            value=scale(made.value),
            peer_value=None if made.peer_value is None else scale(made.peer_value),
        )

    with _vllm(str(folder), torch.get_num_threads()) as found:
        peer, why = (None, found) if isinstance(found, str) else (found, "")
        for count in CONCURRENCY:
            taken = turns(
                f"{count} at a time", peer, lambda engine, run, count=count: chat.converse(engine, run, count)
            )
            name = f"serve.over_vllm_cpu_{count}"
            figures.append(figure(name, "tokens/s", _per_second, taken, VLLM, target=1.0, why=why))
        ttft = turns("second turns", peer, chat.second_ttft)
    taken = turns("8 at a time", theirs, functools.partial(chat.converse, count=8))
    theirs.close()
    figures.append(figure("serve.over_generate_batch", "tokens/s", _per_second, taken, GENERATE_BATCH, target=2.0))
    figures.append(
        figure("serve.second_turn_ttft", "ms", lambda seconds: 1e3 * seconds, ttft, VLLM, target=1.0, why=why)
    )
    return figures


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
