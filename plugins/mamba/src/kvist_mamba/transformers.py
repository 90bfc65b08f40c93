"""Fits recurrent and hybrid Hugging Face models to Kvist steps: ``kvist_transformers.Engine`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvist.attention.families import Backends, Need
from kvist.errors import SpecError
from kvist.spec import CacheSpec
from kvist_mamba.geometry import check_shapes, recurrent_layers, value_width
from kvist_mamba.inputs import CONV_STATE, FAMILY, STREAMS, RecurrentInputs
from kvist_mamba.mixers import MIXERS, Prepare, recurrent_mixers
from kvist_transformers.adapter import DecoderAdapter

#: What a layer's recurrence computes: layer id and inputs -> value ``[T, width]``.
Recurrence = Callable[[int, RecurrentInputs], torch.Tensor]

_NOTHING = object()


class HybridAdapter:
    """One attached model. Its recurrent mixers are replaced while a step runs, and only then; its attention, if it has
    any, until :meth:`detach`.

    A mixer's projections, norms and gates stay the model's own, its recurrence is a backend's. Nothing is ever padded,
    and all positions are given.

    needs: by family of attention, what the model needs of a backend.

    Raises SpecError, naming the model type and the reason, for a model that cannot be served. The check runs a forward
    of two tokens, and takes the model's own word for shapes.
    """

    def __init__(self, model: Any, spec: CacheSpec) -> None:
        model_type = str(model.config.model_type)
        recurrent = _recurrent_part(spec)
        kind, prepare = MIXERS[model_type]
        mixers = recurrent_mixers(model) if recurrent is not None else {}
        self._compute: Recurrence | None = None
        self._replacements: list[tuple[torch.nn.Module, str, Any]] = [
            (mixer, "forward", self._forward(layer, mixer, prepare)) for layer, mixer in mixers.items()
        ]
        self._replacements += [(module, "layer_idx", index) for index, module in _attention_without_number(model)]
        probe = _Probe(recurrent, model_type)
        self._compute = probe
        try:
            with self._replaced():
                self._decoder = DecoderAdapter(model, spec)
        except AttributeError as error:
            raise SpecError(
                f"{model_type}: {type(model).__name__} is not as this plugin knows it: {error}",
                hint="use transformers >= 5.24",
            ) from error
        try:
            probe.finish()
        except BaseException:
            self.detach()
            raise
        self.needs = dict(self._decoder.needs)
        if recurrent is not None:
            self.needs[FAMILY] = Need(recurrent, frozenset({kind}))

    @property
    def device(self) -> torch.device:
        """Where the model is, and the cache will be."""
        return self._decoder.device

    def bind(self, backends: Backends) -> None:
        """Use these for every further forward."""
        self._decoder.bind(backends)
        if FAMILY in self.needs:
            self._compute = backends[FAMILY].forward

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """As :meth:`kvist_transformers.adapter.DecoderAdapter.forward`."""
        with self._replaced():
            return self._decoder.forward(token_ids, positions, logit_rows)

    def detach(self) -> None:
        """Give the model its previous attention back. Idempotent."""
        self._decoder.detach()

    def _forward(self, layer: int, mixer: torch.nn.Module, prepare: Prepare) -> Callable[..., torch.Tensor]:
        """What stands for the mixer's ``forward``: hidden states ``[1, T, hidden size]`` in, the same shape out."""

        def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            assert self._compute is not None
            inputs, finish = prepare(mixer, hidden_states[0])
            return finish(self._compute(layer, inputs)).unsqueeze(0)

        return forward

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        before = [(vars(module), name, vars(module).get(name, _NOTHING)) for module, name, _ in self._replacements]
        try:
            for module, name, value in self._replacements:
                vars(module)[name] = value
            yield
        finally:
            for attributes, name, value in before:
                if value is _NOTHING:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value


class _Probe:
    """Checks, on one small forward, that the mixers are those of the spec. Its values are zeros."""

    def __init__(self, spec: CacheSpec | None, model_type: str) -> None:
        self._layers = {} if spec is None else recurrent_layers(spec, "transformers", replays=True)
        self._model_type = model_type
        self._calls: list[int] = []

    def __call__(self, layer_id: int, inputs: RecurrentInputs) -> torch.Tensor:
        self._calls.append(layer_id)
        raw = inputs.conv_inputs
        if layer_id not in self._layers:
            return raw
        layer = self._layers[layer_id]
        check_shapes(layer, inputs, len(raw))
        return raw.new_zeros(len(raw), value_width(layer, inputs))

    def finish(self) -> None:
        """After the forward. Raises SpecError unless every recurrent layer of the spec ran exactly once, in order."""
        expected = sorted(self._layers)
        if self._calls != expected:
            raise SpecError(
                f"{self._model_type}: recurrent mixers ran for layers {self._calls}, expected each of {expected} once",
                hint="the model and its config disagree about its layers",
            )


def _recurrent_part(spec: CacheSpec) -> CacheSpec | None:
    """The recurrent layers with their states only; ``None`` when there are none."""
    has_states = any(stream.name == CONV_STATE for layer in spec.layers for stream in layer.streams)
    return spec.only(STREAMS) if has_states else None


def _attention_without_number(model: Any) -> Iterator[tuple[int, torch.nn.Module]]:
    """Attention that does not know its layer: Zamba2 shares weights between layers and numbers all of it -1."""
    for index, layer in enumerate(model.base_model.layers):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) == -1:
                yield index, module
