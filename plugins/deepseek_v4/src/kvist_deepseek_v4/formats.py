"""What rows are stored as: plain elements, or bytes that a format names, and how a page holds the latter. No torch.

A format's name says all that another reader has to know, the rotation of index rows too, and is part of the page
layout's tag. So caches of two formats are never taken for one another: tiers and transfers refuse.
"""

from __future__ import annotations

import attrs

from kvist.errors import SpecError
from kvist.layout import Order, PageLayout, RowMajor
from kvist.spec import CacheSpec, RowFormat, Stream, ceil_div

#: A row of key and value: all but the last, rotating elements as e4m3 in blocks of 64 with a scale each, those in
#: bfloat16; the scales are ue8m0, filled up to 8 bytes.
PACKED = "e4m3-ue8m0x64-bf16"
#: An index row, turned by a Hadamard matrix: as e4m3 with one float32 scale, a power of two.
INDEX_FP8 = "hadamard-e4m3-f32"
#: An index row, turned by a Hadamard matrix: as e2m1, two in a byte, in blocks of 32 with a ue8m0 scale each.
INDEX_MXFP4 = "hadamard-e2m1-ue8m0x32"

#: Elements that share a scale.
PACKED_BLOCK, MXFP4_BLOCK = 64, 32
#: A part of a page with packed rows is filled up to a multiple of so many bytes, a row's data in the released models.
PAGE_UNIT = 576
#: What a spec may be asked for beside element types: formats of ``kv`` and ``compressed``, and of ``index_k``.
FORMATS = {"fp8": (PACKED, INDEX_FP8), "fp8-mxfp4": (PACKED, INDEX_MXFP4)}


@attrs.frozen
class EncodedRow(RowFormat):
    """Bytes that stand for ``elements`` numbers.

    encoding: the format's name. rope: how many of the last elements a :data:`PACKED` row has in bfloat16.
    """

    encoding: str = attrs.field(kw_only=True)
    elements: int = attrs.field(kw_only=True)
    rope: int = attrs.field(kw_only=True, default=0)

    @property
    def data_bytes(self) -> int:
        """Bytes of a row without its scales."""
        if self.encoding == PACKED:
            return self.elements + self.rope
        return self.elements // 2 if self.encoding == INDEX_MXFP4 else self.elements

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, filled up where the format does."""
        return self.row_bytes - self.data_bytes


def packed_row(elements: int, rope: int) -> EncodedRow:
    """584 bytes for the released models' 512 elements, 64 of which rotate."""
    scales = ceil_div(ceil_div(elements - rope, PACKED_BLOCK), 8) * 8
    return EncodedRow((elements + rope + scales,), "uint8", encoding=PACKED, elements=elements, rope=rope)


def index_row(elements: int, encoding: str) -> EncodedRow:
    """132 or 68 bytes for 128 elements. Raises SpecError for a size without a Hadamard matrix."""
    if elements < 4 or elements & (elements - 1):
        raise SpecError(
            f"index rows of {elements} elements cannot be turned by a Hadamard matrix",
            hint="store the rows of this model plainly, or use a power of two from 4 on",
        )
    count = elements + 4 if encoding == INDEX_FP8 else elements // 2 + ceil_div(elements, MXFP4_BLOCK)
    return EncodedRow((count,), "uint8", encoding=encoding, elements=elements)


def elements_of(row: RowFormat) -> int:
    """How many numbers a row of one axis stands for."""
    return row.elements if isinstance(row, EncodedRow) else row.shape[-1]


@attrs.frozen
class PlanarPages:
    """Of encoded rows first the data of all, one after the other, then the scales of all, then nothing up to a multiple
    of :data:`PAGE_UNIT` bytes. Plain rows lie one after the other. Made by :func:`pages_of`."""

    tag: str

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        size = row_count * stream.row.row_bytes
        return ceil_div(size, PAGE_UNIT) * PAGE_UNIT if isinstance(stream.row, EncodedRow) else size

    def order(self, stream: Stream, row_count: int) -> Order | None:
        return None if isinstance(stream.row, EncodedRow) else Order(by_unit=False)


def encodings(spec: CacheSpec) -> dict[str, str]:
    """The encodings of a spec's streams by name; empty where all rows are plain."""
    return {
        stream.name: stream.row.encoding
        for layer in spec.layers
        for stream in layer.streams
        if isinstance(stream.row, EncodedRow)
    }


def pages_of(spec: CacheSpec) -> PageLayout:
    """How both backends arrange pages: row-major, and planar where rows are encoded, which the tag then says."""
    found = encodings(spec)
    if not found:
        return RowMajor()
    return PlanarPages("deepseek-v4-planar-1:" + ",".join(f"{name}={how}" for name, how in sorted(found.items())))


def format_of(spec: CacheSpec) -> str:
    """What :func:`~kvist_deepseek_v4.spec.cache_spec` was asked for as ``dtype``."""
    found = encodings(spec)
    if not found:
        return spec.layers[0].streams[0].row.dtype
    index = set(found.values()) - {PACKED}
    return next(name for name, (_, how) in FORMATS.items() if not index or how in index)
