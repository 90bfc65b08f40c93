"""Taking drafts back by computing inputs once more: what a page's history is good for, step by step."""

from __future__ import annotations

import attrs
import torch

from kvist.errors import StateError
from kvist_mamba.inputs import DeltaNetInputs, Mamba2Inputs, RecurrentInputs

#: Inputs beside the convolution's, ``[T, heads]`` each, in the order in which a history has them.
_GATES: dict[type[RecurrentInputs], tuple[str, ...]] = {Mamba2Inputs: ("dt",), DeltaNetInputs: ("log_decay", "beta")}


@attrs.frozen
class Turn:
    """What a row of a step does with its page. valid: inputs of the history that count, computed once more before the
    row's own. done: of these and the row's own, how many the checkpoint moves on by; the others are the new history.
    """

    valid: int
    done: int


def turn(position: int, start: int, count: int, drafts: int, room: int) -> Turn:
    """For a row of ``count`` tokens that begins at ``start``, on a page with its checkpoint at ``position`` and a
    history of ``room`` tokens.

    Without drafts everything stays, and the checkpoint moves to the end. With drafts it stays where it is as long as
    the history has room; otherwise it moves to ``start``, and on to the last ``room`` tokens of the row, because no
    more than these can be rejected.

    Raises StateError for a page that does not belong to the row.
    """
    valid = start - position
    if not 0 <= valid <= room:
        raise StateError(
            f"a row that begins at position {start} has a state whose checkpoint is at {position}, with a history of "
            f"{room} tokens"
        )
    if not drafts:
        return Turn(valid, valid + count)
    return Turn(valid, 0 if valid + count <= room else valid + max(0, count - room))


def gates_of(inputs: RecurrentInputs, dtype: torch.dtype) -> torch.Tensor | None:
    """``[T, gates]``, or ``None`` where all inputs go through the convolution."""
    names = _GATES.get(type(inputs), ())
    return torch.cat([getattr(inputs, name).to(dtype) for name in names], dim=1) if names else None


def with_tokens(
    inputs: RecurrentInputs, conv_inputs: torch.Tensor, gates: torch.Tensor | None = None
) -> RecurrentInputs:
    """``inputs`` of the same layer for other tokens: conv_inputs ``[T, channels]``, gates ``[T, gates]``."""
    names = _GATES.get(type(inputs), ())
    if gates is None:
        return attrs.evolve(inputs, conv_inputs=conv_inputs)
    return attrs.evolve(inputs, conv_inputs=conv_inputs, **dict(zip(names, gates.chunk(len(names), dim=1))))
