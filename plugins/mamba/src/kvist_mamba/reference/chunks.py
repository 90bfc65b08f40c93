"""What the scans share: where chunks end, decay within one, and how states are handed back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch


def chunks(count: int, chunk_tokens: int, after: Collection[int]) -> Iterator[slice]:
    """``count`` tokens in chunks of ``chunk_tokens`` at most that end wherever a state is wanted."""
    begin = 0
    for end in sorted({*range(chunk_tokens, count, chunk_tokens), *after, count}):
        yield slice(begin, end)
        begin = end


class Decay:
    """Decay within a chunk, from the logarithms ``[T, heads]`` of each token's own.

    before: ``[T, heads]``, from before the chunk to after each token. between: ``[T, T, heads]``, from after token
    ``j`` to after token ``i``, 0 where ``j > i``. left: ``[T, heads]``, from after each token to the chunk's end.
    """

    def __init__(self, logarithms: torch.Tensor) -> None:
        # Differences of sums that have grown: in float32 they would lose what the sums are larger than they.
        total = torch.cumsum(logarithms, dim=0, dtype=torch.float64)
        count, dtype = len(total), logarithms.dtype
        later = torch.ones(count, count, dtype=torch.bool, device=total.device).tril()
        spans = (total[:, None, :] - total[None, :, :]).to(dtype)
        self.before = total.to(dtype).exp()
        self.between = spans.masked_fill(~later[:, :, None], float("-inf")).exp()
        self.left = (total[-1] - total).to(dtype).exp()


def stacked(states: Sequence[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """``[len(states), *shape of state]``, also for none."""
    return torch.stack(list(states)) if states else state.new_empty(0, *state.shape)
