"""A family's inputs as the kit cuts them: per-token tensors along axis 0, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch

from kvist.errors import SpecError


def token_fields(inputs: Any, constants: Collection[str], token_count: int) -> list[str]:
    """Names of the fields that have one entry per token: all tensors but the ``constants``.

    Raises SpecError for inputs that are no attrs class, or a tensor whose axis 0 is not the tokens.
    """
    kind = type(inputs).__name__
    if not attrs.has(type(inputs)):
        raise SpecError(
            f"inputs are a {kind}, no attrs class", hint="write the family's inputs as an attrs.frozen class"
        )
    names = []
    for field in attrs.fields(type(inputs)):
        value = getattr(inputs, field.name)
        if field.name in constants or not isinstance(value, torch.Tensor):
            continue
        if not value.ndim or len(value) != token_count:
            raise SpecError(
                f"{kind}.{field.name} has shape {list(value.shape)}, expected {token_count} tokens in axis 0",
                hint=f"if it is not per token, add {field.name!r} to the test class's constants",
            )
        names.append(field.name)
    return names


def over_tokens(inputs: Any, names: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``inputs`` with ``change`` applied to every per-token tensor."""
    return attrs.evolve(inputs, **{name: change(getattr(inputs, name)) for name in names})


def over_tensors(inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``inputs`` with ``change`` applied to every tensor, constants included."""
    names = [
        field.name for field in attrs.fields(type(inputs)) if isinstance(getattr(inputs, field.name), torch.Tensor)
    ]
    return over_tokens(inputs, names, change)


def join(parts: Sequence[Any], names: Sequence[str]) -> Any:
    """The tokens of all ``parts``, one after the other; constants are the first one's."""
    return attrs.evolve(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 if it is of floats, on the CPU."""
    return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a larger tensor, contiguous in its last axis only."""
    if tensor.ndim < 2:
        wide = tensor.new_zeros(len(tensor), 2)
        wide[:, 1] = tensor
        return wide[:, 1]
    wide = tensor.new_zeros(len(tensor), 2, *tensor.shape[1:-1], tensor.shape[-1] + 3)
    view = wide[:, 1, ..., 1 : tensor.shape[-1] + 1]
    view.copy_(tensor)
    return view
