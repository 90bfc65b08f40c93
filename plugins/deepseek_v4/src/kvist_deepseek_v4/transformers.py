"""Fits DeepSeek-V4 to a Kvist step: the adapter for the host ``transformers``.

The attention function is the one of ``kvist_transformers``. A compressor makes no rows of its own: it leaves what it
projects on its module, where attention, which the same layer calls next, picks it up. Batches are flattened and never
padded: transformers pools padding into compressed rows.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from kvist.attention.base import AttentionBackend
from kvist.attention.families import Backends, Need
from kvist.errors import SpecError
from kvist.spec import CacheSpec
from kvist_deepseek_v4.formats import encodings, format_of
from kvist_deepseek_v4.inputs import DeepseekV4Inputs
from kvist_deepseek_v4.plugin import ENCODED_ROWS, FAMILY
from kvist_deepseek_v4.spec import cache_spec
from kvist_transformers.attachment import Attachment, require_eval, require_one_device, require_unattached
from kvist_transformers.attention import ARGUMENT

#: Attribute of a compressor with what it projected last.
_PROJECTED = "_kvist_projected"


@attrs.frozen(eq=False)
class _Call:
    """Attention of the backend's current step."""

    backend: AttentionBackend

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        _value: torch.Tensor,
        _mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """One layer. query ``[1, heads, T, D]``, key and value the same ``[1, 1, T, D]``."""
        compressor: Any = module.compressor
        projected = compressor.__dict__.pop(_PROJECTED) if compressor is not None else {}
        sinks: torch.Tensor = module.sinks  # type: ignore[assignment]
        inputs = DeepseekV4Inputs(query[0].transpose(0, 1), key[0, 0], arguments["scaling"], sinks, **projected)
        layer_id: int = module.layer_idx  # type: ignore[assignment]
        return self.backend.forward(layer_id, inputs).unsqueeze(0)


class DeepseekV4Adapter:
    """One attached model. Attaching replaces its attention and its compressors until :meth:`detach`.

    needs: by family of attention, what the model needs of a backend.

    Raises SpecError, naming the reason, for a model that cannot be served or does not fit ``spec``.
    """

    def __init__(self, model: Any, spec: CacheSpec) -> None:
        _check_model(model, spec)
        self.model = model
        self.spec = spec
        self.needs = {FAMILY: Need(spec, frozenset({ENCODED_ROWS} if encodings(spec) else ()))}
        self._call: _Call | None = None
        self._attachment = Attachment(model, modules=[(each, _project) for each in _compressors(model)])

    @property
    def device(self) -> torch.device:
        """Where the model is, and the cache will be."""
        device: torch.device = self.model.device
        return device

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments with which the model, or a layer of it, computes the backends' current step."""
        return {ARGUMENT: self._call}

    def bind(self, backends: Backends) -> None:
        """Use these for every further forward."""
        self._call = _Call(backends[FAMILY])

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Run the model over a flattened batch; the backends must have begun the step.

        token_ids, positions: int64 ``[T]``. logit_rows: int64 ``[n]``, the tokens whose logits are needed, in any
        number. Returns ``[n, vocabulary]``. Raises SpecError when another call switched the attention off.
        """
        self._attachment.require()
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            **self.arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def detach(self) -> None:
        """Give the model its previous attention back. Idempotent."""
        self._attachment.detach()
        for compressor in _compressors(self.model):
            compressor.__dict__.pop(_PROJECTED, None)


def _project(
    self: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    """Takes the place of a compressor's forward: no rows, no mask."""
    rotary = self.rotary_emb
    projected: dict[str, Any] = {
        "state": _state(self, hidden_states),
        "position_bias": self.position_bias,
        "norm": self.kv_norm.weight,
        "eps": self.kv_norm.variance_epsilon,
        "frequencies": getattr(rotary, f"{self.rope_layer_type}_inv_freq"),
    }
    indexer = getattr(self, "indexer", None)
    if indexer is not None:
        cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
        query = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
        projected |= {
            "index_query": apply_rotary_pos_emb(query, cos, sin)[0].transpose(0, 1),
            "index_weights": weights[0],
            "index_state": _state(indexer, hidden_states),
            "index_position_bias": indexer.position_bias,
            "index_norm": indexer.kv_norm.weight,
            "topk": indexer.index_topk,
        }
    setattr(self, _PROJECTED, projected)
    return hidden_states.new_empty(1, 1, 0, self.head_dim), None


def _state(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Content and gate of each token, ``[T, 2, elements]``."""
    return torch.stack((module.kv_proj(hidden_states)[0], module.gate_proj(hidden_states)[0]), dim=1)


def _check_model(model: Any, spec: CacheSpec) -> None:
    what = type(model).__name__
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise SpecError(f"{what} is not served", hint="load DeepseekV4ForCausalLM")
    require_eval(model, what)
    require_unattached(model, what)
    require_one_device(model, what)
    scalings = {
        name: getattr(compressor.rotary_emb, f"{compressor.rope_layer_type}_attention_scaling")
        for name, compressor in model.named_modules()
        if name.endswith("compressor")
    }
    for name, scaling in scalings.items():
        if scaling != 1.0:
            raise SpecError(
                f"{what}: {name} scales its rope by {scaling}",
                hint="set attention_factor=1.0 in rope_parameters['compress'], as the checkpoints are meant",
            )
    config = model.config.to_dict()
    expected = cache_spec(config, block_tokens=spec.block_tokens, dtype=format_of(spec), drafts=_drafts(spec))
    if expected.layers != spec.layers:
        raise SpecError(f"the spec describes other layers than {what} has", hint="make it with cache_spec(config)")


def _drafts(spec: CacheSpec) -> int:
    """Drafts for which a spec's rings have room; without rings, so many that there would be none."""
    limits = [stream.retention.most_drafts for layer in spec.layers for stream in layer.streams]
    return min((limit for limit in limits if limit is not None), default=spec.block_tokens)


def _compressors(model: Any) -> list[Any]:
    return [layer.self_attn.compressor for layer in model.model.layers if layer.self_attn.compressor is not None]
