"""Fits MiniMax-M3's text model to a Kvist step: the adapter for the host ``transformers``. Images are not served.

transformers hands every extra keyword argument of ``model(...)`` on to the attention function, so the step travels with
the call. An indexer gives its queries and keys instead of scores that it would compute over the flattened batch; they
reach the attention function as ``block_indices``.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from transformers import AttentionInterface
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
    apply_rotary_pos_emb,
)

from kvist.attention.base import AttentionBackend
from kvist.attention.families import Backends, Need
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError, StateError
from kvist.spec import CacheSpec
from kvist_minimax_m3.config import read_config
from kvist_minimax_m3.dtypes import FP8, require_fp8_bound
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.plugin import FAMILY, FP8_INDEX, SEVERAL_INDEX_HEADS
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.spec import cache_spec

#: Name under which the attention function is registered with transformers.
NAME = "kvist-minimax-m3"
#: Keyword argument of ``model(...)`` that carries the :class:`_Call`.
ARGUMENT = "kvist_minimax_m3_call"


@attrs.frozen(eq=False)
class _IndexRows:
    """An indexer's queries ``[T, heads, E]`` and keys ``[T, E]``, after norm and rope."""

    query: torch.Tensor
    key: torch.Tensor


@attrs.frozen(eq=False)
class _Call:
    """Attention of the backend's current step."""

    backend: AttentionBackend
    selection: Selection


class MiniMaxM3Adapter:
    """One attached model, the text model or the multimodal one, whose text model is then run. Attaching replaces the
    text model's attention and its indexers until :meth:`detach`.

    needs: by family of attention, what the model needs of a backend.

    Raises SpecError, naming the reason, for a model that cannot be served, that does not fit ``spec``, or whose index
    keys might not fit the 8 bits that ``spec`` gives them.
    """

    def __init__(self, model: Any, spec: CacheSpec) -> None:
        self.model = model
        self.spec = spec
        self._text = _text_model(model)
        shape = read_config(model.config.to_dict())
        _check_model(model, self._text, spec)
        features = set()
        if any(shape.sparse) and shape.index_heads != shape.kv_heads:
            features.add(SEVERAL_INDEX_HEADS)
        if FP8 in _index_dtypes(spec):
            features.add(FP8_INDEX)
            require_fp8_bound(shape.index_size, _largest_index_weight(self._text))
        self.needs = {FAMILY: Need(spec, frozenset(features))}
        self._selection = shape.selection
        self._call: _Call | None = None
        AttentionInterface.register(NAME, _attention)
        self._previous = self._text.config._attn_implementation
        self._text.set_attn_implementation(NAME)
        for indexer in _indexers(self._text):
            # On the instance: the class, and every other model, keeps its own.
            indexer.forward = _index_rows.__get__(indexer)

    @property
    def device(self) -> torch.device:
        """Where the model is, and the cache will be."""
        device: torch.device = self.model.device
        return device

    def bind(self, backends: Backends) -> None:
        """Use these for every further forward."""
        self._call = _Call(backends[FAMILY], self._selection)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Run the model over a flattened batch; the backends must have begun the step.

        token_ids, positions: int64 ``[T]``. logit_rows: int64 ``[n]``, the tokens whose logits are needed, in any
        number. Returns ``[n, vocabulary]``. Raises SpecError when another call switched the attention off.
        """
        if self._text.config._attn_implementation != NAME:
            raise SpecError(
                f"the attention implementation is {self._text.config._attn_implementation!r}",
                hint="something switched it while the engine was attached; do not use the model in between",
            )
        output = self._text(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **{ARGUMENT: self._call}
        )
        logits: torch.Tensor = self.model.lm_head(output.last_hidden_state[0, logit_rows])
        return logits

    def detach(self) -> None:
        """Give the model its previous attention back. Idempotent."""
        if self._text.config._attn_implementation == NAME:
            self._text.set_attn_implementation(self._previous)
        for indexer in _indexers(self._text):
            indexer.__dict__.pop("forward", None)


def _index_rows(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *_: Any,
) -> _IndexRows:
    """Takes the place of an indexer's forward; cache and positions, which follow, are the backend's business."""
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = apply_rotary_pos_emb(query, key, cos[..., : self.head_dim], sin[..., : self.head_dim])
    return _IndexRows(query[0].transpose(0, 1), key[0, 0])


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: torch.Tensor | None,
    scaling: float,
    block_indices: _IndexRows | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Registered with transformers. query ``[1, heads, T, size]``, key and value ``[1, key heads, T, size]``."""
    call: _Call | None = arguments.get(ARGUMENT)
    if call is None:
        raise StateError(
            f"{type(module).__name__} was called without a step: the model is attached to a Kvist engine",
            hint="close the engine before using the model in another way",
        )
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
    inputs: GQAInputs | SparseInputs
    if block_indices is None:
        inputs = GQAInputs(query, key, value, scaling)
    else:
        inputs = SparseInputs(query, key, value, block_indices.query, block_indices.key, scaling, call.selection)
    layer_id: int = module.layer_idx  # type: ignore[assignment]
    return call.backend.forward(layer_id, inputs).unsqueeze(0), None


def _text_model(model: Any) -> Any:
    if isinstance(model, MiniMaxM3SparseForConditionalGeneration):
        return model.model.language_model
    if isinstance(model, MiniMaxM3VLForCausalLM):
        return model.model
    raise SpecError(
        f"{type(model).__name__} is not served",
        hint="load MiniMaxM3VLForCausalLM or MiniMaxM3SparseForConditionalGeneration",
    )


def _check_model(model: Any, text: Any, spec: CacheSpec) -> None:
    what = type(model).__name__
    if model.training:
        raise SpecError(f"{what} is in training mode", hint="call model.eval() first")
    if text.config._attn_implementation == NAME:
        raise SpecError(f"{what} is attached already", hint="close the engine that it is attached to")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise SpecError(
            f"{what}: its parameters are on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}",
            hint="load it onto one device, without device_map",
        )
    expected = cache_spec(
        model.config.to_dict(),
        block_tokens=spec.block_tokens,
        dtype=spec.layers[0].streams[0].row.dtype,
        index_dtype=next(iter(_index_dtypes(spec)), None),
    )
    if expected.layers != spec.layers:
        raise SpecError(f"the spec describes other layers than {what} has", hint="make it with cache_spec(config)")


def _index_dtypes(spec: CacheSpec) -> set[str]:
    return {stream.row.dtype for layer in spec.layers for stream in layer.streams if stream.name == "index_k"}


def _indexers(text: Any) -> list[Any]:
    return [layer.self_attn.indexer for layer in text.layers if layer.self_attn.indexer is not None]


def _largest_index_weight(text: Any) -> float:
    """``max |1 + w|`` over the norms of all index keys."""
    return max(float((1 + indexer.k_norm.weight.detach().float()).abs().max()) for indexer in _indexers(text))
