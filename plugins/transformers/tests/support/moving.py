"""A process with an engine of a tiny model of any family, that computes prompts for another one or goes on with its."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
import zlib
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kvist.registry import default_registry
from kvist.step import NO_PAGE, IntArray
from kvist.transfer.outcome import Patience
from kvist.transfer.transport import TransportContext
from kvist_transformers import Engine, Request
from kvist_transformers.disaggregation.port import Port
from kvist_transformers.handle import Handle
from kvist_transformers.job import Source

#: Tiny models by family: what builds one, and tokens per block.
MODELS: dict[str, tuple[str, tuple[Any, ...], int]] = {
    "deepseek_v4": ("deepseek_v4_models:build", (), 16),
    "minimax_m3": ("minimax_m3_models:build", (), 4),
    "jamba": ("hybrid_models:hybrid_model", ("jamba",), 8),
    "qwen3_next": ("hybrid_models:hybrid_model", ("qwen3_next",), 8),
}
#: Generous: a process that starts imports torch and transformers, maybe on a busy machine.
ANSWER_S = 90.0

#: Per group, ordinal and checksum of each page of a request.
Digests = list[dict[int, int]]


def build(family: str, **arguments: Any) -> Engine:
    target, given, block_tokens = MODELS[family]
    module, _, name = target.partition(":")
    model = getattr(importlib.import_module(module), name)(*given)
    return Engine(model, memory="4MiB", block_tokens=block_tokens, max_batch_tokens=32, max_sequences=8, **arguments)


class WatchedPort(Port):
    """Keeps the checksums of what leaves and of what has come, before anything is computed on it."""

    engine: Engine
    seen: Digests

    def send(self, name: str, sequence: Any) -> None:
        super().send(name, sequence)
        self.seen = self._digests(self._transfers._sending[-1]._holds[-1].pages)

    def _told(self, job: Any, receiving: Any, outcome: Any) -> None:
        self.seen = self._digests(receiving.session.pages)
        super()._told(job, receiving, outcome)

    def _digests(self, pages: Any) -> Digests:
        return [self._group(group, listed) for group, listed in enumerate(pages)]

    def _group(self, group: int, listed: IntArray) -> dict[int, int]:
        memory = self.engine.memory.pages(group)
        # What fills up a page belongs to nobody.
        parts = [slice(p.offset, p.offset + p.byte_count) for p in self.engine.layout.groups[group].parts]
        return {
            ordinal: zlib.crc32(b"".join(memory[page, part].numpy().tobytes() for part in parts))
            for ordinal, page in enumerate(listed.tolist())
            if page != NO_PAGE
        }


class OtherProcess:
    """Use it as a context manager, which ends the process in any case."""

    def __init__(self, scheme: str, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(scheme, name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, *command: Any) -> None:
        self._pipe.send(command)

    def end(self, limit_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(limit_s), f"no answer within {limit_s:g} s"
        ok, answer = self._pipe.recv()
        assert ok, f"in the process: {answer}"
        return answer

    def call(self, *command: Any) -> Any:
        self.begin(*command)
        return self.end()

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()


class _Child:
    def __init__(self, scheme: str, name: str) -> None:
        self._scheme, self._name = scheme, name
        self.engine: Engine | None = None

    def build(self, family: str) -> bytes:
        entry = default_registry().transceiver(self._scheme)
        transport = entry.resolve(entry.info.factory)(TransportContext(self._name))
        # A machine that is busy with other tests may leave a process without a turn for seconds.
        self.port = WatchedPort(transport, patience=Patience(silent_s=15.0))
        self.engine = self.port.engine = build(family, port=self.port)
        for group in range(len(self.engine.layout.groups)):
            free = torch.from_numpy(self.engine.manager.free_pages(group)).long()
            # All ones is NaN in every float type.
            self.engine.memory.pages(group)[free] = 255
        return self.port.hello()

    def prefill(self, name: str, prompt: list[int], new: int) -> tuple[list[int], str, Digests]:
        assert self.engine is not None
        end = self._run(self.engine.prefill(Request(prompt, max_new_tokens=new), name))
        return end.tokens.tolist(), end.finish_reason, self.port.seen

    def adopt(
        self, name: str, prompt: list[int], new: int, given: list[int], hello: bytes
    ) -> tuple[list[int], int, int, Digests]:
        """Tokens, those computed of the prompt and the given ones, those that were here, and checksums."""
        assert self.engine is not None
        request, source = Request(prompt, max_new_tokens=new), Source(name, (hello,))
        end = self._run(self.engine.adopt(request, source, np.array(given, np.int32)))
        return end.tokens.tolist(), end.computed_tokens, end.reused_tokens, self.port.seen

    def close(self) -> list[str]:
        """What is left, in words."""
        assert self.engine is not None
        self.engine.close()
        self.engine.manager.check()
        stats, left = self.port.stats(), self.engine.manager.stats()
        self.engine = None
        found = {
            "open sessions": stats.open_sessions,
            "quarantined pages": stats.quarantined_pages,
            "connections": stats.peers,
            "open sequences": left.open_sequences,
            "held pages": sum(group.held for group in left.groups),
        }
        return [f"{count} {what}" for what, count in found.items() if count]

    def _run(self, handle: Handle) -> Any:
        assert self.engine is not None
        while not handle.done:
            self.engine.step()
        return handle.completion()


def _main(scheme: str, name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    child = _Child(scheme, name)
    while True:
        if child.engine is not None:
            child.engine.step()
        if pipe.poll(0.002):
            try:
                command, *arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, getattr(child, command)(*arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
