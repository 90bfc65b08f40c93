"""The one function that transformers calls instead of its own attention, and what it is called with.

transformers hands every extra keyword argument of ``model(...)`` on to the attention function. So the step travels
with the call itself, as the argument :data:`ARGUMENT`; nothing is global, and nothing is stored on the model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from kvist.attention.base import AttentionBackend
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError, StateError
from kvist.spec import CacheSpec, Window

#: Name under which the function is registered with transformers.
NAME = "kvist"
#: Keyword argument of ``model(...)`` that carries the :class:`AttentionCall`.
ARGUMENT = "kvist_call"

#: The streams of an attention layer.
STREAMS = ("k", "v")

#: Arguments of attention functions that do not change what attention computes.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
_SERVED = frozenset({"scaling", "dropout", "sliding_window", "s_aux", "softcap", "is_causal"})


class AttentionCall(Protocol):
    """What :data:`ARGUMENT` holds."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """One layer. query ``[1, heads, T, size]``, key and value ``[1, key heads, T, size]``.

        Returns ``[1, T, heads, value size]``.
        """


def kvist_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Registered with transformers as ``"kvist"``. Raises StateError when the call carries no step."""
    call: AttentionCall | None = arguments.pop(ARGUMENT, None)
    if call is None:
        raise StateError(
            f"{type(module).__name__} was called without a step: the model is attached to a Kvist engine, or its code "
            "does not pass keyword arguments on to attention",
            hint="close the engine before using the model in another way; serve only supported model types",
        )
    return call.attend(module, query, key, value, attention_mask, arguments), None


def register() -> None:
    """Make the function known to transformers. Does nothing the second time."""
    AttentionInterface.register(NAME, kvist_attention)


class StepCall:
    """Attention of the backend's current step. One object serves all steps of an engine."""

    def __init__(self, backend: AttentionBackend, spec: CacheSpec) -> None:
        self._backend = backend
        self._windows = windows(spec)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """One layer of the current step; arguments were checked when the model was attached."""
        layer_id: int = module.layer_idx  # type: ignore[assignment]
        inputs = GQAInputs(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            _scale(query, arguments),
            self._windows[layer_id],
            0,
            arguments.get("s_aux"),
            arguments.get("softcap"),
        )
        return self._backend.forward(layer_id, inputs).unsqueeze(0)


class ProbeCall:
    """Checks, on one small forward, that the model asks only for attention that Kvist computes right.

    spec: the model's attention layers, ``None`` for a model without any.
    features: optional parts of grouped-query attention that the model uses, as backends declare them.
    """

    def __init__(self, spec: CacheSpec | None, model_type: str) -> None:
        self._layers = {} if spec is None else {layer.id: layer for layer in spec.layers}
        self._windows = {} if spec is None else windows(spec)
        self._model_type = model_type
        self._calls: list[int] = []
        self.features: set[str] = {"window"} if any(self._windows.values()) else set()

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Check one layer. Returns zeros. Raises SpecError naming the model type and the reason."""
        layer_id = getattr(module, "layer_idx", None)
        if layer_id not in self._layers:
            raise self._refusal(module, f"layer_idx={layer_id!r} is not a layer of the spec")
        self._calls.append(layer_id)
        self._check_arguments(module, mask, arguments)
        self._check_shapes(module, layer_id, query, key, value)
        window = arguments.get("sliding_window")
        if "sliding_window" in arguments and window != self._windows[layer_id]:
            raise self._refusal(
                module, f"layer {layer_id} has sliding_window={window}, its spec says {self._windows[layer_id]}"
            )
        if arguments.get("s_aux") is not None:
            self.features.add("sink_logits")
        if arguments.get("softcap") is not None:
            self.features.add("softcap")
        _scale(query, arguments)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def finish(self) -> None:
        """After the forward. Raises SpecError unless every layer of the spec attended exactly once, in order."""
        expected = sorted(self._layers)
        if self._calls != expected:
            raise SpecError(
                f"{self._model_type}: attention ran for layers {self._calls}, expected each of {expected} once",
                hint="this model's layers share or skip caches in a way the decoder spec does not describe",
            )

    def _check_arguments(self, module: torch.nn.Module, mask: torch.Tensor | None, arguments: dict[str, Any]) -> None:
        if mask is not None:
            raise self._refusal(module, "it passes an attention mask of its own")
        if arguments.get("dropout"):
            raise self._refusal(module, f"dropout={arguments['dropout']}", hint="call model.eval() first")
        if not arguments.get("is_causal", getattr(module, "is_causal", True)):
            raise self._refusal(module, "attention is not causal")
        unknown = [
            name
            for name, value in arguments.items()
            if name not in _HARMLESS and name not in _SERVED and value is not None
        ]
        if unknown:
            raise self._refusal(module, f"unknown attention argument(s) {', '.join(sorted(unknown))}")

    def _check_shapes(
        self,
        module: torch.nn.Module,
        layer_id: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        for stream, tensor in zip(self._layers[layer_id].streams, (key, value), strict=True):
            got = (tensor.shape[1], tensor.shape[3])
            if got != stream.row.shape:
                raise self._refusal(
                    module, f"layer {layer_id} stores {stream.name!r} rows of {got}, its spec says {stream.row.shape}"
                )
        if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise self._refusal(
                module, f"layer {layer_id} has queries {tuple(query.shape)} for keys {tuple(key.shape)}"
            )

    def _refusal(self, module: torch.nn.Module, why: str, hint: str | None = None) -> SpecError:
        return SpecError(
            f"{self._model_type}: {type(module).__name__} cannot be served: {why}",
            hint=hint or "run this model with transformers' own generate, or write a plugin for its attention",
        )


def attention_part(spec: CacheSpec) -> CacheSpec | None:
    """The layers with keys and values, with these streams only; ``None`` when there are none."""
    streams = {stream.name for layer in spec.layers for stream in layer.streams}
    return spec.only(STREAMS) if streams & {*STREAMS} else None


def windows(spec: CacheSpec) -> dict[int, int | None]:
    """Window in tokens by layer id, ``None`` for full attention."""
    found: dict[int, int | None] = {}
    for layer in spec.layers:
        retention = layer.streams[0].retention
        found[layer.id] = retention.tokens if isinstance(retention, Window) else None
    return found


def _scale(query: torch.Tensor, arguments: dict[str, Any]) -> float:
    scaling = arguments.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)
