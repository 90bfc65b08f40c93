"""Request traces that need no file, and the ones that come in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvist.replay.traces import TraceRequest, read_trace

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


def short_prompts(count: int, *, unit: int = 1, seed: int = 0) -> list[TraceRequest]:
    """``count`` requests with prompts of 300 to 1,100 tokens, each after one of 50 shared beginnings, and outputs of 16
    to 112 tokens.

    A beginning has 60 to 240 tokens, about a fifth of its prompt, rounded to a multiple of ``unit``. The same seed
    gives the same requests everywhere.
    """
    rng = np.random.default_rng(seed)
    beginnings = np.rint(rng.integers(60, 241, 50) / unit).astype(int) * unit
    requests = []
    for number in range(count):
        which = int(rng.integers(len(beginnings)))
        # The beginning is one block of the trace; what comes after it belongs to the request alone.
        ids = np.array([which], np.uint64)
        length, output_length = int(rng.integers(300, 1101)), int(rng.integers(16, 113))
        requests.append(TraceRequest(number, number * 0.01, length, output_length, ids, int(beginnings[which])))
    return requests


def trace_requests(folder: Path | None, name: str, count: int | None = None) -> list[TraceRequest] | None:
    """The first ``count`` requests of a trace file in ``folder``; ``None`` if it is not there."""
    path = None if folder is None else folder / name
    return None if path is None or not path.exists() else list(read_trace(path, limit=count))
