"""Fits a Hugging Face decoder to a Kvist step: checks it once, then runs flattened ragged batches through it."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch

from kvist.attention.families import Backends, Need
from kvist.errors import SpecError, StateError
from kvist.spec import CacheSpec
from kvist_transformers.attachment import Attachment, require_eval, require_one_device
from kvist_transformers.attention import ARGUMENT, NAME, ProbeCall, StepCall, attention_part
from kvist_transformers.specs import config_digest

#: Elements of each parameter that take part in a model's fingerprint.
_FINGERPRINT_SAMPLES = 64


class DecoderAdapter:
    """One attached model. Attaching replaces the model's attention until :meth:`detach`.

    spec: what the model keeps. Served are the layers with keys and values; whatever else it has is for another adapter
        that uses this one. Without any such layer the model is only checked and run.
    needs: by family of attention, what the model needs of a backend.

    Raises SpecError, naming the model type and the reason, for a model whose attention cannot be served. The check
    runs a forward of two tokens, and takes the model's own word for shapes, windows and attention arguments.
    """

    def __init__(self, model: Any, spec: CacheSpec) -> None:
        self.model = model
        self.spec = spec
        self.model_type = str(model.config.model_type)
        self._call: StepCall | None = None
        self._attention = attention_part(spec)
        _check_model(model, self.model_type)
        self._attachment: Attachment | None = None
        try:
            self._attach()
            features = self._probe()
            self.needs = {} if self._attention is None else {"gqa": Need(self._attention, features)}
        except BaseException:
            self.detach()
            raise

    @property
    def device(self) -> torch.device:
        """Where the model is, and the cache will be."""
        device: torch.device = self.model.device
        return device

    def bind(self, backends: Backends) -> None:
        """Use these for every further forward."""
        if self._attention is not None:
            self._call = StepCall(backends["gqa"], self._attention)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Run the model over a flattened batch; the backends must have begun the step.

        token_ids, positions: int64 ``[T]``. logit_rows: int64 ``[n]``, the tokens whose logits are needed, in any
        number. Returns ``[n, vocabulary]``. Raises SpecError when another call switched the attention off.
        """
        if self._attachment is not None:
            self._attachment.require()
        return self._run(token_ids, positions, logit_rows, self._call)

    def detach(self) -> None:
        """Give the model its previous attention back. Idempotent."""
        if self._attachment is not None:
            self._attachment.detach()

    def _attach(self) -> None:
        if self._attention is None:
            return
        self._attachment = Attachment(self.model, f"{self.model_type}: ")
        # transformers warns and changes nothing where the model's code does not ask for the implementation.
        if self.model.config._attn_implementation != NAME:
            raise SpecError(
                f"{self.model_type}: {type(self.model).__name__} does not use transformers' attention interface",
                hint="run this model with transformers' own generate",
            )

    def _probe(self) -> frozenset[str]:
        probe = ProbeCall(self._attention, self.model_type)
        ids = torch.arange(2, device=self.device)
        with torch.inference_mode():
            try:
                logits = self._run(ids, ids, ids[1:], probe)
            except StateError as error:
                raise SpecError(
                    f"{self.model_type}: {type(self.model).__name__} does not pass keyword arguments on to attention",
                    hint="run this model with transformers' own generate",
                ) from error
        probe.finish()
        if logits.shape[0] != 1:
            raise SpecError(f"{self.model_type}: logits_to_keep is not obeyed: {logits.shape[0]} rows for 1")
        return frozenset(probe.features)

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, call: Any
    ) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            **{ARGUMENT: call},
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def model_fingerprint(model: Any) -> str:
    """Digest of config, dtype and a sample of every parameter: tells models apart within one process.

    Not a digest of all weights: pass an own fingerprint where content leaves the process.
    """
    hasher = hashlib.sha256(config_digest(model.config.to_dict(), str(model.dtype)).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _FINGERPRINT_SAMPLES)
        sampled = flat[::step][:_FINGERPRINT_SAMPLES].to("cpu", torch.float32)
        hasher.update(name.encode())
        hasher.update(sampled.numpy().tobytes())
    return hasher.hexdigest()


def _check_model(model: Any, model_type: str) -> None:
    if model.config.is_encoder_decoder:
        raise SpecError(f"{model_type}: cross-attention is not served", hint="use a decoder-only model")
    require_eval(model, f"{model_type}: the model")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise SpecError(
            f"{model_type}: {type(model).__name__}.forward has no argument 'logits_to_keep'",
            hint="load the model with AutoModelForCausalLM from transformers >= 4.57",
        )
    require_one_device(model, model_type)
