"""Choosing the next token of many rows at once, reproducibly.

Randomness is a pure function of (seed, number of the generated token): no generator state, so a row samples the same
token whatever else is in the batch, and after a pause and recomputation.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

#: Top-p needs the most likely tokens in order; nearly always they are among this many.
_HEAD = 1024

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@attrs.frozen(eq=False)
class SamplingColumns:
    """Sampling parameters of the rows of a batch, one NumPy column each.

    temperature: float64, 0 for greedy rows. top_k: int64, 0 for all. top_p: float64. seed: uint64.
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]

    def take(self, rows: npt.NDArray[np.int64]) -> SamplingColumns:
        """The parameters of some rows."""
        return SamplingColumns(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.seed[rows])


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row from its seed and counter: splitmix64, twice."""
    with np.errstate(over="ignore"):
        return (_mix(_mix(seeds) + counters.astype(np.uint64)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def sample(logits: torch.Tensor, columns: SamplingColumns, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The next token of every row: int32 ``[rows]``.

    logits: ``[rows, vocabulary]``, any float dtype and device. counters: tokens each row has generated so far.
    """
    # The argmax of short floats is four times slower on a CPU than this conversion and the argmax of float32.
    logits = logits.float()
    chosen = _largest(logits)
    drawn = columns.temperature > 0
    cut = (columns.top_k > 0) | (columns.top_p < 1)
    # Without a cut no order is needed, and sorting a vocabulary costs more than everything else here.
    for rows, draw in ((drawn & ~cut, _draw), (drawn & cut, _draw_cut)):
        picked = np.flatnonzero(rows)
        if len(picked):
            index = torch.from_numpy(picked).to(logits.device)
            taken = columns.take(picked)
            scaled = logits[index].double() / torch.from_numpy(taken.temperature).to(logits.device)[:, None]
            threshold = torch.from_numpy(uniforms(taken.seed, counters[picked])).to(logits.device)
            chosen[index] = draw(torch.softmax(scaled, dim=-1), taken, threshold[:, None])
    return chosen.to("cpu", torch.int32).numpy()


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest value, the first of equal ones. On a CPU torch's own is many times slower."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))


@attrs.frozen
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature, top-k and top-p.

    logprob: of the chosen token. top: ids and values of the most likely tokens, the most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: torch.Tensor, tokens: npt.NDArray[np.int32], top_counts: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Of the tokens chosen from ``logits``, ``[rows, vocabulary]``, with ``top_counts`` alternatives for each row."""
    values = torch.log_softmax(logits.float(), dim=-1)
    chosen = values.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(values.device)[:, None])[:, 0].tolist()
    top, ids = values.topk(min(int(top_counts.max(initial=0)), values.shape[1]), dim=-1)
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids[:count], row_values[:count])))
        for logprob, row_ids, row_values, count in zip(chosen, ids.tolist(), top.tolist(), top_counts.tolist())
    ]


def _draw(probabilities: torch.Tensor, _: SamplingColumns, threshold: torch.Tensor) -> torch.Tensor:
    """From the whole distribution: int64 ``[rows]``."""
    return _inverse(probabilities, threshold)


def _draw_cut(probabilities: torch.Tensor, columns: SamplingColumns, threshold: torch.Tensor) -> torch.Tensor:
    """From what top-k and top-p leave: int64 ``[rows]``."""
    device, vocabulary = probabilities.device, probabilities.shape[1]
    limits = np.where(columns.top_k > 0, np.minimum(columns.top_k, vocabulary), vocabulary)
    top_k = torch.from_numpy(limits).to(device)[:, None]
    top_p = torch.from_numpy(columns.top_p).to(device)[:, None]
    width = int(limits[columns.top_k > 0].max(initial=0))
    if (columns.top_k == 0).any():
        width = max(width, min(_HEAD, vocabulary))
    values, ids = probabilities.topk(width, dim=-1)
    if bool(((top_k > width) & (values.sum(dim=-1, keepdim=True) < top_p)).any()):
        values, ids = probabilities.sort(dim=-1, descending=True)
    kept = torch.arange(values.shape[1], device=device) < top_k
    values = torch.where(kept, values, 0.0)
    # Top-p counts within what top-k left. A token stays while the mass before it is short of top_p; the first always.
    total = torch.where(top_k < vocabulary, values.sum(dim=-1, keepdim=True), 1.0)
    before = values.cumsum(dim=-1) - values
    short = (before < top_p * total) | (top_p >= 1)
    short[:, 0] = True
    return ids.gather(1, _inverse(torch.where(short, values, 0.0), threshold)[:, None])[:, 0]


def _inverse(weights: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Index of the column in which ``threshold`` of the row's total weight is reached: int64 ``[rows]``."""
    mass = weights.cumsum(dim=-1)
    position = torch.searchsorted(mass, threshold * mass[:, -1:], right=True)
    # Rounding must not step onto a column without weight.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1, keepdim=True)
    return torch.minimum(position, last)[:, 0]
