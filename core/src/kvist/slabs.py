"""How large a slab is, and how much each group's page is padded so that it divides one. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvist.spec import ceil_div

#: Pages start at multiples of this many bytes: a cache line, and a multiple of every element size.
PAGE_ALIGNMENT = 64
#: A slab of a multi-group arena aims at this part of the arena, within the bounds below.
_SLABS_PER_ARENA = 128
_SLAB_BYTES_MAX = 32 << 20
#: Multiples of a page that are tried as slabs, from each starting point.
_TRIES = 64


def align(size: int) -> int:
    """``size`` bytes rounded up to where a page may end."""
    return ceil_div(size, PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def choose_slab(sizes: Sequence[int], memory_bytes: int) -> tuple[int, list[int]]:
    """Slab bytes and padded page bytes that leave the largest part of the memory usable; of equals the smallest slab.

    sizes: bytes of each group's page, aligned. Lost are the reserved slab, what is left over at the end, the padding of
    the worst group, and half a slab for each group but one, because the last slab of a group is full by half on the
    average and the rest of it serves nobody else.
    """
    largest = max(sizes)
    if len(set(sizes)) == 1:
        # Every group has the same page: a slab of one page splits the arena without waste.
        return largest, list(sizes)
    best_usable, best_slab, best_pages = -1.0, largest, [_padded(size, largest, 0.0) for size in sizes]
    for slab in sorted(set(_candidates(sizes, memory_bytes))):
        slab_count = memory_bytes // slab
        if slab_count <= len(sizes):
            continue
        whole = (slab_count - 1 - (len(sizes) - 1) / 2) * slab / memory_bytes
        if whole <= best_usable:
            continue
        pages = [_padded(size, slab, best_usable / whole) for size in sizes]
        filled = min(size / page for size, page in zip(sizes, pages, strict=True))
        if whole * filled > best_usable + 1e-9:
            best_usable, best_slab, best_pages = whole * filled, slab, pages
    return best_slab, best_pages


def _candidates(sizes: Sequence[int], memory_bytes: int) -> Iterator[int]:
    """Slab sizes worth a look. Trying all takes a quarter of a second where pages are tiny."""
    largest = max(sizes)
    # Small slabs lose little to the reserved one, slabs of the target size little to padding.
    target = max(1, min(memory_bytes // _SLABS_PER_ARENA, _SLAB_BYTES_MAX) // largest)
    for first in (1, target):
        yield from (largest * count for count in range(first, first + _TRIES))
    exact = math.lcm(*sizes)
    yield from (exact * count for count in (1, 2, 3, 4) if exact * count <= _SLAB_BYTES_MAX)
    # Beside a huge page, e.g. a state, many small ones: a slab that suits the small ones pads the huge one by less than
    # one of them. The other way round, each of the small ones could be padded by a large part of itself.
    small = max((size for size in sizes if size < largest), default=largest)
    for multiple in (1, 2, 3, 4):
        for count in range(1, _TRIES + 1):
            unit = small * count
            yield ceil_div(largest * multiple, unit) * unit
    # Where sizes have nothing in common: a slab with many divisors suits none exactly and all a little.
    for divisors in (720, 5040):
        unit = divisors * PAGE_ALIGNMENT
        yield from (ceil_div(largest * multiple, unit) * unit for multiple in range(1, 9))


def _padded(size: int, slab_bytes: int, least_fill: float) -> int:
    """The smallest aligned divisor of ``slab_bytes`` that is at least ``size``; one that ``size`` fills to less than
    ``least_fill`` need not be exact."""
    units = slab_bytes // PAGE_ALIGNMENT
    count = slab_bytes // size
    if units % count == 0:
        return slab_bytes // count
    counts = np.arange(count, max(1, math.floor(count * least_fill)) - 1, -1)
    fitting = counts[units % counts == 0]
    return slab_bytes // int(fitting[0]) if len(fitting) else slab_bytes
