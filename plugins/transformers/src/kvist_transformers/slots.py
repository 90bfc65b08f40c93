"""State of the running requests as NumPy columns, so that a step costs the same Python for one row and for many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvist_transformers.request import Request, TokenArray
from kvist_transformers.sampling import SamplingColumns, TokenLogprobs, token_logprobs

Slots = npt.NDArray[np.int64]


class SlotTable:
    """One row per running request; a row is taken when a request is admitted for the first time and kept to its end.

    output: int32 ``[slots, width]``, generated tokens. count: how many of them. limit: most of them.
    last: int64, the newest token, which the next step computes. top_logprobs: int64, how many alternatives are wanted
    with each token, -1 where no logarithms are. logprobs: those of each row's tokens, kept by whoever has the row.
    """

    def __init__(self, slot_count: int) -> None:
        self._free = list(range(slot_count - 1, -1, -1))
        self.output = np.zeros((slot_count, 64), np.int32)
        self.count = np.zeros(slot_count, np.int64)
        self.limit = np.zeros(slot_count, np.int64)
        self.last = np.zeros(slot_count, np.int64)
        self.top_logprobs = np.full(slot_count, -1, np.int64)
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(slot_count)]
        self._stop = np.full((slot_count, 1), -1, np.int32)
        self._sampling = SamplingColumns(
            temperature=np.zeros(slot_count, np.float64),
            top_k=np.zeros(slot_count, np.int64),
            top_p=np.ones(slot_count, np.float64),
            seed=np.zeros(slot_count, np.uint64),
        )

    @property
    def free_count(self) -> int:
        """Rows that can be taken."""
        return len(self._free)

    def take(self, request: Request, seed: int, given: TokenArray) -> int:
        """A row for ``request``, for which ``given`` has been generated so far. The caller made sure that one is
        free."""
        slot = self._free.pop()
        self.output = _widened(self.output, request.max_new_tokens, 0)
        self._stop = _widened(self._stop, len(request.stop_token_ids), -1)
        self.count[slot] = len(given)
        self.output[slot, : len(given)] = given
        self.limit[slot] = request.max_new_tokens
        self.top_logprobs[slot] = -1 if request.logprobs is None else request.logprobs
        self.logprobs[slot] = []
        self._stop[slot] = -1
        self._stop[slot, : len(request.stop_token_ids)] = sorted(request.stop_token_ids)
        self._sampling.temperature[slot] = request.sampling.temperature
        self._sampling.top_k[slot] = request.sampling.top_k
        self._sampling.top_p[slot] = request.sampling.top_p
        self._sampling.seed[slot] = seed
        return slot

    def give(self, slot: int) -> None:
        """The row may be taken again."""
        self._free.append(slot)

    def sampling(self, slots: Slots) -> SamplingColumns:
        """The sampling parameters of some rows."""
        return self._sampling.take(slots)

    def append(self, slots: Slots, tokens: TokenArray) -> None:
        """Add one token to each row."""
        self.output[slots, self.count[slots]] = tokens
        self.count[slots] += 1
        self.last[slots] = tokens

    def extend(self, slot: int, tokens: TokenArray) -> int:
        """Add tokens to a row that has not ended, up to the one with which it ends. Returns how many."""
        tokens = tokens[: int(self.limit[slot] - self.count[slot])]
        stops = np.flatnonzero(np.isin(tokens, self._stop[slot]))
        if len(stops):
            tokens = tokens[: int(stops[0]) + 1]
        begin = int(self.count[slot])
        self.output[slot, begin : begin + len(tokens)] = tokens
        self.count[slot] += len(tokens)
        self.last[slot] = tokens[-1]
        return len(tokens)

    def note_logprobs(self, slots: Slots, logits: torch.Tensor, tokens: TokenArray) -> None:
        """Keep the logarithms of the tokens that the rows were just given. ``tokens`` were chosen from ``logits``,
        those of a row in order; what the row did not get is not noted."""
        for slot, logprobs in zip(slots.tolist(), token_logprobs(logits, tokens, self.top_logprobs[slots])):
            if len(self.logprobs[slot]) < self.count[slot]:
                self.logprobs[slot].append(logprobs)

    def ended(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which rows have ended, by a stop token or by their limit."""
        ended: npt.NDArray[np.bool_] = self.stopped(slots) | (self.count[slots] >= self.limit[slots])
        return ended

    def stopped(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Whether the newest token of each row is one of its stop tokens."""
        found: npt.NDArray[np.bool_] = (self._stop[slots] == self.last[slots, None]).any(axis=1)
        return found

    def generated(self, slot: int) -> TokenArray:
        """A copy of what the row has generated."""
        return self.output[slot, : self.count[slot]].copy()


def _widened(table: npt.NDArray[np.int32], width: int, fill: int) -> npt.NDArray[np.int32]:
    if table.shape[1] >= width:
        return table
    wider = np.full((table.shape[0], max(width, 2 * table.shape[1])), fill, np.int32)
    wider[:, : table.shape[1]] = table
    return wider
