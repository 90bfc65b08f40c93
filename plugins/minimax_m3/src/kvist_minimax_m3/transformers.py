"""Fits MiniMax-M3's text model to a Kvist step: the adapter for the host ``transformers``. Images are not served.

The attention function is the one of ``kvist_transformers``. An indexer gives its queries and keys instead of scores
that it would compute over the flattened batch; they reach the attention function as ``block_indices``.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
    apply_rotary_pos_emb,
)

from kvist.attention.base import AttentionBackend
from kvist.attention.families import Backends, Need
from kvist.attention.gqa import GQAInputs
from kvist.errors import SpecError
from kvist.spec import CacheSpec
from kvist_minimax_m3.config import read_config
from kvist_minimax_m3.dtypes import FP8, require_fp8_bound
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.plugin import FAMILY, FP8_INDEX, SEVERAL_INDEX_HEADS
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.spec import cache_spec
from kvist_transformers.attachment import Attachment, require_eval, require_one_device, require_unattached
from kvist_transformers.attention import ARGUMENT


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

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """One layer. query ``[1, heads, T, size]``, key and value ``[1, key heads, T, size]``."""
        query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
        index: _IndexRows | None = arguments.get("block_indices")
        inputs: GQAInputs | SparseInputs
        if index is None:
            inputs = GQAInputs(query, key, value, arguments["scaling"])
        else:
            inputs = SparseInputs(query, key, value, index.query, index.key, arguments["scaling"], self.selection)
        layer_id: int = module.layer_idx  # type: ignore[assignment]
        return self.backend.forward(layer_id, inputs).unsqueeze(0)


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
        self._attachment = Attachment(self._text, modules=[(each, _index_rows) for each in _indexers(self._text)])

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
        self._attachment.require()
        output = self._text(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **{ARGUMENT: self._call}
        )
        logits: torch.Tensor = self.model.lm_head(output.last_hidden_state[0, logit_rows])
        return logits

    def detach(self) -> None:
        """Give the model its previous attention back. Idempotent."""
        self._attachment.detach()


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
    require_eval(model, what)
    require_unattached(text, what)
    require_one_device(model, what)
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
