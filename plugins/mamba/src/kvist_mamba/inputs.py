"""What a recurrent layer hands to its backend, by kind of mixer. Imports no torch.

Every kind begins with a causal convolution over raw inputs, one channel at a time; ``T`` is ``step.token_count``, and
tensors are flattened over all rows of the step in order. Outside stay the projections before and after, and gates and
norms that are applied to the mixer's value: a backend returns that value as ``[T, width]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    import torch

#: Family name of these inputs in the registry's records; the features of a backend are the kinds that it serves.
FAMILY: Final = "recurrent"
#: The kinds of mixers: :class:`Mamba1Inputs`, :class:`Mamba2Inputs`, :class:`DeltaNetInputs`, :class:`ShortConvInputs`.
KINDS: Final = ("mamba1", "mamba2", "delta_net", "short_conv")
CONV_STATE: Final = "conv_state"
RECURRENT_STATE: Final = "recurrent_state"
#: What a layer keeps in addition where drafts are taken back by replay: inputs of the convolution, the other inputs,
#: which are one number per head, and the position of the checkpoint.
CONV_HISTORY: Final = "conv_history"
GATE_HISTORY: Final = "gate_history"
CHECKPOINT: Final = "checkpoint"
#: The streams of a recurrent layer: ``spec.only(STREAMS)`` is the part of a hybrid's spec that these backends serve.
STREAMS: Final = (CONV_STATE, RECURRENT_STATE, CONV_HISTORY, GATE_HISTORY, CHECKPOINT)


@attrs.frozen(eq=False, kw_only=True)
class RecurrentInputs:
    """The convolution that all kinds share.

    conv_inputs: ``[T, channels]``, what enters the convolution; the cache keeps the last ``K - 1`` of each sequence in
        stream ``"conv_state"``, oldest first, zeros before the first token.
    conv_weight: ``[channels, K]``, the newest input's weight last.
    conv_bias: ``[channels]`` or ``None``.
    """

    conv_inputs: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None = None


@attrs.frozen(eq=False, kw_only=True)
class ShortConvInputs(RecurrentInputs):
    """A convolution and nothing else, without activation (LFM2). The value is ``[T, channels]``."""


@attrs.frozen(eq=False, kw_only=True)
class Mamba1Inputs(RecurrentInputs):
    """Mamba (arXiv 2312.00752), diagonal recurrence per channel, ``channels = E``. The value is ``[T, E]``.

    With ``u = silu(conv)`` and ``dt, B, C = select(u)``, per token
    ``S = exp(dt A) S + dt u B``, ``y = S C + d u`` where ``dt`` stands for ``softplus(dt + dt_bias)``.

    select: from ``u [T, E]`` in the dtype of ``conv_inputs`` to ``dt [T, E]``, ``B [T, N]``, ``C [T, N]``; token by
        token, norms of these three included, the bias of ``dt`` not.
    a: ``[E, N]``, negative, float32. d: ``[E]``. dt_bias: ``[E]``.
    """

    select: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor


@attrs.frozen(eq=False, kw_only=True)
class Mamba2Inputs(RecurrentInputs):
    """Mamba-2 (arXiv 2405.21060), one decay per head, channels ``x | B | C`` = ``H P | G N | G N``. The value is
    ``[T, H P]``.

    With ``x | B | C = silu(conv)`` and ``dt`` for ``clamp(softplus(dt + dt_bias), *dt_limit)``, per token and head
    ``S = exp(dt A) S + dt x B``, ``y = S C + d x``; head ``h`` reads group ``h // (H / G)`` of ``B`` and ``C``.

    dt: ``[T, H]``, without bias. a: ``[H]``, negative, float32. d: ``[H]``. dt_bias: ``[H]``.
    """

    dt: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    dt_limit: tuple[float, float] = (0.0, math.inf)


@attrs.frozen(eq=False, kw_only=True)
class DeltaNetInputs(RecurrentInputs):
    """Gated delta net (arXiv 2412.06464), channels ``q | k | v`` = ``Hk dk | Hk dk | Hv dv``. The value is
    ``[T, Hv dv]``.

    With ``q | k | v = silu(conv)``, ``q`` and ``k`` of length 1 per head (``x / sqrt(sum(x²) + 1e-6)``) and ``q``
    divided by ``sqrt(dk)``, per token and value head ``S = exp(g) S``, ``S = S + k beta (v - S^T k)``, ``y = S^T q``;
    value head ``h`` reads key head ``h // (Hv / Hk)``.

    log_decay: ``g``, ``[T, Hv]``, at most 0, float32. beta: ``[T, Hv]``, between 0 and 1.
    """

    log_decay: torch.Tensor
    beta: torch.Tensor
