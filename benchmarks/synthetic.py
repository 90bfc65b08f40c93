"""A request trace that needs no file, with the shape of a chat service's: long prompts, short outputs, some reuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvist.replay.traces import TraceRequest

_BLOCK_TOKENS = 512


def conversations(count: int, *, seed: int = 0) -> list[TraceRequest]:
    """``count`` requests of many conversations, which begin with one of four system prompts.

    Prompts have 12,000 tokens on average and up to 60,000, outputs 350; every second request goes on with an earlier
    conversation. The same seed gives the same requests everywhere.
    """
    rng = np.random.default_rng(seed)
    next_id = 1000
    histories: list[list[int]] = []
    requests = []
    for number in range(count):
        if histories and rng.random() < 0.5:
            history = histories[int(rng.integers(max(0, len(histories) - 200), len(histories)))]
        else:
            history = [int(rng.integers(4)) * 2, 0]
            history[1] = history[0] + 1
            histories.append(history)
        fresh = int(np.clip(rng.lognormal(7.9, 1.1), 32, 60_000)) // _BLOCK_TOKENS + 1
        history += range(next_id, next_id + fresh)
        next_id += fresh
        # The last block is a part of a turn, which the next turn will not share.
        length = len(history) * _BLOCK_TOKENS - int(rng.integers(1, _BLOCK_TOKENS))
        output_length = int(np.clip(rng.normal(350, 180), 1, 1000))
        requests.append(
            TraceRequest(number, number * 0.1, length, output_length, np.array(history, np.uint64), _BLOCK_TOKENS)
        )
        history[-1] = next_id
        next_id += 1
        if len(history) * _BLOCK_TOKENS > 50_000:
            histories.remove(history)
    return requests


def conversation_requests(folder: Path | None, count: int) -> list[TraceRequest] | None:
    """The first ``count`` requests of ``conversation_trace.jsonl`` in ``folder``; ``None`` if it is not there."""
    from kvist.replay.traces import read_trace

    path = None if folder is None else folder / "conversation_trace.jsonl"
    return None if path is None or not path.exists() else list(read_trace(path, limit=count))
