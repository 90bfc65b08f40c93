"""Cases, inputs and reference of the family ``"gqa"``: an author names the backend and its features only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvist.attention.gqa import GQAInputs
from kvist.spec import CacheSpec, Heads, History, Layer, Retention, RowFormat, Stream, Window
from kvist.testing.attention.case import Case
from kvist.testing.attention.suite import AttentionBackendTests


def gqa_spec(block_tokens: int, *layers: tuple[Retention, int, int, int], dtype: str = "float32") -> CacheSpec:
    """Layers as ``(retention, key heads, head size, value head size)``."""
    return CacheSpec(
        tuple(
            Layer(
                # A model's own numbers, with layers between that keep nothing.
                3 * number + 1,
                tuple(
                    Stream(name, RowFormat((heads, size), dtype), retention, sharding=Heads(heads))
                    for name, size in (("k", key_size), ("v", value_size))
                ),
            )
            for number, (retention, heads, key_size, value_size) in enumerate(layers)
        ),
        block_tokens,
        "kit",
    )


_FULL, _NEAR = History(), Window(11)

CASES = (
    Case(name="full", spec=gqa_spec(16, (_FULL, 2, 16, 16), (_FULL, 1, 24, 40), (_FULL, 2, 16, 16))),
    Case(name="small-blocks", spec=gqa_spec(3, (_FULL, 2, 8, 8))),
    Case(name="bfloat16", spec=gqa_spec(16, (_FULL, 2, 32, 32), dtype="bfloat16"), dtype="bfloat16"),
    Case(name="float16", spec=gqa_spec(8, (_FULL, 2, 32, 32), dtype="float16"), dtype="float16"),
    Case(name="stored-as-bfloat16", spec=gqa_spec(16, (_FULL, 2, 16, 16), dtype="bfloat16")),
    Case(
        name="window",
        spec=gqa_spec(8, (_FULL, 2, 16, 16), (_NEAR, 1, 16, 16), (_NEAR, 2, 8, 8)),
        features=("window",),
    ),
    Case(
        name="sink-tokens",
        spec=gqa_spec(4, (Window(9, sinks=3), 2, 16, 16), (_FULL, 2, 16, 16)),
        features=("window", "sink_tokens"),
    ),
    Case(name="sink-logits", spec=gqa_spec(8, (_FULL, 2, 16, 16)), features=("sink_logits",)),
    Case(name="softcap", spec=gqa_spec(8, (_FULL, 2, 16, 16)), features=("softcap",)),
)

#: Query heads for each key head.
_GROUP_SIZE = 3


class GQABackendTests(AttentionBackendTests):
    """Give ``backend`` and ``features``; ``cases`` can be cut down to the dtypes that it serves."""

    cases: ClassVar[Sequence[Case]] = CASES
    constants: ClassVar[frozenset[str]] = frozenset({"sink_logits"})

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> GQAInputs:
        key, value = layer.streams
        heads, key_size = key.row.shape
        dtype = getattr(torch, case.dtype)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        window = _window(key.retention)
        sinks = torch.linspace(-1.0, 2.0, heads * _GROUP_SIZE) if "sink_logits" in case.features else None
        return GQAInputs(
            query=draw(token_count, heads * _GROUP_SIZE, key_size),
            key=draw(token_count, heads, key_size),
            value=draw(token_count, heads, value.row.shape[1]),
            scale=0.5,
            window=window[0] if window else None,
            sink_tokens=window[1] if window else 0,
            sink_logits=sinks,
            softcap=1.5 if "softcap" in case.features else None,
        )

    def reference(self, case: Case, layer: Layer, inputs: Any) -> torch.Tensor:
        stored = getattr(torch, layer.streams[0].row.dtype)
        query = inputs.query.transpose(0, 1)
        key, value = (
            rows.to(stored).double().transpose(0, 1).repeat_interleave(_GROUP_SIZE, dim=0)
            for rows in (inputs.key, inputs.value)
        )
        position = torch.arange(query.shape[1])
        distance = position[:, None] - position[None, :]
        visible = distance >= 0
        if inputs.window is not None:
            visible &= (distance < inputs.window) | (position[None, :] < inputs.sink_tokens)
        scores = query @ key.transpose(1, 2) * inputs.scale
        if inputs.softcap is not None:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        weights = torch.exp(scores.masked_fill(~visible, float("-inf")))
        total = weights.sum(-1, keepdim=True)
        if inputs.sink_logits is not None:
            total = total + torch.exp(inputs.sink_logits)[:, None, None]
        outputs: torch.Tensor = (weights / total @ value).transpose(0, 1)
        return outputs


def _window(retention: Retention) -> tuple[int, int] | None:
    """Tokens and sinks of a window, None for all."""
    return (retention.tokens, retention.sinks) if isinstance(retention, Window) else None
