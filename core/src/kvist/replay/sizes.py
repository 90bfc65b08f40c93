"""How much memory a cache gets: ``40GiB``, ``512MB``, or as much as ``1Mtok`` need."""

from __future__ import annotations

import re

import attrs

from kvist.errors import CapacityError, SpecError
from kvist.layout import Layout
from kvist.spec import CacheSpec, ceil_div

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?\s*(b|bytes|tok|tokens?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_HINT = "give bytes such as 40GiB or 512MB, or tokens such as 1Mtok or '250k tokens'"


@attrs.frozen
class MemorySize:
    """An amount of memory. ``unit`` is ``"bytes"``, or ``"tokens"``: what so many tokens take in *every* group.

    text: as it was given.
    """

    text: str
    amount: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> MemorySize:
        """Read a size. k, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024. Raises SpecError."""
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise SpecError(f"{text!r} is not a memory size", hint=_HINT)
        number, prefix, binary, unit = match.groups()
        amount = float(number) * (1024 if binary else 1000) ** _POWERS[(prefix or "").lower()]
        return cls(text, round(amount), "bytes" if unit.lower().startswith("b") else "tokens")

    def layout(self, spec: CacheSpec) -> Layout:
        """The layout of ``spec`` in this much memory. Raises CapacityError when not even one block fits."""
        if self.unit == "bytes":
            return Layout.build(spec, self.amount)
        blocks = self.amount // spec.block_tokens
        if not blocks:
            raise CapacityError(
                f"{self.text!r} is less than one block of {spec.block_tokens} tokens",
                hint="give the cache more memory or use smaller blocks",
            )
        return layout_of_blocks(spec, blocks)


def layout_of_blocks(spec: CacheSpec, block_count: int) -> Layout:
    """A layout in which every group has room for ``block_count`` blocks at the same time."""
    # The slab size follows from the memory, and the memory needed from the slab size, so approach it from below.
    memory_bytes = 1 << 40
    memory_bytes = sum(group.page_bytes for group in Layout.build(spec, memory_bytes).groups) * (block_count + 1)
    while True:
        try:
            layout = Layout.build(spec, memory_bytes)
        except CapacityError:
            memory_bytes *= 2
            continue
        slabs = 1 + sum(ceil_div(block_count, layout.slab_bytes // group.page_bytes) for group in layout.groups)
        if slabs <= layout.slab_count:
            return layout
        memory_bytes = slabs * layout.slab_bytes
