"""A Hugging Face model with a cache of its own: what runs steps, without deciding which."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kvist.attention.families import Backends, page_layout
from kvist.contract import CacheManager
from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.registry import Registry, default_registry
from kvist.restore import RestorePolicy
from kvist.step import Step
from kvist_transformers.adapter import model_fingerprint
from kvist_transformers.backends import choose_backends
from kvist_transformers.units import parse_bytes


class Runtime:
    """The model is attached until :meth:`detach`. The arguments are those of :class:`~kvist_transformers.Engine`.

    drafts: most drafts of a step that are to be taken back; asked of the model family's spec where it depends on it.
    storage: gives the cache's memory, uint8 ``[bytes]`` on a device, where others are to reach it.

    Raises PluginError for a model type that no plugin serves, SpecError for a model or size that cannot work,
    CapacityError when ``memory`` cannot hold one block.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str,
        block_tokens: int,
        backend: str | None = None,
        restore: RestorePolicy | None = None,
        fingerprint: str | None = None,
        registry: Registry | None = None,
        drafts: int = 0,
        storage: Callable[[int, torch.device], torch.Tensor] | None = None,
    ) -> None:
        registry = registry or default_registry()
        config = model.config.to_dict()
        dtype = str(model.dtype).removeprefix("torch.")
        entry = registry.cache_manager(str(config.get("model_type")))
        factory = entry.resolve(entry.info.spec_factory)
        # Families that keep every row can take any number back, and have nothing to be told.
        room = {"drafts": drafts} if drafts and "drafts" in inspect.signature(factory).parameters else {}
        self.spec = factory(
            config,
            block_tokens=block_tokens,
            dtype=dtype,
            fingerprint=fingerprint or model_fingerprint(model),
            **room,
        )
        adapter_target = entry.info.adapters.get("transformers")
        if adapter_target is None:
            raise SpecError(f"cache manager {entry} has no adapter for transformers", hint="use it with another host")
        self.adapter = entry.resolve(adapter_target)(model, self.spec)
        try:
            needs = self.adapter.needs
            chosen = choose_backends(registry, needs, device=str(self.adapter.device), dtype=dtype, name=backend)
            self.backend_names = {family: each.info.name for family, each in chosen.items()}
            classes = {family: each.resolve(each.info.factory) for family, each in chosen.items()}
            self.layout = Layout.build(self.spec, parse_bytes(memory), page_layout(needs, classes))
            own = None if storage is None else storage(self.layout.arena_bytes, torch.device(self.adapter.device))
            self.memory = DeviceMemory(self.layout, self.adapter.device, storage=own)
            self.backends = Backends(self.memory, needs, classes)
            policy = {} if restore is None else {"restore": restore}
            self.manager: CacheManager = entry.resolve(entry.info.manager_factory)(self.layout, **policy)
        except BaseException:
            self.adapter.detach()
            raise
        self.adapter.bind(self.backends)

    def forward(
        self, step: Step, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The model over a step after ``memory.apply(step)``: logits ``[n, vocabulary]`` of the wanted rows.

        token_ids, positions: int64 ``[T]`` in the step's row order. logit_rows: int64 ``[n]``.
        """
        self.backends.begin(step)
        logits: torch.Tensor = self.adapter.forward(token_ids, positions, logit_rows)
        self.memory.save(step)
        return logits

    def detach(self) -> None:
        """Give the model its own attention back. Idempotent."""
        self.adapter.detach()
