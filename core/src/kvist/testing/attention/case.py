"""One thing to test a backend with, and what follows from it: tolerances, and lengths at which something changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from kvist.spec import CacheSpec, Retention

#: By the dtype of inputs and outputs, how far an output may be from float64: ``tolerance * (1 + |expected|)``.
#: For inputs of about one: float32 sums in another order; 16-bit outputs, and perhaps weights, are rounded.
TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

#: Longer windows than this are not looked for.
_FAR = 1 << 14


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Case:
    """One spec, and the inputs that go with it.

    name: in test ids and messages.
    spec: what is kept. Small: blocks and windows of 4 to 32 tokens make every boundary come up in a second.
    dtype: of the inputs and outputs, a key of :data:`TOLERANCES`; the rows' dtypes are the spec's.
    features: the optional parts of the family that a backend needs for this case, by the names of its record.
    device: filled in by the kit.
    """

    name: str
    spec: CacheSpec
    dtype: str = "float32"
    features: frozenset[str] = attrs.field(default=(), converter=_names)
    device: str = "cpu"

    @property
    def tolerance(self) -> float:
        """See :data:`TOLERANCES`."""
        return TOLERANCES[self.dtype]

    def __str__(self) -> str:
        return f"case {self.name!r} on {self.device}"


def boundaries(spec: CacheSpec) -> list[int]:
    """Lengths in tokens at which something changes: blocks, rows of several tokens, rings, ends of windows."""
    block = spec.block_tokens
    found = {block, 2 * block}
    for layer in spec.layers:
        for stream in layer.streams:
            if stream.tokens_per_row > 1:
                found.update((stream.tokens_per_row, block + stream.tokens_per_row))
            ring, reach = stream.retention.ring, _reach(stream.retention)
            found.update((ring, block + ring) if ring else ())
            found.update((reach, block + reach) if reach else ())
    return sorted(found)


def total_tokens(spec: CacheSpec) -> int:
    """A length beyond every boundary, and long enough for the scenarios."""
    return max(32, boundaries(spec)[-1] + spec.block_tokens + 2)


def _reach(retention: Retention) -> int:
    """The shortest length at which some row is not needed any more, 0 where all of them stay."""
    if retention.exact or not retention.droppable(_FAR, 0, 1):
        return 0
    low, high = 0, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if retention.droppable(middle, 0, 1) else (middle, high)
    return high
