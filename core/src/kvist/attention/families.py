"""Several backends in one cache: attention layers and state layers of a hybrid model, each served by its own family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.errors import SpecError
from kvist.layout import Order, PageLayout, order_of
from kvist.spec import CacheSpec, Stream
from kvist.step import Step

if TYPE_CHECKING:
    from kvist.memory.device import DeviceMemory


@attrs.frozen
class Need:
    """What a model needs of one family of attention.

    spec: the layers and streams that the family serves, see :meth:`CacheSpec.only`.
    features: optional parts of the family that the model uses, as backends declare them.
    """

    spec: CacheSpec
    features: frozenset[str] = frozenset()


@attrs.frozen
class FamilyPages:
    """Each stream arranged by the backend of its family. Made by :func:`page_layout`."""

    tag: str
    arrangements: Mapping[Stream, PageLayout]

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return self.arrangements[stream].part_bytes(stream, row_count)

    def order(self, stream: Stream, row_count: int) -> Order | None:
        return order_of(self.arrangements[stream], stream, row_count)


def page_layout(needs: Mapping[str, Need], backends: Mapping[str, type[AttentionBackend]]) -> PageLayout:
    """How the backends, by family, arrange the pages of one cache.

    Raises SpecError when two families would arrange streams of the same name and format differently, and what the
    backends raise for a spec that they cannot serve.
    """
    arranged = {family: backends[family].page_layout(need.spec) for family, need in needs.items()}
    if len(arranged) == 1:
        return next(iter(arranged.values()))
    chosen: dict[Stream, tuple[str, PageLayout]] = {}
    for family, arrangement in arranged.items():
        for stream in {stream for layer in needs[family].spec.layers for stream in layer.streams}:
            other, its = chosen.setdefault(stream, (family, arrangement))
            if its.tag != arrangement.tag:
                raise SpecError(
                    f"stream {stream.name!r}: family {other!r} arranges its pages as {its.tag!r}, "
                    f"family {family!r} as {arrangement.tag!r}",
                    hint="give the streams of the two families different names",
                )
    tag = ",".join(f"{family}={arrangement.tag}" for family, arrangement in sorted(arranged.items()))
    return FamilyPages(tag, {stream: arrangement for stream, (_, arrangement) in chosen.items()})


class Backends:
    """The backends of one cache by family: ``backends["gqa"].forward(layer_id, inputs)``.

    memory: made from a layout that has the :func:`page_layout` of the same needs and backends.
    """

    def __init__(
        self, memory: DeviceMemory, needs: Mapping[str, Need], backends: Mapping[str, type[AttentionBackend]]
    ) -> None:
        self._backends = {family: backends[family](BackendContext(memory, need.spec)) for family, need in needs.items()}

    def begin(self, step: Step) -> None:
        """Let each prepare the step; once per step, before the first layer."""
        for backend in self._backends.values():
            backend.begin(step)

    def __getitem__(self, family: str) -> AttentionBackend:
        return self._backends[family]
