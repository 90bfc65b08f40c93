"""The contract between an engine and whatever computes attention over Kvist's pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import attrs

from kvist.layout import PageLayout
from kvist.spec import CacheSpec
from kvist.step import Step

if TYPE_CHECKING:
    import torch

    from kvist.memory.device import DeviceMemory


@attrs.frozen
class BackendContext:
    """What a backend is built from. May gain attributes in later versions; never loses one within a major.

    memory: the device memory; ``memory.layout`` is the layout built with this backend's own page layout.
    spec: the layers and streams that the backend serves: all of the memory's, or its part of a cache that several
        backends share, see :class:`~kvist.attention.families.Backends`.
    """

    memory: DeviceMemory
    spec: CacheSpec = attrs.field(default=attrs.Factory(lambda self: self.memory.layout.spec, takes_self=True))


class AttentionBackend(ABC):
    """Writes a layer's new rows and attends over its pages.

    One instance serves one cache. ``begin`` is called once per step, before the first layer; then ``forward`` once
    per layer. One call writes and reads, because a layer's streams agree only after the whole layer ran.
    A backend never changes a step or its tables, never touches pages the step does not name, and reads no row at or
    beyond a sequence's length. The whole contract, in numbered clauses, is in ``docs/reference/contract/backends.md``;
    :class:`kvist.testing.attention.AttentionBackendTests` tries it.
    """

    @classmethod
    @abstractmethod
    def page_layout(cls, spec: CacheSpec) -> PageLayout:
        """How this backend arranges the parts of a page for ``spec``.

        Raises SpecError, naming the value, for a dtype, head size or block size it cannot serve.
        """

    @abstractmethod
    def __init__(self, context: BackendContext) -> None:
        """Take views of the memory. Allocates scratch; does not touch pages."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Prepare the step's metadata once for all layers. ``step`` stays valid until the next ``begin``."""

    @abstractmethod
    def forward(self, layer_id: int, inputs: Any) -> torch.Tensor:
        """Write the layer's new rows, then attend.

        ``inputs`` is the family's own frozen class; its tensors are flattened over the step's rows in order, and may
        be reused by the caller afterwards. Returns ``[token_count, ...]``, of the family's shape (``query heads, value
        head size`` for attention) and in the inputs' dtype, valid until the next call.
        """
